"""Clients that read slowly or not at all, or do not send the rest of a request, use only their own
connection and little memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from serve_app import timings
from serve_app.contract import State
from serve_app.ingress import answer, slow_readers
from serve_app.journal.entries import decode_facts
from serve_app.journal.facts import RequestFacts, Summary
from serve_app.journal.reader import _HOLD_BYTES
from tests.journal.in_process import Door, door
from tests.journal.journal_helpers import (
    HEAD,
    SUMMARY,
    World,
    add,
    event,
    events,
    everything,
    finish,
)
from tests.turned_clock import TurnedClock
from tests.waiting import PATIENCE_S, eventually

MIB = 1 << 20
EVENTS = 24_000
PATH = "/v1/requests/req_1/events"


async def finished(w: World) -> bytes:
    """The answer of a request whose journal holds only the transcript: about 5 MB, which zlib
    compresses to some 100 KiB.
    """
    whole = b"".join(
        b"id: %d\ndata: %b\n\n" % (number, b"lighthouse " * 19) for number in range(1, EVENTS + 1)
    )
    await w.admit(tenant="default")
    attempt = await w.opened(await w.writer())
    facts = decode_facts((await w.entries())[0], RequestFacts)
    attempt.append([], [whole], EVENTS, HEAD)
    attempt.finish(State.COMPLETED, None, Summary(facts, None, 1, 9), 1)
    await attempt.closed
    await eventually(lambda: w.compacted())
    return whole


@asynccontextmanager
async def connected(d: Door, request: bytes) -> AsyncIterator[socket.socket]:
    """A client that has sent this, and reads nothing of the answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", d.port))
        await loop.sock_sendall(client, request)
        yield client


# -- who does not read ---------------------------------------------------------------------------

READS_NOTHING = b"GET %b HTTP/1.1\r\nhost: door\r\n\r\n" % PATH.encode()


class Looks(TurnedClock):
    """The clock of who searches for clients that do not read; counts the searches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def monotonic_s(self) -> float:
        self.count += 1
        return super().monotonic_s()

    async def later(self, by_s: float, clock: TurnedClock) -> None:
        """Turn both clocks ahead, and wait for a search that has begun after that."""
        self.now_s = clock.now_s = clock.now_s + by_s
        before = self.count
        await eventually(lambda: self.count > before + 1)


async def test_only_clients_that_read_nothing_for_long_are_disconnected(
    w: World, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled_s = 1_000.0
    looks, clock = Looks(), TurnedClock()
    monkeypatch.setattr(slow_readers, "SYSTEM", looks)
    monkeypatch.setattr(answer, "SYSTEM", clock)
    monkeypatch.setattr(timings, "STALLED_LOOK_AT_MOST_S", 0.01)
    whole = await finished(w)
    small = httpx.AsyncHTTPTransport(
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)]
    )
    async with (
        door(redis_url, namespace, ingress={"stalled_reader_s": stalled_s}) as d,
        httpx.AsyncClient(base_url=d.http.base_url, timeout=PATIENCE_S, transport=small) as http,
        connected(d, READS_NOTHING),
    ):
        answers = d.ingress.slow_readers
        await eventually(lambda: len(answers._answers) == 1)
        (stuck,) = answers._answers
        async with http.stream("GET", PATH) as reading:
            pieces, got = reading.aiter_bytes(), b""
            await eventually(lambda: len(answers._answers) == 2)
            (reader,) = answers._answers - {stuck}
            waiting = d.posted("Nobody answers for a while.")
            await eventually(lambda: len(answers._answers) == 3)
            for _ in range(2):
                await looks.later(0.6 * stalled_s, clock)
                while reader.sending_since_s < clock.now_s:
                    got += await anext(pieces)
            got += b"".join([piece async for piece in pieces])
            assert got == whole
        await looks.later(2 * stalled_s, clock)
        await eventually(lambda: len(d.ingress.connections.event_readers) == 0)
        assert not waiting.done(), "who waits for an answer is not one who does not take it"


async def test_readers_of_events_are_few_at_a_time(
    w: World, redis_url: str, namespace: str
) -> None:
    await finished(w)
    async with door(redis_url, namespace, ingress={"max_readers": 2}) as d:
        readers = d.ingress.connections.event_readers
        async with connected(d, READS_NOTHING), connected(d, READS_NOTHING):
            await eventually(lambda: len(readers) == 2)
            refused = await d.http.get(PATH)
            told = (refused.status_code, refused.headers["x-hermes-reason"])
            assert told == (429, "too_many_connections")
            assert (await d.http.get("/v1/requests/req_1")).status_code == 200
        await eventually(lambda: len(readers) == 0)
        async with d.http.stream("GET", PATH) as stream:
            assert stream.status_code == 200


async def test_a_follower_whose_client_does_not_read_leaves_the_rest_in_the_stream(
    w: World,
) -> None:
    follower, attempt = await w.followed()
    add(attempt, 1)
    text, last = b"x" * 10_000, 300
    for number in range(2, last + 1):
        attempt.append([], [b"id: %d\ndata: %b\n\n" % (number, text)], number)
        while attempt.pending:
            await asyncio.sleep(0)
    await eventually(lambda: follower.reader.full)
    assert follower.reader.held_bytes < 2 * _HOLD_BYTES
    attempt.finish(State.COMPLETED, None, SUMMARY, 1)
    await attempt.closed
    got = await everything(follower)
    assert got.startswith(event(1))
    assert [got.count(b"\n\n"), got.count(text)] == [last, last - 1]


async def test_a_long_journal_is_read_in_pages(w: World) -> None:
    hub = await w.hub()
    await w.admit(wake="nobody-listens-here")
    attempt = await w.opened(await w.writer())
    for number in range(1, 701):
        add(attempt, number)
        while attempt.pending:
            await asyncio.sleep(0)
    follower = await hub.follow("req_1", 0)
    assert follower.reader.last_event < 700, "a page"
    finish(attempt)
    assert await everything(follower) == events(1, 700)


# -- who does not send the rest ------------------------------------------------------------------

SENDERS = 40
BODY_BYTES = 8 * MIB
BOUNDED = {"max_body_bytes": BODY_BYTES, "max_upload_bytes": 4 * BODY_BYTES}
ANNOUNCED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % BODY_BYTES
)
ENDED = b"HTTP/1.1 408"
PART = b"x" * (BODY_BYTES - MIB)


@asynccontextmanager
async def who_does_not_send_the_rest(d: Door) -> AsyncIterator[asyncio.Task[bytes]]:
    """A client that sends most of a request and then nothing, unless it is refused before. Yields
    how an answer begins, once there is one.
    """
    loop = asyncio.get_running_loop()
    async with connected(d, ANNOUNCED) as client:
        sending = asyncio.create_task(loop.sock_sendall(client, PART))
        answering = asyncio.create_task(loop.sock_recv(client, len(ENDED)))
        await asyncio.wait([sending, answering], return_when=asyncio.FIRST_COMPLETED)
        yield answering
        for task in (sending, answering):
            task.cancel()
        await asyncio.gather(sending, answering, return_exceptions=True)


async def test_many_clients_that_do_not_send_the_rest_keep_no_small_request_out(
    redis_url: str, namespace: str
) -> None:
    bounds = {**BOUNDED, "stalled_reader_s": 3600.0}
    async with door(redis_url, namespace, ingress=bounds) as d, AsyncExitStack() as clients:
        for _ in range(SENDERS):
            await clients.enter_async_context(who_does_not_send_the_rest(d))
        assert len(PART) < len(d.ingress.uploads.held) <= BOUNDED["max_upload_bytes"]
        d.posted("A small request is accepted all the same.")
        await d.waiting(1)


async def test_who_sends_nothing_for_long_makes_room_for_others(
    redis_url: str, namespace: str
) -> None:
    bounds = {**BOUNDED, "max_upload_bytes": BODY_BYTES, "stalled_reader_s": 0.3}
    async with door(redis_url, namespace, ingress=bounds) as d:
        async with who_does_not_send_the_rest(d) as answering, asyncio.timeout(PATIENCE_S):
            assert await answering == ENDED
        d.ingress.uploads.stalled_s = PATIENCE_S
        d.posted("x" * MIB)  # in several pieces
        await d.waiting(1)
        await eventually(lambda: not len(d.ingress.uploads.held))  # it is in Redis
