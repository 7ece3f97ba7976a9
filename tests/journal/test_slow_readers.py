"""Clients that read slowly, or not at all, use only their own connection."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import msgspec
import pytest

from serve_app import timings
from serve_app.contract import State
from serve_app.ingress import answer, slow_readers
from serve_app.journal.entries import compress
from serve_app.journal.facts import RequestFacts, Summary
from serve_app.journal.ids import TERMINAL_ID
from serve_app.journal.reader import _HOLD_BYTES
from tests.journal.in_process import Door, door
from tests.journal.journal_helpers import LINE, World, add, event, events, everything, finish
from tests.turned_clock import TurnedClock
from tests.waiting import PATIENCE_S, eventually

MIB = 1 << 20
READERS = 200
EVENTS = 24_000


def resident_bytes() -> int:
    """Resident memory of this process, which is the ingress."""
    with open("/proc/self/statm") as page:
        return int(page.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def long_stream() -> bytes:
    """About 5 MB, which zlib compresses to some 100 KiB."""
    return b"".join(
        b"id: %d\ndata: %b\n\n" % (number, b"lighthouse " * 19) for number in range(1, EVENTS + 1)
    )


async def finished(d: Door, whole: bytes) -> None:
    """A request whose journal holds only the transcript."""
    now_ms = int(time.time() * 1000)
    facts = RequestFacts("standard", "default", "s", "m", True, now_ms, now_ms + 60_000, "")
    fields = {
        b"n": b"nonce-1",
        b"k": b"completed",
        b"w": b"",
        b"e": b"%d" % EVENTS,
        b"z": compress([whole], 1),
        b"h": b'{"status": 200, "headers": [["content-type", "text/event-stream"]]}',
        b"m": msgspec.json.encode(Summary(facts, None, 1, now_ms)),
    }
    await d.ingress.base.redis.execute_command(  # type: ignore[no-untyped-call]
        "XADD",
        d.ingress.base.store.key("req_1"),
        str(TERMINAL_ID),
        *[part for pair in fields.items() for part in pair],
    )


@asynccontextmanager
async def who_does_not_read(d: Door, path: str) -> AsyncIterator[socket.socket]:
    """A client that sends its request and reads nothing of the answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", d.port))
        await loop.sock_sendall(client, b"GET %b HTTP/1.1\r\nhost: door\r\n\r\n" % path.encode())
        yield client


@pytest.mark.clock
async def test_many_clients_that_do_not_read_a_long_answer_hold_little_memory(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as d:
        whole = long_stream()
        await finished(d, whole)
        before = resident_bytes()
        async with AsyncExitStack() as clients:
            for _ in range(READERS):
                await clients.enter_async_context(who_does_not_read(d, "/v1/requests/req_1/events"))
            stuck = d.ingress.slow_readers._answers
            await eventually(
                lambda: (
                    len(stuck) == READERS and all(one.sending_since_s < math.inf for one in stuck)
                )
            )
            grown = resident_bytes() - before
            print(f"{READERS} readers who do not read: {grown / MIB:.0f} MiB")
            assert grown < 120 * MIB
            async with d.http.stream("GET", "/v1/requests/req_1/events") as reading:
                assert b"".join([piece async for piece in reading.aiter_bytes()]) == whole
        await eventually(lambda: not d.ingress.slow_readers._answers)


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
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled_s = 1_000.0
    looks, clock = Looks(), TurnedClock()
    monkeypatch.setattr(slow_readers, "SYSTEM", looks)
    monkeypatch.setattr(answer, "SYSTEM", clock)
    monkeypatch.setattr(timings, "STALLED_LOOK_AT_MOST_S", 0.01)
    path, small = "/v1/requests/req_1/events", [(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)]
    async with (
        door(redis_url, namespace, ingress={"stalled_reader_s": stalled_s}) as d,
        httpx.AsyncClient(
            base_url=d.http.base_url,
            timeout=PATIENCE_S,
            transport=httpx.AsyncHTTPTransport(socket_options=small),
        ) as http,
    ):
        whole = long_stream()
        await finished(d, whole)
        async with who_does_not_read(d, path):
            await eventually(lambda: len(d.ingress.connections.event_readers) == 1)
            await eventually(lambda: len(d.ingress.slow_readers._answers) == 1)
            (stuck,) = d.ingress.slow_readers._answers
            async with http.stream("GET", path) as reading:
                pieces, got = reading.aiter_bytes(), b""
                await eventually(lambda: len(d.ingress.slow_readers._answers) == 2)
                (reader,) = d.ingress.slow_readers._answers - {stuck}
                waiting = d.posted("Nobody answers for a while.")
                await eventually(lambda: len(d.ingress.slow_readers._answers) == 3)
                for _ in range(2):
                    await looks.later(0.6 * stalled_s, clock)
                    while reader.sending_since_s < clock.now_s:
                        got += await anext(pieces)
                got += b"".join([piece async for piece in pieces])
                assert got == whole
            await looks.later(2 * stalled_s, clock)
            await eventually(lambda: len(d.ingress.connections.event_readers) == 0)
            assert not waiting.done(), "who waits for an answer is not one who does not take it"
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_readers_of_events_are_few_at_a_time(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace, ingress={"max_readers": 2}) as d:
        await finished(d, long_stream())
        path = "/v1/requests/req_1/events"
        async with who_does_not_read(d, path), who_does_not_read(d, path):
            await eventually(lambda: len(d.ingress.connections.event_readers) == 2)
            refused = await d.http.get(path)
            assert (refused.status_code, refused.headers["x-hermes-reason"]) == (
                429,
                "too_many_connections",
            )
            assert (await d.http.get("/v1/requests/req_1")).status_code == 200
        await eventually(lambda: len(d.ingress.connections.event_readers) == 0)
        async with d.http.stream("GET", path) as stream:
            assert stream.status_code == 200


async def test_a_follower_whose_client_does_not_read_leaves_the_rest_in_the_stream(
    w: World,
) -> None:
    hub = await w.hub()
    follower = hub.follow_new(await w.admit())
    attempt = await w.opened(await w.writer())
    add(attempt, 1)
    text = b"x" * 10_000
    last = 300
    for number in range(2, last + 1):
        attempt.append([], [b"id: %d\ndata: %b\n\n" % (number, text)], number)
        while attempt.pending:
            await asyncio.sleep(0)
    await eventually(lambda: follower.reader.full)
    assert follower.reader.held_bytes < 2 * _HOLD_BYTES
    attempt.finish(State.COMPLETED, None, _summary(), 1)
    await attempt.closed
    got = await everything(follower)
    assert got.startswith(event(1))
    assert [got.count(b"\n\n"), got.count(text)] == [last, last - 1]


def _summary() -> Summary:
    return Summary(None, None, 1, 9)


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
    assert LINE.path
    finish(attempt)
    assert await everything(follower) == events(1, 700)
