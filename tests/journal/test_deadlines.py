"""A deadline is enforced whatever the request waits for: by the ingress with its connection, and by
the search of the queues.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from serve_app import timings
from serve_app.clock import SYSTEM, Clock, RedisClock
from serve_app.contract import Reason, State
from serve_app.dispatch.deadlines import Deadlines
from serve_app.errors import RequestRefused
from serve_app.ingress.answer import Answer
from serve_app.ingress.disconnects import Disconnects
from serve_app.journal.facts import RequestFacts
from serve_app.journal.followers import Followers
from serve_app.policy.classes import CLASSES
from serve_app.request_queue.overdue import Waiting
from tests.journal.journal_helpers import SUMMARY, PrivateRedis, World, world
from tests.turned_clock import TurnedClock
from tests.waiting import PATIENCE_S, eventually

TIMEOUT_S = 0.3


def deadlines(w: World, clock: Clock = SYSTEM) -> Deadlines:
    waiting = Waiting(w.redis, [w.queue().stream(name) for name in CLASSES])
    return Deadlines(w.endings, waiting, RedisClock(clock))


async def admit(w: World, request_id: str = "req_1", timeout_s: float = TIMEOUT_S) -> RequestFacts:
    now_ms = int(time.time() * 1000)
    facts = RequestFacts(
        "standard", "t", "s", "m", False, now_ms, now_ms + int(timeout_s * 1000), w.channel
    )
    await w.accept(request_id, facts)
    return facts


class Client:
    """Waits for one answer, as the ingress's HTTP server does for a client."""

    def __init__(self, w: World, hub: Followers, facts: RequestFacts, keeps: Deadlines) -> None:
        self.disconnects = Disconnects(
            w.settings, w.redis, w.store, hub, "ingress-1", w.endings, RedisClock()
        )
        self.sent: list[dict[str, Any]] = []
        self._deadline_ms = facts.deadline_ms
        follower = hub.follow_new("req_1")
        self._answer = Answer(
            follower,
            self.disconnects,
            keeps,
            "/v1/completions",
            streamed=False,
            as_events=False,
            admitted_ms=facts.admitted_ms,
            deadline_ms=facts.deadline_ms,
            heartbeat_s=10.0,
        )

    async def refused(self) -> RequestRefused:
        """The refusal that it got, not before its deadline."""
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RequestRefused) as refusal:
                await self._answer({}, None, self._send)
        assert time.time() >= self._deadline_ms / 1000
        return refusal.value

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


async def ending(w: World) -> tuple[str | None, str | None]:
    """State and reason of the ending; empty if there is none."""
    return next(
        ((entry.state, entry.reason) for entry in await w.entries() if entry.ends), ("", "")
    )


async def test_a_client_is_answered_a_moment_after_its_deadline_however_late_it_is(
    w: World,
) -> None:
    clock, deadline_s = TurnedClock(), 1_000.0
    keeps, due_s = deadlines(w, clock), []
    for left_s in (60.0, 0.0, -60.0):
        clock.unix_offset_s = deadline_s - left_s - clock.now_s
        due_s.append(keeps.due_in_s(int(deadline_s * 1000)))
    assert due_s == [61.0, 1.0, 1.0]


async def test_a_client_of_an_unclaimed_request_is_answered_at_its_deadline(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "EXPIRE_WITHIN_S", 60.0)  # no machine is too slow to record it
    hub, facts = await w.hub(), await admit(w)
    refusal = await Client(w, hub, facts, deadlines(w)).refused()
    assert (refusal.status, refusal.reason) == (504, Reason.DEADLINE)
    assert await ending(w) == ("expired", "deadline")
    assert hub.request_ids == []


async def test_an_answer_from_the_worker_at_its_deadline_wins(w: World) -> None:
    hub, facts = await w.hub(), await admit(w, timeout_s=0.0)
    client = Client(w, hub, facts, deadlines(w))
    attempt = await w.opened(await w.writer())
    attempt.finish(State.EXPIRED, Reason.DEADLINE, SUMMARY, None)
    await attempt.closed
    assert (await client.refused()).reason == Reason.DEADLINE
    assert len([entry for entry in await w.entries() if entry.ends]) == 2, (
        "the seal, and what follows it"
    )


async def test_a_client_is_answered_at_its_deadline_while_redis_hangs_and_redis_is_updated_later(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with world(private_redis.url, namespace) as w:
        hub, facts, keeps = await w.hub(), await admit(w), deadlines(w)
        client = Client(w, hub, facts, keeps)
        os.kill(private_redis.pid, signal.SIGSTOP)
        try:
            for follower in hub._followers["req_1"]:
                follower.wake(stale=True)  # it will wait for Redis when its time comes
            assert (await client.refused()).reason == Reason.DEADLINE
        finally:
            os.kill(private_redis.pid, signal.SIGCONT)
        await keeps.sweep()
        assert await ending(w) == ("expired", "deadline")


async def test_what_a_client_was_told_is_written_later_though_no_line_shows_it(w: World) -> None:
    await admit(w, timeout_s=300)
    keeps = deadlines(w)
    keeps.owe("req_1")
    await keeps.sweep()
    assert await ending(w) == ("expired", "deadline")


async def test_what_waits_too_long_without_a_connection_ends_and_leaves_its_line(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "OVERDUE_A_LOOK", 3)
    monkeypatch.setattr(timings, "DEADLINE_GRACE_S", 120.0)
    queue, stream = w.queue(), w.queue().stream("standard")
    await admit(w, "claimed", -300)
    assert [entry.request_id for entry in await queue.claim(1)] == ["claimed"]
    await w.redis.xadd(stream, {"x": "nobody can decode this"})
    for number in range(6):
        await admit(w, f"patient_{number}", 300)
        await admit(w, f"late_{number}", -300)
    await admit(w, "just_late", 0)
    keeps = deadlines(w)
    looks = 0
    while any([await w.redis.exists(w.store.body_key(f"late_{number}")) for number in range(6)]):
        await keeps.sweep()
        looks += 1
    assert looks > 2, "a few entries at a time"
    left = [fields.get(b"r") for _, fields in await w.redis.xrange(stream)]
    assert left == [
        b"claimed",
        None,
        *(b"patient_%d" % number for number in range(6)),
        b"just_late",
    ]
    for number in range(6):
        *_, last = await w.entries(f"late_{number}")
        assert (last.state, last.reason) == ("expired", "deadline")


async def test_the_lines_are_looked_through_by_themselves(w: World) -> None:
    keeps = deadlines(w)
    await keeps.start()
    await admit(w, timeout_s=-60)
    await eventually(lambda: _ended(w))
    await keeps.stop()


async def _ended(w: World) -> bool:
    return await ending(w) == ("expired", "deadline")
