"""Every follower of a journal gets every byte once, with lost wake-ups, cut subscriptions and a
killed Redis.
"""

from __future__ import annotations

import asyncio
import secrets

import pytest

from serve_app import timings
from serve_app.contract import Reason, State
from serve_app.errors import RedisUnavailable
from serve_app.ingress import followers
from serve_app.ingress.followers import Follower, Followers
from serve_app.journal import reader
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import Head, encode_wakes, wake_of
from tests.journal.journal_helpers import (
    OPENED,
    SUMMARY,
    PrivateRedis,
    World,
    add,
    added,
    complete,
    events,
    everything,
    finish,
    world,
)
from tests.transcripts import transcript
from tests.turned_clock import TurnedClock
from tests.waiting import PATIENCE_S, eventually


def ending(follower: Follower) -> tuple[State, Reason | None]:
    assert follower.reader.ending is not None
    return follower.reader.ending.state, follower.reader.ending.reason


async def test_an_opening_is_told_though_no_output_follows(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "FOLLOWER_SILENCE_S", 1e6)  # nor is it read for want of news
    follower, _ = await w.followed()
    while follower.reader.attempt is None:
        await follower.wait()
    assert follower.reader.attempt == OPENED


async def test_a_follower_of_a_new_request_gets_every_byte_as_it_is_accepted(w: World) -> None:
    hub = await w.hub()
    follower = hub.follow_new("req_1")
    attempt = await w.started()
    got = b""
    for number in range(1, 6):
        add(attempt, number)
        while events(1, number) != got:
            await follower.wait()
            got += follower.reader.take()
        assert f"1-{number}" in await w.ids()  # written before sent
    finish(attempt)
    assert await everything(follower) == b""
    assert ending(follower) == ("completed", None)
    assert follower.reader.attempt == OPENED
    hub.leave(follower)
    assert hub.request_ids == []


async def test_a_request_whose_admission_takes_long_is_not_taken_for_one_that_redis_lost(
    w: World,
) -> None:
    hub = await w.hub()
    follower = hub.follow_new("req_1")
    # Redis answers late: its reply to the admission is on its way.
    await asyncio.sleep(2 * timings.FOLLOWER_SILENCE_S)
    assert follower.reader.ending is None
    attempt = await w.started()
    add(attempt, 1)
    finish(attempt)
    assert await everything(follower) == events(1, 1)


@pytest.mark.parametrize("seen", [3, 10, 15])
async def test_a_late_follower_reads_the_rest_and_then_goes_on(w: World, seen: int) -> None:
    hub = await w.hub()
    attempt = await w.started()
    for number in range(1, 11):
        await added(attempt, number)
    follower = await hub.follow("req_1", seen)
    add(attempt, *range(11, 21))
    finish(attempt)
    assert await everything(follower) == events(seen + 1, 20)


async def test_a_follower_without_any_wake_up_finds_everything_by_itself(w: World) -> None:
    hub = await w.hub()
    follower = hub.follow_new("req_1")
    await w.admit(wake="nobody-listens-here")
    attempt = await w.opened(await w.writer())
    add(attempt, *range(1, 11))
    await complete(attempt)
    assert await everything(follower) == events(1, 10)


async def test_a_stream_that_goes_on_at_another_ingress_is_woken_and_not_polled(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "FOLLOWER_SILENCE_S", 1e6)
    monkeypatch.setattr(timings, "FOREIGN_BLOCK_S", PATIENCE_S)
    hub = await w.hub("ingress-2")
    await w.admit()  # for ingress-1, which has died
    await w.admit("req_2")
    idle = await hub.follow("req_2", 0)
    attempt = await w.opened(await w.writer())
    follower = await hub.follow("req_1", 0)
    await w.operator.config_resetstat()
    got = b""
    for number in range(1, 6):
        await added(attempt, number)
        while got != events(1, number):
            await follower.wait()
            got += follower.reader.take()
    assert await looks(w, "xrange") == 0
    assert await looks(w, "xread") <= 6, "one for each event, and the next"
    joined = await hub.follow("req_1", 3)
    finish(attempt)
    assert await everything(follower) == b""
    assert await everything(joined) == events(4, 5)
    assert idle.reader.ending is None


async def test_a_foreign_stream_whose_client_does_not_read_goes_on_when_it_does(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "FOLLOWER_SILENCE_S", 1e6)
    monkeypatch.setattr(reader, "_HOLD_BYTES", 100)
    monkeypatch.setattr(timings, "FOREIGN_BLOCK_S", 0.05)
    hub = await w.hub("ingress-2")
    await w.admit()
    attempt = await w.opened(await w.writer())
    follower = await hub.follow("req_1", 0)
    for number in range(1, 101):
        await added(attempt, number)
    await eventually(lambda: follower.reader.full)
    assert follower.reader.last_event < 100
    finish(attempt)
    assert await everything(follower) == events(1, 100)


async def test_who_waits_for_a_silent_stream_is_woken_though_redis_is_away(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client needs signs of life."""
    monkeypatch.setattr(timings, "FOLLOWER_SILENCE_S", 0.02)
    hub = await w.hub()

    async def unreachable(*_: object) -> None:
        raise RedisUnavailable("gone")

    monkeypatch.setattr(w.store, "read_many", unreachable)
    follower = hub.follow_new("req_1")
    for _ in range(2):
        await follower.wait()


async def test_silent_streams_are_read_at_a_bounded_rate(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: each in its turn, and few of them soon."""
    clock = TurnedClock()
    monkeypatch.setattr(followers, "SYSTEM", clock)
    hub = Followers(w.settings, w.store, "ingress-1")
    await w.admit()
    attempt = await w.opened(await w.writer())
    many = [await hub.follow("req_1", 0) for _ in range(500)]
    for follower in many:
        follower.fed_at = clock.now_s
    await added(attempt, 1)
    clock.now_s += 2 * timings.FOLLOWER_SILENCE_S
    read = await looks(w, "xrange")
    for turn in range(1, 6):
        await hub._look(at_most=100)
        assert await looks(w, "xrange") - read == 100 * turn
    assert [follower.reader.last_event for follower in many] == [1] * len(many), "each in its turn"


async def looks(w: World, command: str) -> int:
    """How many such commands Redis has executed."""
    stats = await w.operator.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def test_a_wake_up_behind_lost_ones_makes_the_follower_read_them(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "FOLLOWER_SILENCE_S", 3600.0)  # it does not look by itself
    hub = await w.hub()
    follower = hub.follow_new("req_1")
    await w.admit(wake="nobody-listens-here")
    attempt = await w.opened(await w.writer())
    for number in range(1, 4):
        await added(attempt, number)
    last = (await w.entries())[-1]
    await w.redis.publish(w.channel, encode_wakes([wake_of("req_1", last, "1-2")]))
    got = b""
    while got != events(1, 3):
        await follower.wait()
        got += follower.reader.take()


async def test_a_cut_subscription_costs_no_byte_and_doubles_none(w: World) -> None:
    follower, attempt = await w.followed()
    reading = asyncio.create_task(everything(follower))
    killed = 0
    for number in range(1, 101):
        add(attempt, number)
        if number in (20, 60):
            await eventually(lambda: w.subscribers())
            killed += int(await w.operator.execute_command("CLIENT", "KILL", "TYPE", "pubsub"))
        await asyncio.sleep(0)
    finish(attempt)
    assert await reading == events(1, 100)
    assert killed >= 2


async def test_an_answer_larger_than_a_subscribers_buffer_costs_no_subscription(w: World) -> None:
    hub = await w.hub()
    follower = hub.follow_new("req_1")
    subscription = hub._connection
    attempt = await w.started()
    step = timings.ENTRY_BYTES
    pieces = [secrets.token_bytes(step) for _ in range(40)]  # as embeddings: barely compressible
    attempt.append([], pieces, 0, Head(200, [("content-type", "application/json")]))
    attempt.stop(State.COMPLETED, None, SUMMARY, 1)
    await attempt.closed
    assert await everything(follower) == b"".join(pieces)
    assert hub._connection is subscription
    assert max(len(value) for e in await w.entries() for value in e.fields.values()) == step


async def test_a_journal_that_is_gone_is_reported_at_once(w: World) -> None:
    hub = await w.hub()
    follower = await hub.follow("req_1", 0)
    assert ending(follower) == ("failed", "journal_lost")
    assert await w.store.read("req_1") is None
    assert await w.store.record("req_1") is None


# -- Redis dies ----------------------------------------------------------------------------------


async def stream(attempt: AttemptLog, first: int, last: int) -> None:
    """Events that arrive while other tasks may wait for Redis."""
    for number in range(first, last + 1):
        add(attempt, number)
        await asyncio.sleep(0.001)


async def whole(w: World) -> bytes | None:
    return transcript((await w.entries())[-1])


async def test_a_redis_that_comes_back_older_is_made_whole_by_the_writer(
    private_redis: PrivateRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "PACK_BYTES", 4_000)  # the writer has packed most of it
    async with world(private_redis.url, namespace) as w:
        hub = await w.hub()
        follower = hub.follow_new("req_1")
        await w.admit()
        await asyncio.to_thread(private_redis.remember)  # so that even the opening is lost
        attempt = await w.opened(await w.writer())
        got = b""
        for number in range(1, 31):
            await added(attempt, number)
        while got != events(1, 30):
            await follower.wait()
            got += follower.reader.take()
        private_redis.kill()
        private_redis.forget()
        await private_redis.start()
        assert await w.ids() == ["0-1"]
        await stream(attempt, 31, 40)
        await eventually(lambda: not attempt.pending)
        ids = await w.ids()
        assert ids[:32] == ["0-1", *(f"1-{seq}" for seq in range(31))]
        await complete(attempt)
        assert await whole(w) == events(1, 40)
        assert got + await everything(follower) == events(1, 40)


async def test_a_redis_that_forgot_the_request_ends_it_with_a_clear_reason(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with world(private_redis.url, namespace) as w:
        hub = await w.hub()
        follower = hub.follow_new("req_1")
        await asyncio.to_thread(private_redis.remember)
        attempt = await w.started()
        await added(attempt, 1)
        private_redis.kill()
        private_redis.forget()
        await private_redis.start()
        add(attempt, 2)
        assert await everything(follower) in (b"", events(1, 1))
        assert ending(follower) == ("failed", "journal_lost")
        await asyncio.wait([attempt.closed])
        assert attempt.closed.exception() is not None
        assert not await w.redis.exists(w.store.key("req_1"))


async def test_what_is_behind_each_entry_is_read_and_behind_the_end_no_error(w: World) -> None:
    await w.admit()
    await w.opened(await w.writer())
    await w.endings.end("req_1", Reason.CANCELLED)
    entries = await w.entries("req_1")
    for number, entry in enumerate(entries, 1):
        (found,) = await w.store.read_many([("req_1", entry.id)])
        assert found == (entries[number:] or [entry])
