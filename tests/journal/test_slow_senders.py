"""Clients that begin a large request and do not send the rest use little memory."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from tests.journal.in_process import Door, door
from tests.journal.test_slow_readers import resident_bytes
from tests.waiting import PATIENCE_S, eventually

MIB = 1 << 20
SENDERS = 40
BODY_BYTES = 8 * MIB
BOUNDED = {"max_body_bytes": BODY_BYTES, "max_upload_bytes": 4 * BODY_BYTES}
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % BODY_BYTES
)
ENDED = b"HTTP/1.1 499"
PART_BYTES = BODY_BYTES - MIB
PART = b"x" * PART_BYTES


@asynccontextmanager
async def who_does_not_send_the_rest(d: Door) -> AsyncIterator[asyncio.Task[bytes]]:
    """A client that sends most of a request and then nothing, unless it is refused before. Yields
    how an answer begins, once there is one.
    """
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", d.port))
        await loop.sock_sendall(client, HEAD)
        sending = asyncio.create_task(loop.sock_sendall(client, PART))
        answering = asyncio.create_task(loop.sock_recv(client, len(ENDED)))
        await asyncio.wait([sending, answering], return_when=asyncio.FIRST_COMPLETED)
        yield answering
        for task in (sending, answering):
            task.cancel()
        await asyncio.gather(sending, answering, return_exceptions=True)


async def post(d: Door, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return await d.http.post("/v1/chat/completions", content=body, headers=headers)


def large() -> bytes:
    """A request of several pieces."""
    message = {"role": "user", "content": "x" * MIB}
    return json.dumps({"model": "hermes-tiny", "messages": [message]}).encode()


@asynccontextmanager
async def many_who_do_not_send_the_rest(d: Door) -> AsyncIterator[None]:
    async with AsyncExitStack() as clients:
        for _ in range(SENDERS):
            await clients.enter_async_context(who_does_not_send_the_rest(d))
        yield


@pytest.mark.clock
async def test_many_clients_that_do_not_send_the_rest_hold_little_memory(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace, ingress=BOUNDED) as d:
        before = resident_bytes()
        async with many_who_do_not_send_the_rest(d):
            grown = resident_bytes() - before
            print(f"{SENDERS} clients that do not send the rest: {grown / MIB:.0f} MiB")
            assert grown < 100 * MIB


async def test_many_clients_that_do_not_send_the_rest_keep_no_small_request_out(
    redis_url: str, namespace: str
) -> None:
    bounds = {**BOUNDED, "stalled_reader_s": 3600.0}
    async with door(redis_url, namespace, ingress=bounds) as d, many_who_do_not_send_the_rest(d):
        assert PART_BYTES < d.ingress.uploads.held_bytes <= BOUNDED["max_upload_bytes"]
        waiting = d.posted("A small request is accepted all the same.")
        await d.waiting(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_who_announces_a_request_and_sends_nothing_of_it_is_refused(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace, ingress={**BOUNDED, "stalled_reader_s": 0.3}) as d:
        reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
        writer.write(HEAD)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.readexactly(len(ENDED)) == ENDED
        writer.close()


async def test_who_sends_nothing_for_long_makes_room_for_others(
    redis_url: str, namespace: str
) -> None:
    bounds = {**BOUNDED, "max_upload_bytes": BODY_BYTES, "stalled_reader_s": 0.3}
    async with door(redis_url, namespace, ingress=bounds) as d:
        async with who_does_not_send_the_rest(d) as answering, asyncio.timeout(PATIENCE_S):
            assert await answering == ENDED
        d.ingress.uploads.stalled_s = PATIENCE_S
        waiting = asyncio.create_task(post(d, large()))
        await d.waiting(1)
        await eventually(lambda: not d.ingress.uploads.held_bytes)  # it is in Redis
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
