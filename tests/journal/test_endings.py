"""An end without a worker is counted and logged once, with the tenant and class of its request."""

from __future__ import annotations

import logging

import pytest

from serve_app.contract import Reason, State
from serve_app.journal.entries import REQUEST_ID, RequestFacts
from serve_app.redis.keyspace import QUEUE_GROUP
from tests.journal.journal_helpers import World

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANCELLED = "request req_1 ended: cancelled (cancelled)"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "hermes.endings")
    return caplog


def told(log: pytest.LogCaptureFixture) -> list[str]:
    """The endings that were logged, all of a request of `tenant-1`."""
    for line in log.records:
        assert (line.__dict__["tenant"], line.__dict__["trace_id"]) == ("tenant-1", TRACE[3:35])
    return [line.getMessage() for line in log.records]


async def accept(w: World) -> None:
    """Accept one request of `tenant-1`."""
    facts = RequestFacts(
        "batch", "tenant-1", "s", "hermes-tiny", True, 1, 60_000, w.channel, trace=TRACE
    )
    await w.accept("req_1", facts)


@pytest.mark.parametrize("record_is_known", [False, True])
async def test_an_ending_is_told_once_with_request_and_tenant(
    w: World, log: pytest.LogCaptureFixture, record_is_known: bool
) -> None:
    await accept(w)
    record = await w.store.record("req_1") if record_is_known else None
    assert await w.endings.end("req_1", Reason.CANCELLED, record)
    assert told(log) == [CANCELLED]
    assert not await w.endings.end("req_1", Reason.DEADLINE, record)
    assert not await w.endings.end("req_2", Reason.DEADLINE)
    assert told(log) == [CANCELLED]
    assert [entry.state for entry in await w.entries()] == [None, State.CANCELLED]
    labels = 'class="batch",reason="cancelled",state="cancelled"'
    assert f"hermes_requests_ended_total{{{labels}}} 1.0" in w.telemetry.page().decode()


@pytest.mark.parametrize("claimed", [False, True], ids=["waiting", "claimed"])
async def test_a_request_that_is_ended_leaves_the_queue(w: World, claimed: bool) -> None:
    """Else dead entries would fill it, and everybody else would be refused."""
    for name in ("req_1", "req_2"):
        await w.admit(name)
    lines = w.queue()
    await w.queue().prepare()
    if claimed:
        assert len(await lines.claim(2, ["standard"])) == 2
    assert await w.endings.end("req_1", Reason.CANCELLED)
    stream = w.stream("standard")
    ((_, left),) = await w.redis.xrange(stream)
    assert left[b"r"] == b"req_2"
    assert (await w.redis.xpending(stream, QUEUE_GROUP))["pending"] == claimed


async def test_an_unreadable_journal_ends_with_the_tenant_of_its_queue_entry(
    w: World, log: pytest.LogCaptureFixture
) -> None:
    await accept(w)
    await w.redis.unlink(w.store.key("req_1"))
    await w.redis.xadd(w.store.key("req_1"), {"m": "no json"}, id=str(REQUEST_ID))
    (entry,) = await w.queue().claim(1)
    assert await w.endings.end_unreadable(entry)
    assert not await w.endings.end_unreadable(entry)
    assert told(log) == ["request req_1 ended: failed (journal_lost)"]
