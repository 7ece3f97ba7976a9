"""`/v1/batches` on a real ingress with a folder, as OpenAI's SDK uses it, and as nobody should."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from serve_app.redis.keyspace import batch_key, batch_leader_key, file_bytes_key
from tests.journal.in_process import Door, door, in_process, keys_of, settings_of
from tests.journal.journal_helpers import World
from tests.tables import Failures
from tests.waiting import eventually

PATH = "/v1/batches"
CHATS: Final = "/v1/chat/completions"
MODEL = "hermes-tiny"
NOBODY = "batch_" + "0" * 32


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a\nb"}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body}


CONTENT = b"".join(json.dumps(line(str(n))).encode() + b"\n" for n in range(3))


@pytest.fixture
async def d(redis_url: str, namespace: str, tmp_path: Path) -> AsyncIterator[Door]:
    """An ingress that does not work on batches: another one has the lease."""
    w = World(redis_url, namespace)
    await w.redis.set(batch_leader_key(namespace, MODEL), "another")
    await w.stop()
    sections = {
        "files": {"storage": str(tmp_path / "storage")},
        "batches": {"max_open_per_tenant": 5},
        "auth": keys_of(tmp_path, "alice", "bob"),
    }
    async with door(redis_url, namespace, **sections) as made:
        made.http.headers["authorization"] = "Bearer alice"
        yield made


def sdk(d: Door, key: str = "alice") -> AsyncOpenAI:
    url = f"http://127.0.0.1:{d.port}/v1"
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


async def uploaded(d: Door, content: bytes = CONTENT, purpose: Any = "batch") -> str:
    async with sdk(d) as client:
        return (await client.files.create(file=("in.jsonl", content), purpose=purpose)).id


async def posted(d: Door, key: str = "", **fields: Any) -> httpx.Response:
    asked = {"endpoint": CHATS, "completion_window": "24h", **fields}
    return await d.http.post(PATH, json=asked, headers={"idempotency-key": key} if key else {})


async def content(d: Door, file_id: str) -> bytes:
    return (await d.http.get(f"/v1/files/{file_id}/content")).content


async def over(w: World, batch: Mapping[str, Any], state: str, **fields: Any) -> None:
    """The batch has ended, as its leader writes it."""
    fields = {"state": state, f"{state}_ms": 1_700_000_000_000, **fields}
    await w.redis.hset(batch_key(w.settings.namespace, batch["id"]), mapping=fields)


async def test_the_sdk_drives_every_method(d: Door) -> None:
    file_id = await uploaded(d)
    async with sdk(d) as client:
        made = await client.batches.create(
            input_file_id=file_id,
            endpoint=CHATS,
            completion_window="24h",
            metadata={"job": "7"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (made.object, made.status, made.input_file_id) == ("batch", "validating", file_id)
        assert (made.endpoint, made.completion_window, made.model) == (CHATS, "24h", MODEL)
        assert made.metadata == {"job": "7"}
        assert made.expires_at == made.created_at + 86_400
        assert made.request_counts is not None
        assert (made.request_counts.total, made.output_file_id, made.errors) == (0, None, None)
        assert made.usage is not None
        assert made.usage.total_tokens == 0
        assert await client.batches.retrieve(made.id) == made
        cancelled = await client.batches.cancel(made.id)
        assert (cancelled.status, cancelled.cancelled_at) == ("cancelling", None)
        assert cancelled.cancelling_at is not None
        assert await client.batches.retrieve(made.id) == cancelled
        others = [
            (
                await client.batches.create(
                    input_file_id=file_id, endpoint=CHATS, completion_window="24h"
                )
            ).id
            for _ in range(3)
        ]
        found = [one.id async for one in client.batches.list(limit=2)]
        assert sorted(found) == sorted([made.id, *others])
        assert found[-1] == made.id


async def test_another_tenants_batch_does_not_exist(d: Door) -> None:
    file_id = await uploaded(d)
    made = (await posted(d, input_file_id=file_id)).json()
    async with sdk(d, "bob") as bob:
        for call in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(made["id"])
        assert (await bob.batches.list()).data == []
        with pytest.raises(openai.BadRequestError):
            await bob.batches.list(after=made["id"])
        for fields in ({"input_file_id": file_id}, {"extra_body": {"continue_from": made["id"]}}):
            its: dict[str, Any] = {"input_file_id": None, **fields}
            with pytest.raises(openai.NotFoundError):
                await bob.batches.create(endpoint=CHATS, completion_window="24h", **its)
    assert (await d.http.get(f"{PATH}/{made['id']}")).json() == made


async def test_what_is_wrong_is_refused_with_its_field(d: Door) -> None:
    input_file_id, image = await uploaded(d), await uploaded(d, purpose="vision")
    good = {"input_file_id": input_file_id}
    many = {f"k{n}": "v" for n in range(17)}
    expires = "output_expires_after"
    hour = {"anchor": "created_at", "seconds": 3_600}
    with Failures() as failures:
        rows: list[tuple[dict[str, Any], str, int]] = [
            ({}, "input_file_id", 400),
            ({"input_file_id": 7}, "input_file_id", 400),
            ({"input_file_id": image}, "input_file_id", 400),
            ({"input_file_id": "file-" + "0" * 32}, "input_file_id", 404),
            ({"input_file_id": "x" * 100}, "input_file_id", 404),
            ({"input_file_id": "x" * 201}, "input_file_id", 400),
            ({**good, "endpoint": None}, "endpoint", 400),
            ({**good, "endpoint": "/v1/files"}, "endpoint", 400),
            ({**good, "completion_window": None}, "completion_window", 400),
            ({**good, "completion_window": 24}, "completion_window", 400),
            ({**good, "completion_window": "8d"}, "completion_window", 400),
            ({**good, "window": "night"}, "window", 400),
            ({**good, "metadata": {"a": 1}}, "metadata.a", 400),
            ({**good, "metadata": {"a": "x" * 513}}, "metadata.a", 400),
            ({**good, "metadata": many}, "metadata", 400),
            ({**good, expires: {"seconds": 3_600}}, expires, 400),
            (
                {**good, "output_expires_after": {**hour, "seconds": 60}},
                "output_expires_after",
                400,
            ),
            (
                {**good, "output_expires_after": {**hour, "anchor": "x"}},
                "output_expires_after",
                400,
            ),
            ({**good, "requests": [line("a")]}, "requests", 400),
            ({"requests": []}, "requests", 400),
            ({"requests": [7]}, "requests", 400),
            ({"requests": [line(str(n)) for n in range(1_001)]}, "requests", 400),
            ({**good, "other": 1}, "other", 400),
            ({"continue_from": NOBODY}, "continue_from", 404),
            ({"continue_from": "x" * 100}, "continue_from", 404),
            ({"continue_from": ""}, "input_file_id", 400),
        ]
        for fields, param, status in rows:
            with failures.of(fields if len(str(fields)) < 200 else param):
                answer = await posted(d, **fields)
                error = answer.json()["error"]
                assert answer.status_code == status, answer.text
                assert error["param"].startswith(param)
        for body in (b"", b"{", b"[]"):
            with failures.of(body):
                headers = {"content-type": "application/json"}
                answer = await d.http.post(PATH, content=body, headers=headers)
                assert answer.status_code == 400
        for query in ("limit=0", "limit=101", "limit=x", "after=" + "x" * 201):
            with failures.of(query):
                assert (await d.http.get(f"{PATH}?{query}")).status_code == 400
        for name in (NOBODY, "x" * 300):
            with failures.of(name):
                assert (await d.http.get(f"{PATH}/{name}")).status_code == 404
                assert (await d.http.post(f"{PATH}/{name}/cancel")).status_code == 404
    assert (await d.http.get(PATH)).json()["data"] == []


async def test_a_window_that_opens_too_late_is_refused(d: Door) -> None:
    fields: dict[str, Any] = {"requests": [line("a")]}
    made = (await posted(d, **fields, window="22:00-06:00 Europe/Berlin")).json()
    assert made["window"] == "22:00-06:00 Europe/Berlin"
    # of two that follow each other, one is closed now, and longer than for a minute
    answers = [
        await posted(d, **fields, window=window, completion_window="1m")
        for window in ("00:00-12:00", "06:00-18:00", "12:00-00:00", "18:00-06:00")
    ]
    refused = [one.json()["error"]["param"] for one in answers if one.status_code == 400]
    assert refused
    assert set(refused) == {"window"}


async def test_inline_requests_become_an_input_file(d: Door) -> None:
    asked = [line("a", temperature=1.50), line("é")]
    made = (await posted(d, requests=asked)).json()
    stored = await content(d, made["input_file_id"])
    assert [json.loads(one) for one in stored.splitlines()] == asked
    file = (await d.http.get(f"/v1/files/{made['input_file_id']}")).json()
    assert (file["purpose"], file["bytes"]) == ("batch", len(stored))


async def test_inline_requests_are_stored_as_they_were_sent(d: Door) -> None:
    long = "x" * (2 << 20)
    body = json.dumps(
        {"endpoint": CHATS, "completion_window": "1h", "requests": [line("a", user=long)]}, indent=1
    )
    headers = {"content-type": "application/json"}
    made = (await d.http.post(PATH, content=body, headers=headers)).json()
    (stored,) = (await content(d, made["input_file_id"])).splitlines()
    assert json.loads(stored) == line("a", user=long)


async def test_of_fields_with_one_name_the_last_one_counts(d: Door) -> None:
    fields = f'"endpoint": "{CHATS}", "completion_window": "1h", "requests": 3'
    body = f'{{{fields}, "requests": [{json.dumps(line("a"))}]}}'
    headers = {"content-type": "application/json"}
    made = await d.http.post(PATH, content=body, headers=headers)
    assert made.status_code == 200, made.text
    assert json.loads(await content(d, made.json()["input_file_id"])) == line("a")


async def test_a_key_stands_for_one_batch(d: Door) -> None:
    file_id = await uploaded(d)
    first = (await posted(d, "k", input_file_id=file_id)).json()
    assert (await posted(d, "k", input_file_id=file_id, metadata=None)).json() == first
    another = await posted(d, "k", input_file_id=file_id, completion_window="1h")
    assert (another.status_code, another.json()["error"]["code"]) == (422, "idempotency_conflict")
    assert (await posted(d, "l", input_file_id=file_id)).json()["id"] != first["id"]
    assert (await posted(d, input_file_id=file_id)).json()["id"] != first["id"]
    bobs = {"authorization": "Bearer bob", "idempotency-key": "k"}
    asked = {"endpoint": CHATS, "completion_window": "24h", "requests": [line("a")]}
    assert (await d.http.post(PATH, json=asked, headers=bobs)).json()["id"] != first["id"]


async def test_a_repeated_post_of_inline_requests_leaves_one_file(d: Door) -> None:
    one, two = [(await posted(d, "k", requests=[line("a")])).json() for _ in range(2)]
    assert one == two
    conflict = await posted(d, "k", requests=[line("b")])
    assert conflict.status_code == 422
    files = (await d.http.get("/v1/files")).json()["data"]
    assert [file["id"] for file in files] == [one["input_file_id"]]


async def test_a_tenant_has_only_so_many_batches_that_are_not_over(d: Door) -> None:
    for _ in range(5):
        assert (await posted(d, requests=[line("a")])).status_code == 200
    refused = await posted(d, requests=[line("a")])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
    assert "5 batches" in refused.json()["error"]["message"]
    assert len((await d.http.get("/v1/files")).json()["data"]) == 5


async def test_whose_files_take_too_much_gets_no_more_outputs(
    d: Door, redis_url: str, namespace: str
) -> None:
    """The outputs of batches are counted and never refused: the next batch is."""
    file_id = await uploaded(d)
    made = (await posted(d, "k", input_file_id=file_id)).json()
    w = World(redis_url, namespace)
    await w.redis.hincrby(file_bytes_key(namespace), "alice", 11 << 30)
    await w.stop()
    refused = await posted(d, input_file_id=file_id)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
    assert (await posted(d, "k", input_file_id=file_id)).json() == made


async def test_a_batch_goes_on_with_the_lines_that_have_failed(
    d: Door, redis_url: str, namespace: str
) -> None:
    w = World(redis_url, namespace)
    file_id = await uploaded(d)
    old = (await posted(d, input_file_id=file_id)).json()
    early = await posted(d, continue_from=old["id"])
    assert (early.status_code, early.json()["error"]["param"]) == (400, "continue_from")
    await over(w, old, "completed")
    nothing = await posted(d, continue_from=old["id"])
    assert "no line of the batch has failed" in nothing.json()["error"]["message"]
    error_file_id = await uploaded(d)
    await over(w, old, "expired", error_file=error_file_id)
    assert (await d.http.get(f"{PATH}/{old['id']}")).json()["error_file_id"] == error_file_id
    other = await posted(d, continue_from=old["id"], endpoint="/v1/completions")
    assert other.json()["error"]["param"] == "endpoint"
    made = (await posted(d, continue_from=old["id"])).json()
    assert (made["input_file_id"], made["continued_from"]) == (file_id, old["id"])
    await d.http.delete(f"/v1/files/{error_file_id}")
    assert (await posted(d, continue_from=old["id"])).status_code == 404
    await w.stop()


async def test_the_sdk_gets_every_result(redis_url: str, namespace: str, tmp_path: Path) -> None:
    storage = {"storage": str(tmp_path / "storage")}
    async with (
        in_process(settings_of(redis_url, namespace, files=storage)) as d,
        sdk(d) as client,
    ):
        lines = [line(str(n), max_tokens=3) for n in range(10)] + [line("bad", temperature=9)]
        file = "\n".join(map(json.dumps, lines)).encode()
        input_file_id = await uploaded(d, file)
        made = await client.batches.create(
            input_file_id=input_file_id, endpoint=CHATS, completion_window="24h"
        )

        async def ended() -> Any:
            now = await client.batches.retrieve(made.id)
            return now if now.status == "completed" else None

        done = await eventually(ended)
        assert done.request_counts.to_dict() == {"total": 11, "completed": 10, "failed": 1}
        assert done.usage.output_tokens == 30
        got = await client.files.content(done.output_file_id)
        answers = {one["custom_id"]: one["response"] for one in map(json.loads, got.iter_lines())}
        assert sorted(answers) == sorted(str(n) for n in range(10))
        assert {one["status_code"] for one in answers.values()} == {200}
        assert {one["body"]["usage"]["completion_tokens"] for one in answers.values()} == {3}
        (error,) = map(json.loads, (await client.files.content(done.error_file_id)).iter_lines())
        assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
        assert error["response"]["body"]["error"]["param"] == "temperature"


async def test_without_a_storage_there_are_no_batches(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace, files={"storage": ""}) as d:
        for answer in (
            await posted(d, input_file_id="file-1"),
            await d.http.get(PATH),
            await d.http.get(f"{PATH}/{NOBODY}"),
            await d.http.post(f"{PATH}/{NOBODY}/cancel"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_configured")
            assert "files.storage" in answer.json()["error"]["message"]
