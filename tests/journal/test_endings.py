"""If a request ends without a worker, every listener is notified once, with its tenant and
class.
"""

from __future__ import annotations

import logging

import pytest

from serve_app.contract import Reason, State
from serve_app.endings import Ended
from serve_app.journal.facts import RequestFacts
from serve_app.journal.ids import REQUEST_ID
from serve_app.redis.keyspace import QUEUE_GROUP
from tests.journal.journal_helpers import World, complete, world

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANCELLED = Ended("req_1", State.CANCELLED, Reason.CANCELLED, "batch", "tenant-1", TRACE)


async def listened(w: World) -> list[Ended]:
    """The endings that listeners are notified of from now on. One request of `tenant-1` is
    accepted.
    """
    facts = RequestFacts("batch", "tenant-1", "s", "m", True, 1, 60_000, w.channel, trace=TRACE)
    await w.accept("req_1", facts)
    heard: list[Ended] = []
    w.endings.listen(heard.append)
    return heard


@pytest.mark.parametrize("outline_is_known", [False, True])
async def test_listeners_are_notified_once_with_request_and_tenant(
    w: World, outline_is_known: bool
) -> None:
    heard = await listened(w)
    outline = await w.store.outline("req_1") if outline_is_known else None
    assert await w.endings.end("req_1", State.CANCELLED, Reason.CANCELLED, outline)
    assert heard == [CANCELLED]
    assert not await w.endings.end("req_1", State.EXPIRED, Reason.DEADLINE, outline)
    assert not await w.endings.end("req_2", State.EXPIRED, Reason.DEADLINE)
    assert heard == [CANCELLED]
    assert [entry.state for entry in await w.entries()] == [None, State.CANCELLED]


@pytest.mark.parametrize("claimed", [False, True], ids=["waiting", "claimed"])
async def test_a_request_that_is_ended_leaves_the_queue(w: World, claimed: bool) -> None:
    """Else dead entries would fill it, and everybody else would be refused."""
    for name in ("req_1", "req_2"):
        await w.admit(name)
    lines = w.queue()
    await w.streams().prepare()
    if claimed:
        assert len(await lines.claim(2, ["standard"])) == 2
    assert await w.endings.end("req_1", State.CANCELLED, Reason.CANCELLED)
    stream = lines.stream("standard")
    ((_, left),) = await w.redis.xrange(stream)
    assert left[b"r"] == b"req_2"
    assert (await w.redis.xpending(stream, QUEUE_GROUP))["pending"] == claimed


async def test_what_its_worker_has_ended_is_not_told_of_again(w: World) -> None:
    heard = await listened(w)
    before = await w.store.outline("req_1")
    attempt = await w.opened(await w.writer())
    await complete(attempt)
    assert not await w.endings.end("req_1", State.CANCELLED, Reason.CANCELLED, before)
    assert not heard


async def test_an_unreadable_journal_ends_with_the_tenant_of_its_queue_entry(w: World) -> None:
    heard = await listened(w)
    await w.redis.delete(w.store.key("req_1"))
    await w.redis.xadd(w.store.key("req_1"), {"m": "no json"}, id=str(REQUEST_ID))
    (entry,) = await w.queue().claim(1)
    assert await w.endings.end_unreadable(entry, State.FAILED, Reason.JOURNAL_LOST)
    assert not await w.endings.end_unreadable(entry, State.FAILED, Reason.JOURNAL_LOST)
    lost = Ended("req_1", State.FAILED, Reason.JOURNAL_LOST, "batch", "tenant-1", TRACE)
    assert heard == [lost]


async def test_a_failing_listener_does_not_stop_the_others(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(ended: Ended) -> None:
        raise ValueError("a listener's own mistake")

    with caplog.at_level(logging.INFO, "hermes.endings"):
        async with world(redis_url, namespace) as w:
            w.endings.listen(fails)
            heard = await listened(w)
            assert await w.endings.end("req_1", State.CANCELLED, Reason.CANCELLED)
            assert heard == [CANCELLED]
    line, failure = caplog.records
    assert line.getMessage() == "request req_1 ended: cancelled (cancelled)"
    assert (line.__dict__["tenant"], line.__dict__["reason"]) == ("tenant-1", "cancelled")
    assert "a listener for its ending failed" in failure.getMessage()


async def test_every_ending_is_counted_with_its_class(w: World) -> None:
    await listened(w)
    await w.endings.end("req_1", State.CANCELLED, Reason.CANCELLED)
    labels = 'class="batch",reason="cancelled",state="cancelled"'
    assert f"hermes_requests_ended_total{{{labels}}} 1.0" in w.telemetry.page().decode()
