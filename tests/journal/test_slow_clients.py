"""Clients that read slowly or not at all, or do not send the rest of a request, use only their own
connection and little memory.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from serve_app import processes, timings
from serve_app.contract import CHATS, RESPONSES, State
from serve_app.ingress import client_connections
from serve_app.ingress.client_connections import SlowReaders
from serve_app.journal.entries import Head, RequestFacts, Summary, decode_facts
from serve_app.journal.reader import _HOLD_BYTES
from tests.journal.in_process import Door, door
from tests.journal.journal_helpers import (
    HEAD,
    OPENED,
    SUMMARY,
    World,
    add,
    event,
    events,
    everything,
    finish,
)
from tests.tables import Failures
from tests.turned_clock import TurnedClock
from tests.waiting import PATIENCE_S, eventually
from workers.journal_writer import JournalWriter

MIB = 1 << 20
EVENTS = 24_000
PATH = "/v1/requests/req_1/events"
BUFFERED_BYTES = (64 + 16) * 1024 + 16
"""What asyncio and uvloop take for a socket before they make a sender wait, and a piece."""


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
    attempt.stop(State.COMPLETED, None, Summary(facts, None, 1, 9), 1)
    await attempt.closed
    await eventually(lambda: w.compacted())
    return whole


class Stored:
    """A chat and a response, each with an input and an answer of a MB, or half of it packed."""

    def __init__(self, d: Door, writer: JournalWriter) -> None:
        self._d = d
        self._writer = writer
        self._text = secrets.token_hex(MIB // 2)

    async def questions(self) -> dict[str, bytes]:
        """What has one of these as its answer, once they are there."""
        asked = [{"role": "user", "content": self._text}]
        chosen = {"id": "chatcmpl-1", "choices": [{"message": {"content": self._text}}]}
        said = [{"type": "message", "content": [{"type": "output_text", "text": self._text}]}]
        chat = await self._ended(CHATS, {"messages": asked}, chosen)
        again = self._posting
        answer = {"object": "response", "output": said}
        response = await self._ended(RESPONSES, {"input": asked}, answer)
        paths = [
            f"/v1/requests/{chat}/events",
            f"/v1/requests/{chat}/response",
            f"{CHATS}/chatcmpl-{chat}",
            f"{CHATS}/chatcmpl-{chat}/messages",
            CHATS,
            f"{RESPONSES}/resp_{response}",
            f"{RESPONSES}/resp_{response}/input_items",
        ]
        return {path: getting(path) for path in paths} | {"the POST again": again}

    async def _ended(self, path: str, asked: dict[str, Any], answer: dict[str, Any]) -> str:
        body = json.dumps({"model": "hermes-tiny", "store": True, **asked}).encode()
        headers = {"content-type": "application/json", "idempotency-key": path[1:]}
        self._posting = POSTING % (path.encode(), path[1:].encode(), len(body), body)
        headers["prefer"] = "respond-async"
        posted = await self._d.http.post(path, content=body, headers=headers)
        request_id = str(posted.headers["x-request-id"])
        attempt, entries = await self._writer.open(request_id, 1, b"nonce", OPENED)
        facts = decode_facts(entries[0], RequestFacts)
        head = Head(200, [("content-type", "application/json")])
        attempt.append([], [json.dumps(answer).encode()], 0, head)
        attempt.stop(State.COMPLETED, None, Summary(facts, OPENED, 1, facts.admitted_ms), 1)
        await attempt.closed
        return request_id


POSTING = (
    b"POST %b HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\n"
    b"idempotency-key: %b\r\ncontent-length: %d\r\n\r\n%b"
)


def getting(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: door\r\n\r\n" % path.encode()


async def test_what_a_client_does_not_read_takes_little_memory(
    w: World, redis_url: str, namespace: str
) -> None:
    """Of any endpoint, streamed or not; and what it holds is counted as long."""
    async with door(redis_url, namespace) as d, AsyncExitStack() as clients:
        limits, sent = d.ingress.connections, d.ingress.slow_readers._sending
        questions = await Stored(d, await w.writer()).questions()
        questions["of all"] = getting("/docs/swagger-ui-bundle.js")
        for question in questions.values():
            await clients.enter_async_context(connected(d, question))
        await eventually(lambda: sum(size > 0 for size in d.buffered) == len(questions))
        assert max(d.buffered) <= BUFFERED_BYTES
        assert len(sent) == len(questions)
        assert (len(limits.event_readers), len(limits.requests)) == (len(questions) - 2, 1)
        assert MIB // 2 * 8 < len(limits.unread) < MIB * 2 * 8
        for one in list(sent):
            one.cut()
        await eventually(lambda: not sent)
        held = (limits.event_readers, limits.requests, limits.unread)
        assert [len(one) for one in held] == [0, 0, 0]


async def test_answers_that_nobody_reads_are_few_at_a_time(
    w: World, redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace, ingress={"max_buffered_response_bytes": MIB}) as d:
        unread = d.ingress.connections.unread
        questions = await Stored(d, await w.writer()).questions()
        async with AsyncExitStack() as clients:
            for question in [*questions.values()] * (2 * timings.WHOLES_AT_ONCE):
                await clients.enter_async_context(connected(d, question))
            await eventually(lambda: len(unread) >= MIB)
            del questions["the POST again"]
            with Failures() as failures:
                for path in questions:
                    with failures.of(path):
                        refused = await d.http.get(path)
                        told = (refused.status_code, refused.headers["x-hermes-reason"])
                        assert told == (429, "too_many_connections")
            assert len(unread) < 2 * MIB * (1 + timings.WHOLES_AT_ONCE)
        await eventually(lambda: not len(unread))
        for path in questions:
            assert len((await d.http.get(path)).raise_for_status().content) > MIB


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


class Looks(SlowReaders):
    """Counts its searches for clients that do not read."""

    count = 0

    def _cut_stalled(self) -> None:
        super()._cut_stalled()
        self.count += 1

    async def later(self, by_s: float, clock: TurnedClock) -> None:
        """Turn the clock ahead, and wait for a search that has begun after that."""
        clock.now_s += by_s
        before = self.count
        await eventually(lambda: self.count > before + 1)


@pytest.mark.parametrize("streamed", [True, False])
async def test_only_clients_that_read_nothing_for_long_are_disconnected(
    w: World, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    stalled_s = 1_000.0
    clock = TurnedClock()
    monkeypatch.setattr(client_connections, "SYSTEM", clock)
    monkeypatch.setattr(processes, "SlowReaders", Looks)
    monkeypatch.setattr(timings, "STALLED_LOOK_AT_MOST_S", 0.01)
    whole, path = (await finished(w), PATH) if streamed else (b"", "")
    small = httpx.AsyncHTTPTransport(
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)]
    )
    async with (
        door(redis_url, namespace, ingress={"stalled_client_timeout_s": stalled_s}) as d,
        httpx.AsyncClient(base_url=d.http.base_url, timeout=PATIENCE_S, transport=small) as http,
        AsyncExitStack() as clients,
    ):
        if not streamed:
            path = next(p for p in await Stored(d, await w.writer()).questions() if "/resp_" in p)
            whole = (await d.http.get(path)).content
        await clients.enter_async_context(connected(d, getting(path)))
        answers = d.ingress.slow_readers
        assert isinstance(answers, Looks)
        await eventually(lambda: len(answers._sending) == 1)
        (stuck,) = answers._sending
        async with http.stream("GET", path) as reading:
            pieces, got = reading.aiter_bytes(), b""
            await eventually(lambda: len(answers._sending) == 2)
            (reader,) = answers._sending - {stuck}
            waiting = d.posted("Nobody answers for a while.")
            await eventually(lambda: len(answers._sending) == 3)
            for _ in range(2):
                await answers.later(0.6 * stalled_s, clock)
                while reader.sending_since_s < clock.now_s:
                    got += await anext(pieces)
            got += b"".join([piece async for piece in pieces])
            assert got == whole
        await answers.later(2 * stalled_s, clock)
        await eventually(lambda: len(d.ingress.connections.event_readers) == 0)
        assert not waiting.done(), "who waits for an answer is not one who does not take it"


async def test_readers_of_events_are_few_at_a_time(
    w: World, redis_url: str, namespace: str
) -> None:
    await finished(w)
    async with door(redis_url, namespace, ingress={"max_readers": 2}) as d:
        readers = d.ingress.connections.event_readers
        async with connected(d, getting(PATH)), connected(d, getting(PATH)):
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
    late = await (await w.hub()).follow("req_1", 0)
    pages = []
    while late.reader.last_event < last:
        pages.append(late.reader.held_bytes)
        late.reader.take()
        await late.catch_up()
    assert max(pages) <= timings.FIRST_PAGE_ENTRIES * 11_000
    assert max(pages[1:]) <= timings.PAGE_BYTES
    attempt.stop(State.COMPLETED, None, SUMMARY, 1)
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
BOUNDED = {"max_body_bytes": BODY_BYTES, "max_buffered_request_bytes": 4 * BODY_BYTES}
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
    bounds = {**BOUNDED, "stalled_client_timeout_s": 3600.0}
    async with door(redis_url, namespace, ingress=bounds) as d, AsyncExitStack() as clients:
        for _ in range(SENDERS):
            await clients.enter_async_context(who_does_not_send_the_rest(d))
        assert len(PART) < len(d.ingress.uploads.held) <= BOUNDED["max_buffered_request_bytes"]
        d.posted("A small request is accepted all the same.")
        await d.waiting(1)


async def test_who_sends_nothing_for_long_makes_room_for_others(
    redis_url: str, namespace: str
) -> None:
    bounds = {**BOUNDED, "max_buffered_request_bytes": BODY_BYTES, "stalled_client_timeout_s": 0.3}
    async with door(redis_url, namespace, ingress=bounds) as d:
        async with who_does_not_send_the_rest(d) as answering, asyncio.timeout(PATIENCE_S):
            assert await answering == ENDED
        d.ingress.uploads.stalled_s = PATIENCE_S
        d.posted("x" * MIB)  # in several pieces
        await d.waiting(1)
        await eventually(lambda: not len(d.ingress.uploads.held))  # it is in Redis
