"""Clients that read slowly, or not at all, hold their own place and nothing else."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from door_helpers import Door, door
from journal_helpers import LINE, add, event, events, eventually, everything, finish, world

from serve_app.journal.entries import TERMINAL_ID, RequestFacts, Summary, compress
from serve_app.journal.reader import _HOLD_BYTES

MIB = 1 << 20
READERS = 200
EVENTS = 24_000


def resident_bytes() -> int:
    """Of this process, which is the ingress's."""
    with open("/proc/self/statm") as page:
        return int(page.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def long_stream() -> bytes:
    """About 5 MB of which zlib makes some 100 KiB."""
    return b"".join(b"id: %d\ndata: %b\n\n" % (number, b"lighthouse " * 19) for number in range(1, EVENTS + 1))


async def finished(d: Door, whole: bytes) -> None:
    """A request whose journal is its transcript."""
    now_ms = int(time.time() * 1000)
    facts = RequestFacts("standard", "default", "s", "m", True, now_ms, now_ms + 60_000, "")
    fields = {
        b"n": b"nonce-1", b"k": b"completed", b"w": b"", b"e": b"%d" % EVENTS, b"z": compress([whole], 1),
        b"h": b'{"status": 200, "headers": [["content-type", "text/event-stream"]]}',
        b"m": msgspec.json.encode(Summary(facts, None, 1, now_ms)),
    }  # fmt: skip
    await d.ingress.redis.execute_command(
        "XADD", d.ingress.store.key("req_1"), str(TERMINAL_ID), *[part for pair in fields.items() for part in pair]
    )


@asynccontextmanager
async def who_does_not_read(d: Door, path: str) -> AsyncIterator[socket.socket]:
    """A client that sends its request and takes nothing of the answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", d.port))
        await loop.sock_sendall(client, b"GET %b HTTP/1.1\r\nhost: door\r\n\r\n" % path.encode())
        yield client


def test_many_who_do_not_read_a_long_answer_hold_little(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with door(redis_url, namespace) as d:
            whole = long_stream()
            await finished(d, whole)
            before = resident_bytes()
            async with AsyncExitStack() as clients:
                for _ in range(READERS):
                    await clients.enter_async_context(who_does_not_read(d, "/v1/requests/req_1/events"))
                stuck = d.ingress.readers._answers
                await eventually(lambda: len(stuck) == READERS and all(one.sending_since_s < math.inf for one in stuck))
                grown = resident_bytes() - before
                print(f"{READERS} readers who do not read: {grown / MIB:.0f} MiB")
                assert grown < 120 * MIB
                async with d.http.stream("GET", "/v1/requests/req_1/events") as answer:
                    assert b"".join([chunk async for chunk in answer.aiter_bytes()]) == whole
            await eventually(lambda: not d.ingress.readers._answers)

    asyncio.run(main())


def test_who_takes_nothing_for_long_is_cut_and_others_are_not(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with door(redis_url, namespace, ingress={"stalled_reader_s": 0.4}) as d:
            whole = long_stream()
            await finished(d, whole)
            async with who_does_not_read(d, "/v1/requests/req_1/events"):
                await eventually(lambda: len(d.ingress.readers.of_events) == 1)
                waiting = d.posted("Nobody answers for a while.")
                async with d.http.stream("GET", "/v1/requests/req_1/events") as answer:
                    got = []
                    async for chunk in answer.aiter_bytes():
                        got.append(chunk)
                        await asyncio.sleep(0.001)
                    assert b"".join(got) == whole
                await eventually(lambda: len(d.ingress.readers.of_events) == 0)
                assert not waiting.done(), "who waits for an answer is not one who does not take it"
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(main())


def test_readers_of_events_are_few_at_a_time(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with door(redis_url, namespace, ingress={"max_readers": 2}) as d:
            await finished(d, long_stream())
            path = "/v1/requests/req_1/events"
            async with who_does_not_read(d, path), who_does_not_read(d, path):
                await eventually(lambda: len(d.ingress.readers.of_events) == 2)
                answer = await d.http.get(path)
                assert (answer.status_code, answer.headers["x-hermes-reason"]) == (429, "too_many_connections")
                assert (await d.http.get("/v1/requests/req_1")).status_code == 200
            await eventually(lambda: len(d.ingress.readers.of_events) == 0)
            async with d.http.stream("GET", path) as stream:
                assert stream.status_code == 200

    asyncio.run(main())


def test_a_follower_whose_client_does_not_read_leaves_the_rest_in_the_stream(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
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
            assert follower.reader._held_bytes < 2 * _HOLD_BYTES
            attempt.finish("completed", "", _summary(), 1)
            await attempt.closed
            got = await everything(follower)
            assert got.startswith(event(1))
            assert [got.count(b"\n\n"), got.count(text)] == [last, last - 1]

    asyncio.run(main())


def _summary() -> Summary:
    return Summary(None, None, 1, 9)


def test_a_long_journal_is_read_in_pages(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
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

    asyncio.run(main())
