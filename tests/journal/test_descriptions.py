"""What `GET /v1/requests/{id}` says of a request is true, or null."""

from __future__ import annotations

import pytest

from serve_app.contract import Cause, Reason
from serve_app.ingress.objects import request_object
from serve_app.journal.entries import Entry, EntryId, flatten
from tests.journal.in_process import in_process, settings_of
from tests.journal.journal_helpers import World, add
from tests.waiting import eventually


async def counts(w: World) -> tuple[int | None, int | None]:
    record = await w.store.record("req_1")
    assert record
    described = request_object("req_1", record)
    return described["events"], described["usage"] and described["usage"]["output_tokens"]


async def cancel(w: World) -> None:
    assert await w.endings.end("req_1", Reason.CANCELLED)


@pytest.mark.parametrize("written", [0, 42])
async def test_what_is_ended_from_outside_keeps_its_events(w: World, written: int) -> None:
    await w.admit()
    assert await counts(w) == (0, None)
    attempt = await w.opened(await w.writer())
    for number in range(1, written + 1):
        add(attempt, number)
    await eventually(lambda: not attempt.pending)
    assert await counts(w) == (written, None)
    await cancel(w)
    assert await counts(w) == (written, written)


async def test_what_has_not_begun_has_written_nothing(w: World) -> None:
    await w.admit()
    await cancel(w)
    assert await counts(w) == (0, 0)


async def test_events_of_earlier_attempts_count(w: World) -> None:
    await w.admit()
    attempt = await w.opened(await w.writer())
    for number in (1, 2):
        add(attempt, number)
    await eventually(lambda: not attempt.pending)
    await w.opened(await w.writer(), 2, b"nonce-2")
    assert await counts(w) == (2, None)
    void = Entry.void(EntryId(2, 1), b"nonce-2", Cause.NOT_OPENED)
    await w.redis.execute_command("XADD", w.store.key("req_1"), str(void.id), *flatten(void))
    assert await counts(w) == (2, None)
    await cancel(w)
    assert await counts(w) == (2, 2)


async def test_a_cancelled_stream_is_described_as_it_was_sent(
    redis_url: str, namespace: str
) -> None:
    engine = {"kind": "simulated", "args": {"tokens_per_s": 200}}
    async with in_process(settings_of(redis_url, namespace, engine=engine)) as d:
        streaming = d.posted("Count.")
        await eventually(lambda: d.ingress.followers.request_ids)
        page = f"/v1/requests/{d.ingress.followers.request_ids[0]}"

        async def has_begun() -> bool:
            return bool((await d.http.get(page)).json()["events"] > 3)

        await eventually(has_begun)
        cancelled = (await d.http.delete(page)).json()
        last = [line for line in (await streaming).text.splitlines() if line.startswith("id: ")][-1]
        error_and_done = 2
        assert cancelled["events"] == int(last.removeprefix("id: ")) - error_and_done
        assert cancelled["usage"]["output_tokens"] >= cancelled["events"] - 1
