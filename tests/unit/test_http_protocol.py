"""What a client gets is what uvicorn's own connections would have sent it, in fewer writes: on real
sockets, with both event loops.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from serve_app import timings
from serve_app.ingress.client_connections import PUSH, HttpProtocol
from serve_app.ingress.exchange import Exchange, ExchangeParts
from serve_app.ingress.followers import Follower, Followers
from serve_app.journal.entries import (
    REQUEST_ID,
    TERMINAL_ID,
    AttemptFacts,
    Entry,
    EntryId,
    Head,
    Summary,
    encode_wakes,
    wake_of,
)
from serve_app.settings import Settings
from tests.tables import Failures, each
from tests.waiting import eventually

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
PIECE = b"p" * timings.SEND_BYTES
BUFFERED_BYTES = 64 * 1024 + timings.SEND_BYTES
"""What asyncio and uvloop take for a socket before they make a sender wait, and a piece."""
EVENTS = [b"data: %d\n\n" % number for number in range(5)]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers by the path's last word."""
    kind = scope["path"].rsplit("/")[-1]

    async def begin(*headers: tuple[bytes, bytes]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*headers]})

    async def give(body: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})

    if kind == "fails":
        raise ValueError("before the head")
    if kind == "echo":
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await begin((b"content-length", b"%d" % len(body)))
        await give(body, more=False)
        return
    if kind == "whole":
        await begin((b"content-length", b"5"))
        await give(b"whole", more=False)
        return
    await begin()
    if kind == "late":
        await asyncio.sleep(0.01)
    if kind == "breaks":
        await give(b"a part")
        raise ValueError("after a part")
    if kind == "large":
        await give(PIECE * 20, more=False)
        return
    if kind == "many":
        for number in range(20_000):
            await give(b"%d," % number)
    push = scope.get("extensions", {}).get(PUSH, lambda _: False)
    for body in [*EVENTS, b""]:
        if not push(body):
            await give(body)
        if kind == "slowly":
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    await give(EVENTS[-1])
    await give(b"", more=False)


def request(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    lines = [f"{method} /{path} HTTP/{version}", "host: here", *headers, "", ""]
    return "\r\n".join(lines).encode()


LAST = "connection: close"
CONVERSATIONS = {
    **{
        f"{method} {path}": [request(path, LAST, method=method)]
        for path in "whole stream slowly late fails breaks large many".split()
        for method in ("GET", "HEAD")
    },
    "HTTP/1.0": [request("stream", version="1.0")],
    "one after another": [request("stream"), request("whole"), request("stream", LAST)],
    "all at once": [request("slowly") + request("whole") + request("stream", LAST)],
    "a body that waits for leave": [
        request("echo", "content-length: 4", "expect: 100-continue", LAST, method="POST"),
        b"body",
    ],
    "a body that does not": [
        request("echo", "content-length: 4", "expect: 100-continue", LAST, method="POST") + b"body",
    ],
    "no HTTP": [b"nonsense\r\n\r\n"],
    "nonsense after a request": [request("whole"), b"nonsense\r\n\r\n"],
    "a protocol that nobody speaks": [
        request("whole", "connection: upgrade, close", "upgrade: nothing")
    ],
}


class Counting:
    """A transport that counts its writes."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.writes = list[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        self._transport.write(data)


class Counted(HttpProtocol):
    """A connection whose writes are counted."""

    def connection_made(self, transport: Any) -> None:
        self.counting = Counting(transport)
        super().connection_made(self.counting)  # type: ignore[arg-type]
        made.append(self)


made = list[Counted]()
"""Those of one test."""


@asynccontextmanager
async def served(
    protocol: type[HttpToolsProtocol], application: Any = app, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, ServerState, list[dict[str, Any]]]]:
    """The port, the server's connections, and what went wrong in its event loop."""
    config = uvicorn.Config(
        application, log_level="critical", access_log=False, lifespan="off", ws="none"
    )
    config.load()
    state, wrong = ServerState(), list[dict[str, Any]]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        listening.bind(("127.0.0.1", 0))
        server = await loop.create_server(
            lambda: protocol(config, state, {}), sock=listening, ssl=tls
        )
        try:
            yield listening.getsockname()[1], state, wrong
        finally:
            server.close()
            for one in list(state.connections):
                one.transport.abort()
            for task in list(state.tasks):
                task.cancel()
            await eventually(lambda: not state.connections)


ENDS = (b"Continue\r\n\r\n", b"\r\n0\r\n\r\n", b"\r\n\r\nwhole")


async def conversation(port: int, said: list[bytes], tls: ssl.SSLContext | None = None) -> bytes:
    """All that the server answers. A part is said when it has answered the one before, or waits."""
    name = "localhost" if tls else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name)
    got = b""
    for part in said:
        writer.write(part)
        while part is not said[-1] and not got.endswith(ENDS):
            got += (some := await reader.read(1 << 16))
            assert some, got
    got += await reader.read()
    writer.close()
    return got


def run(wanted: Coroutine[Any, Any, None], loop: str = "uvloop") -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(wanted)


@each("loop", LOOPS)
def test_a_client_gets_the_same_bytes_as_from_uvicorns_own_connections(loop: str) -> None:
    async def compare() -> None:
        with Failures() as failures:
            async with served(HttpToolsProtocol) as theirs, served(HttpProtocol) as ours:
                for name, said in CONVERSATIONS.items():
                    with failures.of(name):
                        expected = await conversation(theirs[0], said)
                        assert expected
                        assert await conversation(ours[0], said) == expected
                assert not ours[2]

    run(compare(), loop)


@each("loop", LOOPS)
def test_and_over_tls(loop: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    making = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    names = "-subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*f"{making} {names}".split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def compare() -> None:
        with Failures() as failures:
            async with (
                served(HttpToolsProtocol) as theirs,
                served(HttpProtocol, tls=context) as ours,
            ):
                for name, said in CONVERSATIONS.items():
                    with failures.of(name):
                        expected = await conversation(theirs[0], said)
                        assert await conversation(ours[0], said, trusting) == expected
                assert not ours[2]

    run(compare(), loop)


# -- how many writes ------------------------------------------------------------------------------


class Nobody:
    """The disconnect handling, of which nothing is asked here."""

    def left(self, follower: Follower, departed: bool) -> None:
        pass


def journal(tokens: int, streamed: bool) -> list[tuple[Entry, str]]:
    """The wake-ups of a request, one for each token: what they say, and what they follow."""
    opened = msgspec.json.encode(AttemptFacts("r1", "engine-1", 0))
    kind = "text/event-stream" if streamed else "application/json"
    entries = [Entry(EntryId(1, 0), {b"n": b"1", b"m": opened})]
    for number in range(1, tokens + 1):
        fields = {b"n": b"1", b"b": b"id: %d\ndata: a\n\n" % number, b"e": b"%d" % number}
        if not streamed:
            fields[b"e"] = b"0"
        if number == 1:
            fields[b"h"] = msgspec.json.encode(Head(200, [("content-type", kind)]))
        at = EntryId(1, number)
        if number == tokens:
            at = TERMINAL_ID
            fields |= {b"k": b"completed", b"w": b""}
            fields[b"m"] = msgspec.json.encode(Summary(None, None, 1, 0))
        entries.append(Entry(at, fields))
    before = [REQUEST_ID, *(entry.id for entry in entries)]
    return [(entry, str(id_)) for entry, id_ in zip(entries, before, strict=False)]


@each("tokens, streamed, writes", [(4, True, 4), (64, True, 64), (1, False, 1), (9, False, 1)])
def test_an_answer_takes_one_write_for_each_entry_and_no_other(
    tokens: int, streamed: bool, writes: int
) -> None:
    followers = Followers(Settings(), None, "ingress-1")  # type: ignore[arg-type]
    woken = 0
    made.clear()

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            nonlocal woken
            woken += message["type"] == "http.response.body"
            await send(message)

        follower = followers.follow_new("req_1")
        parts = ExchangeParts(Nobody(), 1e9, None)  # type: ignore[arg-type]
        answer = Exchange(parts, follower, "/v1/completions", None, streamed)
        await answer(scope, receive, counted)

    async def ask() -> None:
        async with served(Counted, answering) as (port, _, wrong):
            asked = asyncio.create_task(conversation(port, [request("", LAST, method="POST")]))
            await eventually(lambda: followers.request_ids)
            written = journal(tokens, streamed)
            for entry, before in written:
                followers.on_message(encode_wakes([wake_of("req_1", entry, before)]))
                for _ in range(3):
                    await asyncio.sleep(0)
            got = await asked
            for entry, _ in written:
                assert entry.body in got
            assert len(made[0].counting.writes) == writes
            assert woken == (3 if tokens > 1 and streamed else 1), "others are pushed"
            assert not wrong

    run(ask())


def test_what_is_written_in_a_turn_leaves_in_one_write_and_what_is_pushed_at_once() -> None:
    async def ask() -> None:
        with Failures() as failures:
            async with served(Counted) as (port, _, _):
                rows = [("whole", 1), ("stream", 1), ("slowly", 6), ("large", 1), ("late", 7)]
                for path, writes in rows:
                    with failures.of(path):
                        made.clear()
                        await conversation(port, [request(path, LAST)])
                        assert len(made[0].counting.writes) == writes

    run(ask())


# -- who does not read, and who leaves ------------------------------------------------------------


@each("loop, size", itertools.product(LOOPS, (100, 10_000, timings.SEND_BYTES)))
@each("pushed", [True, False])
def test_what_a_client_does_not_read_is_bounded(loop: str, size: int, pushed: bool) -> None:
    body, made = b"b" * size, 0
    goes_on = asyncio.Event()

    async def flooding(scope: Any, receive: Any, send: Any) -> None:
        nonlocal made
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not goes_on.is_set():
            made += 1
            assert made < 10_000, "nobody reads"
            if pushed and scope["extensions"][PUSH](body):
                continue
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask() -> None:
        async with served(HttpProtocol, flooding) as (port, state, wrong):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request("", LAST))
            await eventually(lambda: state.connections)
            (connection,) = state.connections
            await eventually(lambda: connection.flow.write_paused)  # type: ignore[union-attr]
            held = connection.transport.get_write_buffer_size()
            assert held <= BUFFERED_BYTES
            goes_on.set()
            got = await reader.read()
            assert got.count(b"b" * size) == made
            assert not wrong
            writer.close()

    run(ask(), loop)


@each("loop", LOOPS)
def test_bytes_for_a_client_that_has_left_are_dropped(loop: str) -> None:
    done, turns = asyncio.Event(), list[None]()

    async def leaving(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        push = scope["extensions"][PUSH]
        while not made[-1].counting.writes:
            await asyncio.sleep(0)
        transport: Any = made[-1].transport
        transport._force_close(ConnectionResetError())  # as both loops do after one
        try:
            for _ in range(5):
                push(b"pushed")
                await send({"type": "http.response.body", "body": b"sent", "more_body": True})
                await asyncio.sleep(0)
                turns.append(None)
        finally:
            done.set()

    async def ask() -> None:
        async with served(Counted, leaving) as (port, _, wrong):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(""))
            await done.wait()
            assert len(turns) == 5
            assert not wrong
            writer.close()

    run(ask(), loop)


def test_nothing_is_pushed_as_the_answer_to_a_head_nor_an_end() -> None:
    pushed = list[bool]()

    async def asking(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        pushed.append(PUSH in scope.get("extensions", {}))
        if pushed[-1]:
            pushed.append(scope["extensions"][PUSH](b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask() -> None:
        async with served(HttpProtocol, asking) as (port, _, _):
            for method in ("HEAD", "GET"):
                await conversation(port, [request("", LAST, method=method)])
        assert pushed == [False, True, False]

    run(ask())


def test_nothing_is_pushed_from_another_thread() -> None:
    """There Serve runs the application unless it is told to run it on the server's loop."""
    pushed = list[bool]()

    async def elsewhere(push: Any) -> None:
        pushed.append(push(b"data: 1\n\n"))

    async def asking(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        push = scope["extensions"][PUSH]
        await asyncio.to_thread(asyncio.run, elsewhere(push))
        pushed.append(push(b"data: 2\n\n"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask() -> None:
        async with served(HttpProtocol, asking) as (port, _, wrong):
            answer = await conversation(port, [request("", LAST)])
            assert b"data: 2" in answer
            assert b"data: 1" not in answer
            assert not wrong

    run(ask(), "asyncio")
    assert pushed == [False, True]
