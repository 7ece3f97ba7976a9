"""A request's body is stored apart from its state: only the worker reads it, and it is deleted with
the end.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from serve_app.clock import RedisClock
from serve_app.cluster.replicas import Replicas
from serve_app.contract import Answer, Outcome, Reason, State, WorkerLost
from serve_app.dispatch.attempts import Attempts
from serve_app.dispatch.quarantine import Quarantine
from serve_app.journal.entries import decode_facts, has_ended
from serve_app.journal.facts import AttemptFacts, RequestFacts, Summary
from serve_app.journal.ids import MAX_ID_PART, seal_id
from serve_app.observability.metrics import Telemetry
from serve_app.observability.tracing import Tracing
from serve_app.request_queue.dead_letters import DeadLetters
from tests.journal.in_process import calling, worker_process
from tests.journal.journal_helpers import OPENED, SUMMARY, World, add, events, finish, world
from tests.waiting import eventually

BIG = b"x" * (1 << 20)


async def admit(w: World, body: bytes = BIG, request_id: str = "req_1") -> None:
    """Admit a waiting request with this body."""
    now_ms = int(time.time() * 1000)
    facts = RequestFacts("standard", "t", "s", "m", True, now_ms, now_ms + 60_000, w.channel)
    await w.accept(request_id, facts, body)


async def sent_bytes(w: World) -> int:
    """Bytes that Redis has sent to its clients so far."""
    return int((await w.redis.info("stats"))["total_net_output_bytes"])


async def body_is_there(w: World) -> bool:
    return bool(await w.redis.exists(w.store.body_key("req_1")))


async def test_a_state_is_read_without_the_body_and_without_what_was_answered(w: World) -> None:
    await admit(w)
    attempt = await w.opened(await w.writer())
    before = await sent_bytes(w)
    for _ in range(10):
        assert [str(entry.id) for entry in await w.store.outline("req_1") or ()] == [
            "0-1",
            "1-0",
        ]
    attempt.append([], [BIG], 1)
    await eventually(lambda: not attempt.pending)
    add(attempt, 2)
    await eventually(lambda: not attempt.pending)
    found = await w.store.outline("req_1")
    assert found is not None
    assert [str(entry.id) for entry in found] == ["0-1", "1-0", "1-2"]
    assert not any(entry.body for entry in found)
    assert found[-1].events == 2
    assert await sent_bytes(w) - before < len(BIG) * 1.1, "of the last two entries, no more"


@pytest.mark.parametrize("sealed", [0, 1, 2])
async def test_an_outline_has_every_opening_and_every_seal(w: World, sealed: int) -> None:
    await admit(w)
    for epoch in (1, 2, 3):
        attempt = await w.opened(await w.writer(), epoch, b"nonce-%d" % epoch)
        for number in range(1, 4):
            attempt.append([], [b"%d" % number], 0)
            await eventually(lambda: not attempt.pending)  # noqa: B023
        if epoch == sealed:
            seal = {b"n": b"nonce-%d" % epoch, b"e": b"3", b"k": b"completed", b"w": b""}
            await w.redis.xadd(w.store.key("req_1"), {**seal}, id=str(seal_id(epoch)))
    found = await w.store.outline("req_1")
    assert found is not None
    ids = [str(entry.id) for entry in found]
    assert [name for name in ids if name.endswith("-0")] == ["1-0", "2-0", "3-0"]
    assert has_ended(found) == bool(sealed)
    assert (f"{sealed}-{MAX_ID_PART}" in ids) == bool(sealed)
    assert ids[-1] == "3-3"
    assert "1-1" not in ids


async def test_the_outline_of_a_journal_that_is_gone_or_compacted(w: World) -> None:
    assert await w.store.outline("req_1") is None
    await admit(w)
    attempt = await w.opened(await w.writer())
    attempt.append([], [BIG], 1)
    finish(attempt)
    await attempt.closed
    await eventually(lambda: _one_entry(w))
    (last,) = await w.store.outline("req_1") or []
    assert (last.state, last.events, b"z" in last.fields) == ("completed", 1, False)
    assert decode_facts(last, Summary) == SUMMARY


async def _one_entry(w: World) -> bool:
    return bool(await w.redis.xlen(w.store.key("req_1")) == 1)


async def test_opening_an_attempt_returns_the_body_in_the_same_round_trip(w: World) -> None:
    await admit(w)
    for epoch in (1, 2):
        _, entries = await (await w.writer()).open("req_1", epoch, b"n%d" % epoch, OPENED)
        assert entries[0].body == BIG
    async with w.redis.pipeline(transaction=True) as both:  # at one moment
        both.pttl(w.store.body_key("req_1"))
        both.pttl(w.store.key("req_1"))
        kept_ms = await both.execute()
    assert min(kept_ms) > 60_000
    assert abs(kept_ms[0] - kept_ms[1]) < 5_000


@pytest.mark.parametrize("end", [None, State.COMPLETED, State.FAILED])
async def test_a_body_leaves_with_the_end_of_its_request(w: World, end: State | None) -> None:
    await admit(w)
    if end is None:
        assert await w.store.end(
            "req_1", State.CANCELLED, Reason.CANCELLED, await w.store.outline("req_1") or []
        )
        assert not await body_is_there(w)
        return
    (entry,) = await w.queue().claim(1)
    attempt = await w.opened(await w.writer())
    add(attempt, 1)
    attempt.finish(end, None, SUMMARY, 1 if end is State.COMPLETED else None)
    await attempt.closed
    await w.queue().acknowledge(entry)
    assert not await body_is_there(w)
    assert await w.redis.exists(w.store.key("req_1"))


async def test_ending_a_waiting_request_frees_a_redis_that_is_full(w: World) -> None:
    await admit(w)
    outline = await w.store.outline("req_1")
    assert outline is not None
    used: int = (await w.redis.info("memory"))["used_memory"]
    await w.operator.config_set("maxmemory", used - len(BIG) // 2)
    try:
        assert await w.store.end("req_1", State.CANCELLED, Reason.CANCELLED, outline)
    finally:
        await w.operator.config_set("maxmemory", 0)
    assert has_ended(await w.entries())


async def test_a_request_whose_body_redis_has_lost_ends_with_that_reason_and_never_without_a_prompt(
    redis_url: str, namespace: str
) -> None:
    async with world(redis_url, namespace, engine={"kind": "simulated"}) as w:
        await admit(w)
        await w.redis.delete(w.store.body_key("req_1"))
        async with worker_process(w.settings) as worker:
            assert (await calling(worker)("req_1", 1, "s", "")).outcome is Outcome.ENDED
        last = (await w.entries())[-1]
        assert (last.state, last.reason) == ("failed", Reason.JOURNAL_LOST)


@pytest.mark.parametrize("full", [False, True])
async def test_a_dead_letter_keeps_the_body_whole_unless_redis_is_full(
    w: World, namespace: str, full: bool
) -> None:
    """If Redis is full, the request ends without a dead letter, because its end frees memory."""
    await admit(w)
    dead = DeadLetters(w.link, namespace, 10)

    async def execute(request_id: str, epoch: int, session: str, cause: str) -> Answer:
        opened = AttemptFacts("replica-1", "engine-1", 5, cause)
        await (await w.writer()).open(request_id, epoch, b"n%d" % epoch, opened)
        if full and epoch == 2:
            used: int = (await w.redis.info("memory"))["used_memory"]
            await w.operator.config_set("maxmemory", used - len(BIG) // 2)
        raise WorkerLost("it died")

    tracing = Tracing(w.settings.telemetry, "hermes-ingress", "ingress-1")
    attempts = Attempts(
        w.store,
        w.endings,
        w.queue(),
        dead,
        Quarantine(w.redis, namespace),
        Replicas(),
        execute,
        Telemetry(),
        tracing,
        RedisClock(),
        2,
    )
    (entry,) = await w.queue().claim(1)
    try:
        await attempts.run(entry)
    finally:
        await w.operator.config_set("maxmemory", 0)
    await tracing.stop()
    letters = await dead.read()
    assert [(one.body, one.reason, one.attempts) for one in letters] == [
        (BIG, Reason.POISON, 2)
    ] * (not full)
    assert (await w.entries())[-1].reason == Reason.POISON
    assert not await body_is_there(w)


async def test_events_of_a_long_response_do_not_pass_the_outline(w: World) -> None:
    """The cost of an outline does not grow with the response."""
    await admit(w, b"{}")
    attempt = await w.opened(await w.writer())
    for number in range(1, 301):
        add(attempt, number)
        while attempt.pending:
            await asyncio.sleep(0)
    before = await sent_bytes(w)
    assert await w.store.outline("req_1")
    small = await sent_bytes(w) - before
    await w.store.read("req_1")
    assert small * 10 < await sent_bytes(w) - before - small, len(events(1, 300))
