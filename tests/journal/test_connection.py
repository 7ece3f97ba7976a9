"""Connections to Redis: a command that cannot be sent fails for its sender alone, and a Redis that
does not answer, or a connection that dies silently, is noticed by everybody who waits.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve_app import timings
from serve_app.contract import IngressLease
from serve_app.errors import (
    AnswerLost,
    RedisRefuses,
    RedisUnavailable,
    RefusedForNow,
    RequestRefused,
)
from serve_app.ingress.conversations import Conversations
from serve_app.redis.connection import RespConnection, connect
from serve_app.redis.link import RedisLink
from serve_app.settings import RedisSettings, Settings
from tests.journal.admitting import StillIngress
from tests.journal.cable import HANGING, Cable, behind
from tests.journal.journal_helpers import (
    OPENED,
    World,
    add,
    complete,
    events,
    everything,
    redis_settings,
    world,
)
from tests.tables import each
from tests.waiting import PATIENCE_S, eventually
from workers.journal_writer import JournalWriter

DIGITS_4301, BITS_65 = 10**4_300, 2**64
UNSENDABLE = [DIGITS_4301, BITS_65, -(2**63) - 1, None, True, [1], "\ud800"]


async def test_no_commands_have_no_replies(w: World) -> None:
    connection = await connect(w.settings.redis)
    try:
        assert await connection.ask([], PATIENCE_S) == []
        assert await connection.ask([("PING",)], PATIENCE_S) == [b"PONG"]
    finally:
        connection.abort()


@each("unsendable", UNSENDABLE)
async def test_what_cannot_be_packed_leaves_the_connection_usable(
    w: World, unsendable: Any
) -> None:
    connection = await connect(w.settings.redis)
    try:
        before = connection.call([("ECHO", "before")])
        with pytest.raises(ValueError):
            connection.call([("ECHO", "good"), ("ECHO", unsendable)])
        after = connection.call([("ECHO", "after"), ("ECHO", 2**64 - 1), ("ECHO", 1.5)])
        async with asyncio.timeout(60):
            assert await before == [b"before"]
            assert await after == [b"after", b"18446744073709551615", b"1.5"]
    finally:
        connection.abort()


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False


async def test_a_turn_of_the_loop_is_one_write() -> None:
    connection, wire = RespConnection(), Wire()
    connection.connection_made(wire)
    first = connection.call([("ECHO", 1), ("ECHO", 2)])
    with pytest.raises(ValueError):
        connection.call([("ECHO", "good"), ("ECHO", None)])
    second = connection.call([("ECHO", 3)], within_s=1e6)
    assert wire.writes == [], "others may follow"
    await asyncio.sleep(0)
    third = connection.call([("ECHO", 4)])
    await asyncio.sleep(0)
    echo = [b"*2\r\n$4\r\nECHO\r\n$1\r\n%d\r\n" % number for number in range(1, 5)]
    assert wire.writes == [b"".join(echo[:3]), echo[3]]
    connection.data_received(b":1\r\n:2\r\n:3\r\n:4\r\n")
    assert [await call for call in (first, second, third)] == [[1, 2], [3], [4]]


async def test_a_connection_that_ends_has_not_sent_what_its_last_turn_collected() -> None:
    connection = RespConnection()
    connection.connection_made(Wire())
    sent = connection.call([("PING",)])
    await asyncio.sleep(0)
    unsent = connection.call([("PING",)], within_s=1e6)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    ends = await asyncio.gather(sent, unsent, return_exceptions=True)
    assert [type(end) for end in ends] == [AnswerLost, RedisUnavailable]


async def test_one_late_reply_ends_all_calls_of_its_connection(w: World) -> None:
    async with Cable(w.settings.redis.url) as way:
        connection = await connect(behind(way, w.settings).redis)
        assert await connection.ask([("PING",)], 0.01 * PATIENCE_S) == [b"PONG"]
        way.dead = True
        asks = [connection.ask([("PING",)], within_s) for within_s in (1e6, 0.1, 1e6)]
        async with asyncio.timeout(PATIENCE_S):
            ends = await asyncio.gather(*asks, return_exceptions=True)
        assert [repr(end) for end in ends] == [
            repr(AnswerLost("no answer from Redis in 0.1 s"))
        ] * 3
        await eventually(lambda: not connection.usable)


async def test_a_caller_that_gives_up_while_redis_greets_leaves_no_connection_behind(
    w: World,
) -> None:
    async with Cable(w.settings.redis.url) as way:
        way.dead = True
        connecting = asyncio.create_task(connect(behind(way, w.settings).redis))
        await eventually(lambda: way.unheard)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await eventually(lambda: way.left)


async def test_a_subscription_that_has_died_without_a_word_is_noticed_by_a_ping(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "SUBSCRIPTION_PING_S", 0.05)
    monkeypatch.setattr(timings, "SUBSCRIPTION_ANSWER_S", 0.3)
    async with (
        Cable(redis_url) as way,
        world(way.url, namespace) as w,
        world(redis_url, namespace) as beside,
    ):
        hub = await w.hub()
        before = await eventually(
            lambda: hub._connection if hub._connection and hub._connection.usable else None
        )
        way.dead = True  # from here on, only an unanswered ping can end the connection
        await eventually(lambda: not before.usable)
        way.revive()
        await eventually(lambda: hub._connection is not before and hub._connection is not None)
        await eventually(beside.subscribers)


async def test_callers_that_wait_for_a_connection_share_one_failure(
    redis_url: str, namespace: str
) -> None:
    """One after another, the twelfth would wait for twelve time-outs."""
    async with Cable(redis_url) as way, world(way.url, namespace, redis={"url": way.url}) as w:
        way.dead = True
        link, writer = RedisLink(w.settings.redis), JournalWriter(w.settings)
        link._shared._quiet_s = 60.0  # however long the machine takes to come right after
        calls = [link.call([("PING",)]) for _ in range(12)]
        opens = [writer.open(f"req_{n}", 1, b"nonce", OPENED) for n in range(12)]
        answers = await asyncio.gather(*calls, *opens, return_exceptions=True)
        assert {type(answer) for answer in answers} == {RedisUnavailable}
        with pytest.raises(RedisUnavailable):
            await link.call([("PING",)])
        assert way.accepted == 2, "the link's and the writer's; none for who comes right after"
        way.dead = False
        link._shared._quiet_until_s = -math.inf
        await eventually(lambda: answered(link))
        await link.close()
        await writer.stop()


async def answered(link: RedisLink) -> bool:
    try:
        return await link.call([("PING",)]) == ["PONG"] or True
    except RedisUnavailable:
        return False


@pytest.mark.parametrize("connected", [True, False], ids=["stops answering", "never answered"])
async def test_an_admission_waits_no_longer_than_its_own_time(
    redis_url: str, namespace: str, connected: bool
) -> None:
    """However long Redis may take to connect and to answer."""
    async with Cable(redis_url) as way:
        way.dead = not connected
        redis = {"url": way.url, "connect_timeout_s": 1e6, "response_timeout_s": 1e6}
        its = StillIngress(Settings.model_validate({"namespace": namespace, "redis": redis}))
        if connected:
            await its.base.link.call([("PING",)])
            way.dead = True
        async with asyncio.timeout(PATIENCE_S):
            posts = [its.post(str(n) if n % 2 else "") for n in range(40)]
            refusals = await asyncio.gather(*posts, return_exceptions=True)
        told = [one for one in refusals if isinstance(one, RequestRefused)]
        assert [one.reason for one in told] == ["journal_unavailable"] * len(posts)
        pauses = {one.headers()["retry-after-ms"] for one in told}
        assert len(pauses) > 20, "or all come back at once"
        await its.base.link.close()


@each("given", ["previous_response_id", "item_reference"])
async def test_what_came_before_a_request_is_waited_for_no_longer_either(
    redis_url: str, namespace: str, given: str
) -> None:
    earlier: dict[str, Any] = {"previous_response_id": "resp_req_1", "input": "Hi"}
    if given == "item_reference":
        earlier = {"input": [{"type": "item_reference", "id": "msg_" + "0" * 48}]}
    async with Cable(redis_url) as way, world(way.url, namespace) as w:
        way.dead = True
        conversations = Conversations(w.store, 10_000, within_s=0.05)
        with pytest.raises(RedisUnavailable, match=r"no answer in 0\.05 s"):
            await conversations.whole("t", json.dumps(earlier).encode(), earlier)


async def test_a_lease_that_cannot_be_renewed_for_want_of_an_answer_is_known_soon(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any other answer of Redis would be missed."""
    monkeypatch.setattr(timings, "LEASE_RENEW_S", 0.05)
    monkeypatch.setattr(timings, "LEASE_STEADY_S", 0.3)
    async with Cable(redis_url) as way, world(way.url, namespace) as w:
        membership = StillIngress(w.settings).membership
        await membership.join_as_ingress(lambda: IngressLease("ingress-1", "session-1"))
        await eventually(lambda: membership.reachable)
        way.dead = True
        await eventually(lambda: not membership.reachable)
        way.revive()
        await eventually(lambda: membership.reachable)
        await membership.leave()


async def test_what_is_large_holds_up_nothing_small_and_ends_for_its_caller_alone(
    w: World,
) -> None:
    async with Cable(w.settings.redis.url) as cable:
        link = RedisLink(behind(cable, w.settings).redis, large_at_once=2)
        key = w.store.body_key("large")
        setting = [("SET", key, b"x" * (timings.LARGE_BYTES + 1))]
        cable.cut("SET", HANGING)
        hanging = asyncio.create_task(link.call(setting))
        await cable.hung.wait()
        async with asyncio.timeout(PATIENCE_S):
            assert await link.call([("GET", key)]) == [None]
            assert await link.call(setting) == [b"OK"]
        cable.mend()
        cable.cut("SET", HANGING)
        other = asyncio.create_task(link.call(setting))
        await cable.hung.wait()
        patient_s, link._within_s = link._within_s, 0.1
        with pytest.raises(RedisUnavailable, match="too many large"):
            await link.call([("GET", key)], large=True)
        link._within_s = patient_s
        assert await link.call([("GET", key)]) == [setting[0][2]]
        for call in (hanging, other):
            call.cancel()
        await link.close()


@pytest.mark.parametrize("long", ["a large body", "an earlier attempt"])
async def test_an_opening_that_reads_much_holds_up_no_token(
    w: World, namespace: str, long: str
) -> None:
    body = b"x" * (timings.LARGE_BYTES + 1) if long == "a large body" else b"{}"
    await w.admit("req_2", body=body)
    await w.admit()
    epoch = 1 if long == "a large body" else 2
    for earlier in range(1, epoch):
        await (await w.writer()).open("req_2", earlier, b"nonce", OPENED)
    async with Cable(w.settings.redis.url) as cable, world(cable.url, namespace) as its:
        writer = await its.writer()
        attempt = await its.opened(writer)
        cable.cut("GET", HANGING, after=1)  # the first reads the beginning, with the opening
        opening = asyncio.create_task(writer.open("req_2", epoch, b"nonce-2", OPENED))
        await cable.hung.wait()
        add(attempt, 1)
        await complete(attempt)
        assert not opening.done()
        cable.drop()
        with pytest.raises(RedisUnavailable):
            await opening
        _, entries = await writer.open("req_2", epoch + 1, b"nonce-3", OPENED)
        assert entries[0].body == body
        assert [str(entry.id) for entry in entries[1:]] == [f"{n}-0" for n in range(1, epoch + 2)]


async def test_an_opening_that_is_not_answered_costs_the_other_attempts_a_pause_and_no_entry(
    w: World, namespace: str
) -> None:
    follower = (await w.hub()).follow_new(await w.admit())
    reading = asyncio.create_task(everything(follower))
    await w.admit("req_2")
    async with Cable(w.settings.redis.url) as cable, world(cable.url, namespace) as its:
        writer = await its.writer()
        attempt = await its.opened(writer)
        writer._within_s = 0.3
        cable.cut("XADD", HANGING)
        opening = asyncio.create_task(writer.open("req_2", 1, b"nonce-2", OPENED))
        await cable.hung.wait()
        add(attempt, 1)  # behind the opening, on the same connection
        with pytest.raises(AnswerLost):
            await opening
        add(attempt, 2)
        await complete(attempt)
        assert await reading == events(1, 2)
        await cable.arrive()
        assert await w.store.void("req_2", 1, b"nonce-2"), "it came late, and is found"


FULL = b"-ERR max number of clients reached\r\n"


def test_what_redis_says_before_it_closes_is_told() -> None:
    connection = RespConnection()
    connection.data_received(FULL)
    connection.connection_lost(None)
    with pytest.raises(RedisUnavailable, match="max number of clients"):
        connection.call([("PING",)])


@asynccontextmanager
async def server_that_says(what: bytes, at_once: bool) -> AsyncIterator[RedisSettings]:
    """The settings of what is no Redis: it says something, after a question or without one, and
    closes.
    """

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not at_once:
            await reader.read(1)
        writer.write(what)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield RedisSettings.model_validate(redis_settings(f"redis://a:b@127.0.0.1:{port}/0"))


FOREIGN = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "TLS": bytes.fromhex("15030100020246"),
    "half of a reply, then another server's": b"*2\r\n+OK\r\n\x00\x01",
}


@each("foreign, at_once", itertools.product(FOREIGN, (False, True)))
async def test_a_server_that_is_no_redis_costs_a_sentence_and_no_traceback(
    foreign: str, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with server_that_says(FOREIGN[foreign], at_once) as settings:
        with pytest.raises(RedisUnavailable, match=r"Protocol error, got .* as reply type byte"):
            await connect(settings)
    assert [record.getMessage() for record in caplog.records] == []


@each("at_once", [False, True])
async def test_why_redis_refuses_a_connection_is_told_whenever_it_says_so(at_once: bool) -> None:
    """Of two answers that are awaited this is the first, and the last."""
    async with server_that_says(FULL, at_once) as settings:
        with pytest.raises(RefusedForNow) as refused:
            await connect(settings)
    assert refused.value.what == RefusedForNow.CLIENTS
    async with server_that_says(b"-DENIED Redis is running in protected mode\r\n", at_once) as it:
        with pytest.raises(RedisRefuses, match="DENIED"):
            await connect(it)
