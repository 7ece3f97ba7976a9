"""Stored chat completions, on a real ingress and the simulated engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from serve_app.ingress.objects import merged
from tests.journal.in_process import Door, in_process, keys_of, settings_of
from tests.journal.journal_helpers import World
from tests.tables import Failures

PATH = "/v1/chat/completions"


async def stored(d: Door, prompt: str, **fields: Any) -> str:
    """The id of a stored chat completion."""
    messages = [
        {"role": "system", "content": "Be brief.", "id": None},
        {"role": "user", "content": prompt},
    ]
    body = {"model": "hermes-tiny", "messages": messages, "max_tokens": 4, "store": True, **fields}
    answer = await d.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return f"chatcmpl-{answer.headers['x-request-id']}"


async def listed(d: Door, **params: Any) -> list[str]:
    page = (await d.http.get(PATH, params=params)).json()
    assert page["object"] == "list"
    return [one["id"] for one in page["data"]]


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
        messages = f"{PATH}/{ids[0]}/messages"
        first = (await d.http.get(messages, params={"limit": 1})).json()
        assert first["data"] == [{"id": f"{ids[0]}-0", "role": "system", "content": "Be brief."}]
        rest = (await d.http.get(messages, params={"after": first["last_id"]})).json()
        assert [one["content"] for one in rest["data"]] == ["0"]
        assert (first["has_more"], rest["has_more"]) == (True, False)
        changed = await d.http.post(f"{PATH}/{ids[0]}", json={"metadata": {"n": "1"}})
        assert changed.json()["metadata"] == {"n": "1"}
        assert await listed(d, **{"metadata[n]": "1"}) == [ids[0], ids[1], ids[3]]
        for chat_id in ids:
            gone = (await d.http.delete(f"{PATH}/{chat_id}")).json()
            assert gone == {"id": chat_id, "object": "chat.completion.deleted", "deleted": True}
        assert await listed(d) == []
        assert await w.store.kept("default") == (0, 0)
        assert not [key async for key in w.operator.scan_iter(f"{namespace}:[jbm]:*")]


async def test_a_stored_stream_has_its_usage_whether_it_was_asked_for_or_not(
    redis_url: str, namespace: str
) -> None:
    told: dict[str, Any] = {"stream_options": {"include_usage": True}}
    asked: list[dict[str, Any]] = [{}, {"stream": True}, {"stream": True, **told}]
    async with in_process(settings_of(redis_url, namespace)) as d:
        ids = [await stored(d, "Hi", **fields) for fields in asked]
        page = (await d.http.get(PATH)).json()["data"]
        alone = [(await d.http.get(f"{PATH}/{chat_id}")).json() for chat_id in ids]
        used = [one["usage"] for one in (*page, *alone)]
        assert used[0]["total_tokens"] == used[0]["prompt_tokens"] + 4
        assert used == used[:1] * 6


async def test_what_is_not_there_is_refused(tmp_path: Path, redis_url: str, namespace: str) -> None:
    auth = keys_of(tmp_path, "acme", "other")
    async with in_process(settings_of(redis_url, namespace, auth=auth)) as d:
        d.http.headers["authorization"] = "Bearer acme"
        mine = await stored(d, "Hi")
        unstored = await stored(d, "Hi", store=False)
        d.http.headers["authorization"] = "Bearer other"
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
        d.http.headers["authorization"] = "Bearer acme"
        assert await listed(d) == [mine]
        assert (await d.http.get(f"{PATH}/{unstored}")).status_code == 404
        assert (await d.http.get(f"{PATH}/{mine}")).status_code == 200, "nobody has deleted it"


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
        b'id: 8\ndata: {"id": "c", "choices": [], "usage": {"completion_tokens": 4}}\n\n',
        b"id: 9\ndata: [DONE]\n\n",
    ]
    found = merged(b"".join(events))
    assert (found["id"], found["object"]) == ("c", "chat.completion")
    assert found["usage"] == {"completion_tokens": 4}
    first, second = found["choices"]
    assert first["message"]["content"] == "Ab"
    assert first["message"]["reasoning_content"] == "Hm"
    assert first["message"]["tool_calls"] == [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]
    assert [one["token"] for one in first["logprobs"]["content"]] == ["A", "b"]
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert second["message"]["content"] == "x"
