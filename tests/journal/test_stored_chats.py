"""Stored chat completions, on a real ingress and the simulated engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from serve_app.ingress.stored_chats import merged
from tests.journal.in_process import Door, in_process, settings_of
from tests.journal.journal_helpers import World
from tests.tables import Failures

PATH = "/v1/chat/completions"


async def stored(d: Door, prompt: str, **fields: Any) -> str:
    """The id of a stored chat completion."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    body = {"model": "hermes-tiny", "messages": messages, "max_tokens": 4, "store": True, **fields}
    answer = await d.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return f"chatcmpl-{answer.headers['x-request-id']}"


async def listed(d: Door, **params: Any) -> list[str]:
    page = (await d.http.get(PATH, params=params)).json()
    assert page["object"] == "list"
    return [one["id"] for one in page["data"]]


async def test_what_is_stored_is_there_as_it_was_answered(redis_url: str, namespace: str) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        metadata = {"user": "u1"}
        whole = await stored(d, "Where?", metadata=metadata)
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await stored(d, "Where?", **usage)
        first = (await d.http.get(f"{PATH}/{whole}")).json()
        second = (await d.http.get(f"{PATH}/{streamed}")).json()
        assert (first["id"], first["metadata"]) == (whole, metadata)
        assert (second["id"], second["metadata"]) == (streamed, None)
        for name in ("object", "choices", "model"):
            assert first[name] == second[name], name
        assert second["usage"]["completion_tokens"] == 4
        messages = (await d.http.get(f"{PATH}/{whole}/messages", params={"limit": 1})).json()
        assert messages["data"] == [{"id": f"{whole}-0", "role": "system", "content": "Be brief."}]
        params = {"after": messages["last_id"]}
        rest = (await d.http.get(f"{PATH}/{whole}/messages", params=params)).json()
        assert [one["content"] for one in rest["data"]] == ["Where?"]
        assert not rest["has_more"]
        await stored(d, "Not this", store=False)
        assert await listed(d) == [whole, streamed]


async def test_chats_are_listed_changed_and_deleted(
    w: World, redis_url: str, namespace: str
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        ids = [await stored(d, f"{n}", metadata={"n": f"{n % 2}"}) for n in range(5)]
        assert await listed(d) == ids
        assert await listed(d, order="desc", limit=2) == [ids[4], ids[3]]
        assert await listed(d, after=ids[1], limit=2) == ids[2:4]
        assert await listed(d, **{"metadata[n]": "1"}) == [ids[1], ids[3]]
        assert await listed(d, model="another") == []
        changed = await d.http.post(f"{PATH}/{ids[0]}", json={"metadata": {"n": "1"}})
        assert changed.json()["metadata"] == {"n": "1"}
        assert await listed(d, **{"metadata[n]": "1"}) == [ids[0], ids[1], ids[3]]
        for chat_id in ids:
            gone = (await d.http.delete(f"{PATH}/{chat_id}")).json()
            assert gone == {"id": chat_id, "object": "chat.completion.deleted", "deleted": True}
        assert await listed(d) == []
        assert await w.store.kept("default") == (0, 0)
        assert not [key async for key in w.operator.scan_iter(f"{namespace}:[jbm]:*")]


async def test_what_is_not_there_is_refused(tmp_path: Path, redis_url: str, namespace: str) -> None:
    keys = {tenant: f"hk-{tenant}" for tenant in ("acme", "other")}
    file = tmp_path / "keys"
    digests = {tenant: hashlib.sha256(key.encode()).hexdigest() for tenant, key in keys.items()}
    lines = [f"{tenant} sha256:{digest}\n" for tenant, digest in digests.items()]
    file.write_text("".join(lines))
    auth = {"required": True, "keys_file": str(file)}
    async with in_process(settings_of(redis_url, namespace, auth=auth)) as d:
        d.http.headers["authorization"] = f"Bearer {keys['acme']}"
        mine = await stored(d, "Hi")
        unstored = await stored(d, "Hi", store=False)
        d.http.headers["authorization"] = f"Bearer {keys['other']}"
        assert await listed(d) == []
        cases: dict[str, tuple[str, str, Any]] = {
            "another's": ("GET", mine, None),
            "another's messages": ("GET", f"{mine}/messages", None),
            "change another's": ("POST", mine, {"metadata": {}}),
            "delete another's": ("DELETE", mine, None),
            "unknown": ("GET", "chatcmpl-req_0", None),
            "no id": ("GET", "x", None),
        }
        with Failures() as failures:
            for name, (method, path, body) in cases.items():
                with failures.of(name):
                    answer = await d.http.request(method, f"{PATH}/{path}", json=body)
                    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "id")
        d.http.headers["authorization"] = f"Bearer {keys['acme']}"
        assert (await d.http.get(f"{PATH}/{unstored}")).status_code == 404
        many = {"metadata": {str(n): "x" for n in range(17)}}
        assert (await d.http.post(f"{PATH}/{mine}", json=many)).status_code == 400
        assert (await d.http.get(f"{PATH}/{mine}")).status_code == 200


async def test_metadata_are_bounded(redis_url: str, namespace: str) -> None:
    sections = {"ingress": {"max_body_bytes": 4_096}}
    async with in_process(settings_of(redis_url, namespace, **sections)) as d:
        page = f"{PATH}/{await stored(d, 'Hi')}"

        async def pieces(many: int) -> AsyncIterator[bytes]:
            for _ in range(many):
                yield b" " * 1_024

        cases: dict[str, tuple[Any, int, str | None]] = {
            "a long value": (b'{"metadata": {"a": "%b"}}' % (b"x" * 513), 400, "metadata.a"),
            "a long name": (b'{"metadata": {"%b": "a"}}' % (b"x" * 65), 400, None),
            "too many": (
                json.dumps({"metadata": {str(n): "" for n in range(17)}}),
                400,
                "metadata",
            ),
            "a number": (b'{"metadata": {"a": 1}}', 400, "metadata.a"),
            "none": (b"{}", 400, "metadata"),
            "no object": (b"[]", 400, None),
            "no JSON": (b"{", 400, None),
            "deep": (b"[" * 2_000, 400, None),
            "long": (b" " * 5_000, 413, None),
            "long, in pieces": (pieces(5), 413, None),
        }
        with Failures() as failures:
            for name, (body, status, param) in cases.items():
                with failures.of(name):
                    answer = await d.http.post(page, content=body)
                    assert answer.status_code == status, answer.text
                    assert param in (None, answer.json()["error"]["param"])
        assert (await d.http.get(page)).json()["metadata"] is None
        longest = {"x" * 64: "y" * 512}
        assert (await d.http.post(page, json={"metadata": longest})).json()["metadata"] == longest
        assert (await d.http.post(page, json={"metadata": None})).json()["metadata"] is None


def chunk(delta: dict[str, Any], index: int = 0, **choice: Any) -> bytes:
    choices = [{"index": index, "delta": delta, "finish_reason": None, **choice}]
    return b"id: 1\ndata: " + json.dumps({"id": "c", "choices": choices}).encode() + b"\n\n"


def test_the_chunks_of_a_stream_make_one_answer() -> None:
    call = {"index": 0, "id": "t1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    events = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "Hm"}),
        chunk({"content": "A"}, logprobs={"content": [{"token": "A"}]}),
        chunk({"content": "x"}, 1),
        chunk({"content": "b"}, logprobs={"content": [{"token": "b"}]}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [more]}, finish_reason="tool_calls"),
        chunk({}, 1, finish_reason="stop"),
        b"id: 9\ndata: [DONE]\n\n",
    ]
    found = merged(b"".join(events))
    assert (found["id"], found["object"]) == ("c", "chat.completion")
    first, second = found["choices"]
    assert first["message"]["content"] == "Ab"
    assert first["message"]["reasoning_content"] == "Hm"
    assert first["message"]["tool_calls"] == [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]
    assert [one["token"] for one in first["logprobs"]["content"]] == ["A", "b"]
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert second["message"]["content"] == "x"
