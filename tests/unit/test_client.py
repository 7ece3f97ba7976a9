"""A client that reconnects by itself loses nothing and gets nothing twice, wherever the connection breaks.

Real sockets: a server in this process plays the service by a script that can cut the connection after any byte.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import client
from serve_app.client import AsyncReconnectingTransport, EventSplitter, ReconnectingTransport, RetryClock
from serve_app.errors import Reason
from serve_app.journal.events import DONE, HEARTBEAT, EventNumberer, after_event, error_events

pytestmark = pytest.mark.slow

ID = "req_0123456789abcdef"
CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "stream": true, "messages": []}'
ROOT = Path(__file__).parents[2]
LOST = (httpx.ReadError, httpx.RemoteProtocolError)  # which of the two depends on when the system notices


# The service


@dataclass
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def seen(self) -> int:
        return int(self.headers["last-event-id"])


class Wire:
    """The server's end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def cut(self, reset: bool = False) -> None:
        """End the connection: in silence, or with the reset that a dead process leaves."""
        if reset:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise Cut

    def hang(self, left: threading.Event | None = None) -> None:
        """Say nothing until the client leaves; `left` is set then."""
        with suppress(OSError):
            while self._connection.recv(1):
                pass
        if left is not None:
            left.set()
        raise Cut


class Cut(Exception):
    """The script has ended the connection."""


Script = Callable[[Asked, Wire], None]


@dataclass
class Service:
    """Plays `script` for every request; `asked` is what came."""

    script: Script
    port: int
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def keys(self) -> list[str]:
        return [asked.headers["idempotency-key"] for asked in self.asked if asked.method == "POST"]

    def listen(self) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = listener.getsockname()[1]
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()
        return listener

    def accept(self, listener: socket.socket) -> None:
        """Serve what connects, until the listener is closed."""
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(Cut, OSError), connection.makefile("rb") as incoming:
            while line := incoming.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while (header := incoming.readline().decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                asked = Asked(method, path, headers, self._body(headers, incoming))
                self.asked.append(asked)
                self.script(asked, Wire(connection))

    @staticmethod
    def _body(headers: dict[str, str], incoming: Any) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return bytes(incoming.read(int(headers.get("content-length", 0))))
        body = b""
        while size := int(incoming.readline(), 16):
            body += incoming.read(size)
            incoming.readline()
        incoming.readline()
        return body


@contextmanager
def serving(script: Script) -> Iterator[Service]:
    """A service on a port of its own."""
    service = Service(script, 0)
    listener = service.listen()
    try:
        yield service
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def head(status: int = 200, kind: str = "text/event-stream; charset=utf-8", **headers: str) -> bytes:
    """The head of an answer; `x_request_id="r"` is the header `x-request-id: r`."""
    lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def streaming(**headers: str) -> bytes:
    return head(x_request_id=ID, transfer_encoding="chunked", **headers)


def whole(status: int, body: bytes, kind: str = "application/json", **headers: str) -> bytes:
    return head(status, kind, content_length=str(len(body)), **headers) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


END = b"0\r\n\r\n"


def chat_chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    data = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def numbered(*events: bytes) -> list[bytes]:
    """Events as they stand in the journal."""
    numberer = EventNumberer()
    return [numberer.number(event) for event in events]


TEXTS = ("Grüße", " 👋", "")
EVENTS = numbered(*(chat_chunk(text) for text in TEXTS), DONE)
STREAM = b"".join(EVENTS)
PLAIN = numbered(b"data: a\n\n", b"data: b\n\n", b"data: c\n\n", DONE)
COMPLETION = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Grüße 👋"}}],
}  # fmt: skip


def answer(asked: Asked, events: list[bytes] = PLAIN) -> bytes:
    """What a healthy service answers: the stream, or its rest."""
    if asked.method == "GET":
        assert asked.path.endswith(f"/v1/requests/{ID}/events")
    rest = after_event(b"".join(events), 1, asked.seen if asked.method == "GET" else 0)
    return streaming() + (chunk(rest) if rest else b"") + END


def first(script: Script, then: Script | None = None) -> Script:
    """Plays `script` for the first request and `then`, by default a healthy service, for all others."""
    requests = iter([script])

    def play(asked: Asked, wire: Wire) -> None:
        next(requests, then or healthy)(asked, wire)

    return play


def cutting(data: bytes, reset: bool = False) -> Script:
    """Sends this and ends the connection."""

    def play(asked: Asked, wire: Wire) -> None:
        wire.send(data)
        wire.cut(reset)

    return play


def sending(data: bytes) -> Script:
    return lambda asked, wire: wire.send(data)


def sending_all(*answers: bytes) -> Script:
    """Sends these one after the other, and then plays a healthy service."""
    rest = iter(answers)
    return lambda asked, wire: wire.send(next(rest, b"") or answer(asked))


def healthy(asked: Asked, wire: Wire) -> None:
    wire.send(answer(asked))


# The two clients


@dataclass
class Got:
    """What a client of plain httpx got."""

    status: int
    headers: httpx.Headers
    chunks: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


class Blocking:
    """The transport for `httpx.Client`."""

    @staticmethod
    def fetch(service: str, give_up_after_s: float = 10.0, timeout: Any = 10.0, **request: Any) -> Got:
        """Send a request and read its answer as a stream."""
        transport = ReconnectingTransport(give_up_after_s=give_up_after_s)
        with (
            httpx.Client(transport=transport, timeout=timeout) as http,
            http.stream(**{"method": "POST", "url": service + CHAT, "content": BODY} | request) as response,
        ):
            return Got(response.status_code, response.headers, list(response.iter_raw()))

    @staticmethod
    def take(url: str, count: int) -> list[bytes]:
        """The first so many chunks of an answer, which is then closed."""
        with (
            httpx.Client(transport=ReconnectingTransport(give_up_after_s=10.0)) as http,
            http.stream("POST", url + CHAT, content=BODY) as response,
        ):
            return list(islice(response.iter_raw(), count))

    @staticmethod
    def once(*parts: bytes) -> Iterator[bytes]:
        """A request body that can be read once."""
        yield from parts

    @staticmethod
    def chat(urls: list[str], **request: Any) -> list[Any]:
        """What the SDK makes of the answer of each of these services."""
        found: list[Any] = []
        with httpx.Client(transport=ReconnectingTransport(give_up_after_s=10.0)) as http:
            for url in urls:
                sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="k", http_client=http, max_retries=0)
                result = sdk.chat.completions.create(model="m", messages=[], **request)
                found.append([part.model_dump() for part in result] if request.get("stream") else result.model_dump())
        return found


class Asyncio:
    """The transport for `httpx.AsyncClient`."""

    @staticmethod
    def fetch(service: str, give_up_after_s: float = 10.0, timeout: Any = 10.0, **request: Any) -> Got:
        async def main() -> Got:
            transport = AsyncReconnectingTransport(give_up_after_s=give_up_after_s)
            arguments = {"method": "POST", "url": service + CHAT, "content": BODY} | request
            async with (
                httpx.AsyncClient(transport=transport, timeout=timeout) as http,
                http.stream(**arguments) as response,
            ):
                return Got(response.status_code, response.headers, [part async for part in response.aiter_raw()])

        return asyncio.run(main())

    @staticmethod
    def take(url: str, count: int) -> list[bytes]:
        async def main() -> list[bytes]:
            found: list[bytes] = []
            async with (
                httpx.AsyncClient(transport=AsyncReconnectingTransport(give_up_after_s=10.0)) as http,
                http.stream("POST", url + CHAT, content=BODY) as response,
            ):
                async for part in response.aiter_raw():
                    found.append(part)
                    if len(found) == count:
                        break
            return found

        return asyncio.run(main())

    @staticmethod
    async def once(*parts: bytes) -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    @staticmethod
    def chat(urls: list[str], **request: Any) -> list[Any]:
        async def main() -> list[Any]:
            found: list[Any] = []
            async with httpx.AsyncClient(transport=AsyncReconnectingTransport(give_up_after_s=10.0)) as http:
                for url in urls:
                    sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", http_client=http, max_retries=0)
                    result = await sdk.chat.completions.create(model="m", messages=[], **request)
                    if request.get("stream"):
                        found.append([part.model_dump() async for part in result])
                    else:
                        found.append(result.model_dump())
            return found

        return asyncio.run(main())


Kind = type[Blocking] | type[Asyncio]


@pytest.fixture(params=[Blocking, Asyncio])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested is what happens between the pauses, but for the test of the pauses."""
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.01)


# Streams


def test_a_stream_cut_at_any_byte_of_its_answer_reads_as_if_it_had_not_been(kind: Kind) -> None:
    parts = [chunk(EVENTS[0]), chunk(HEARTBEAT), *map(chunk, EVENTS[1:]), END]
    sent = streaming() + b"".join(parts)
    broken: set[int] = set()

    def script(asked: Asked, wire: Wire) -> None:
        place = int(asked.path.split("/")[1])
        if place not in broken:
            broken.add(place)
            wire.send(sent[:place])
            wire.cut(reset=place % 2 == 1)
        wire.send(answer(asked, EVENTS))

    with serving(sending(streaming() + chunk(STREAM) + END)) as service:
        (unbroken,) = kind.chat([service.url], stream=True)
    assert [part["choices"][0]["delta"]["content"] for part in unbroken] == list(TEXTS)
    with serving(script) as service:
        found = kind.chat([f"{service.url}/{place}" for place in range(len(sent) + 1)], stream=True)
    assert len(found) == len(sent) + 1
    assert [place for place, result in enumerate(found) if result != unbroken] == []
    for place in range(len(sent) + 1):
        posts = [a for a in service.asked if a.method == "POST" and a.path.startswith(f"/{place}/")]
        # With the head the id is known, and the rest can be asked for.
        assert len(posts) == (2 if place < len(streaming()) else 1)
        assert len({post.headers["idempotency-key"] for post in posts}) == 1
    assert len(set(service.keys)) == len(sent) + 1


def test_a_stream_whose_connections_all_break_is_put_together(kind: Kind) -> None:
    def script(asked: Asked, wire: Wire) -> None:
        seen = asked.seen if asked.method == "GET" else 0
        rest = b"".join(EVENTS[seen:])
        wire.send(streaming() + chunk(rest[: len(EVENTS[seen]) + 8]))
        wire.cut()

    with serving(script) as service:
        assert kind.fetch(service.url).chunks == EVENTS
    assert [asked.seen for asked in service.asked[1:]] == [1, 2, 3]


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("heartbeat", [b": waiting\n\n", b": waiting\n"])
def test_only_whole_events_and_lines_of_comments_are_handed_on(kind: Kind, size: int, heartbeat: bytes) -> None:
    blocks = [b": waiting\n", EVENTS[0], b": waiting\n", EVENTS[1], b"retry: 100\n\n", *EVENTS[2:]]
    body = b"".join(heartbeat if block == b": waiting\n" else block for block in blocks)
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    with serving(sending(streaming() + b"".join(map(chunk, pieces)) + END)) as service:
        got = kind.fetch(service.url)
    assert got.chunks == blocks
    assert got.headers["x-request-id"] == ID


def test_a_comment_is_handed_on_while_the_next_event_is_still_to_come(kind: Kind) -> None:
    def script(asked: Asked, wire: Wire) -> None:
        wire.send(streaming() + chunk(PLAIN[0] + HEARTBEAT))
        wire.hang()

    with serving(script) as service:
        assert kind.take(service.url, 2) == [PLAIN[0], b": waiting\n"]


def test_events_that_were_handed_on_already_are_dropped(kind: Kind) -> None:
    broken = cutting(streaming() + chunk(b"".join(PLAIN[:2])))
    with serving(first(broken, sending(streaming() + chunk(b"".join(PLAIN)) + END))) as service:
        assert kind.fetch(service.url).chunks == PLAIN


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([PLAIN[2]], "Event 3 of the stream followed event 1"),
        ([b"data: c\n\n"], "Event without a number of the stream followed event 1"),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_hole_in_a_stream_is_an_error(kind: Kind, events: list[bytes], message: str, resumed: bool) -> None:
    if resumed:
        script = first(cutting(streaming() + chunk(PLAIN[0])), sending(streaming() + chunk(b"".join(events)) + END))
    else:
        script = sending(streaming() + chunk(PLAIN[0] + b"".join(events)) + END)
    with serving(script) as service, pytest.raises(httpx.ProtocolError, match=message):
        kind.fetch(service.url)
    assert len(service.asked) == 1 + resumed


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_journal_that_ends_before_what_was_received_is_an_error_and_no_end(kind: Kind, path: str) -> None:
    lost = HEARTBEAT + error_events(Reason.JOURNAL_LOST, "Lost.", 1, path)
    broken = cutting(streaming() + chunk(b"".join(PLAIN[:3])))
    script = first(broken, sending(streaming() + chunk(lost) + END))
    with serving(script) as service, pytest.raises(httpx.ProtocolError, match="ends before event 3"):
        kind.fetch(service.url, url=service.url + path)


def test_the_rest_is_asked_for_with_the_headers_of_the_caller_but_those_of_the_body(kind: Kind) -> None:
    theirs = {
        "authorization": "Bearer s3cret", "openai-organization": "o", "x-session-id": "s", "x-hermes-class": "batch",
        "api-key": "k", "host": "hermes.example",
    }  # fmt: skip
    only_post = {
        "content-type": "application/json", "prefer": "wait=3", "idempotency-key": "mine", "content-length": "46",
        "x-request-timeout-seconds": "20",
    }  # fmt: skip
    with serving(first(cutting(streaming() + chunk(b"".join(PLAIN[:2]))))) as service:
        assert kind.fetch(service.url, headers=theirs | only_post, params={"trace": "1"}).chunks == PLAIN
    post, get = service.asked
    assert post.path == f"{CHAT}?trace=1"
    assert theirs.items() | only_post.items() <= post.headers.items()
    assert (get.method, get.path, get.body) == ("GET", f"/v1/requests/{ID}/events", b"")
    assert theirs.items() | {("last-event-id", "2"), ("accept", "text/event-stream")} <= get.headers.items()
    assert not only_post.keys() & get.headers.keys()


def test_a_stream_that_breaks_before_its_first_event_is_read_from_the_beginning(kind: Kind) -> None:
    with serving(first(cutting(streaming()))) as service:
        assert kind.fetch(service.url).chunks == PLAIN
    assert [asked.method for asked in service.asked] == ["POST", "GET"]
    assert service.asked[1].seen == 0


@pytest.mark.parametrize("joined", [True, False])
def test_the_first_of_two_request_ids_is_the_services(kind: Kind, joined: bool) -> None:
    second = ", 7b9f" if joined else "\r\nX-Request-ID: 7b9f"
    broken = cutting(head(x_request_id=ID + second, transfer_encoding="chunked") + chunk(PLAIN[0]))
    with serving(first(broken)) as service:
        assert kind.fetch(service.url).chunks == PLAIN
    assert service.asked[1].path == f"/v1/requests/{ID}/events"


def test_silence_in_a_stream_is_a_broken_connection(kind: Kind) -> None:
    def silent(asked: Asked, wire: Wire) -> None:
        wire.send(streaming() + chunk(b"".join(PLAIN[: len(service.asked)])))
        wire.hang()

    with serving(first(silent, first(silent, first(lambda asked, wire: wire.hang())))) as service:
        assert kind.fetch(service.url, timeout=httpx.Timeout(10.0, read=0.8)).chunks == PLAIN
    assert [asked.seen for asked in service.asked[1:]] == [1, 2, 2]


def test_streams_are_asked_for_uncompressed_since_halves_of_them_do_not_fit(kind: Kind) -> None:
    def script(asked: Asked, wire: Wire) -> None:
        if "gzip" in asked.headers["accept-encoding"]:
            wire.send(streaming(content_encoding="gzip") + chunk(gzip.compress(b"".join(PLAIN))) + END)
        elif asked.method == "POST":
            cutting(streaming() + chunk(PLAIN[0]))(asked, wire)
        else:
            healthy(asked, wire)

    with serving(script) as service:
        assert kind.fetch(service.url).chunks == PLAIN


def test_a_stream_that_is_compressed_nevertheless_is_handed_on_as_it_is(kind: Kind) -> None:
    body = gzip.compress(b"".join(PLAIN))
    with serving(sending(streaming(content_encoding="gzip") + chunk(body) + END)) as service:
        assert kind.fetch(service.url).body == body
    assert len(service.asked) == 1


# When a stream is complete


@pytest.mark.parametrize(
    "final",
    [
        b"data: [DONE]\n\n",
        b"event: response.completed\ndata: {}\n\n",
        b"event: response.incomplete\ndata: {}\n\n",
        b"event: response.failed\ndata: {}\n\n",
        b"event: error\ndata: {}\n\n",
    ],
)
def test_a_connection_that_breaks_behind_the_final_event_breaks_nothing(kind: Kind, final: bytes) -> None:
    events = numbered(b"data: a\n\n", final)
    with serving(cutting(streaming() + chunk(b"".join(events)), reset=False)) as service:
        assert kind.fetch(service.url).chunks == events
    assert len(service.asked) == 1


def test_a_body_that_ends_properly_is_complete_whatever_its_last_event(kind: Kind) -> None:
    with serving(sending(streaming() + chunk(b"".join(PLAIN[:2])) + END)) as service:
        assert kind.fetch(service.url).chunks == PLAIN[:2]
    assert len(service.asked) == 1


def test_a_rest_that_ends_properly_is_complete_whatever_its_last_event(kind: Kind) -> None:
    script = first(cutting(streaming() + chunk(PLAIN[0])), sending(streaming() + END))
    with serving(script) as service:
        assert kind.fetch(service.url).chunks == PLAIN[:1]
    assert len(service.asked) == 2


@pytest.mark.parametrize("received", [1, 4])
def test_a_body_whose_end_cannot_be_told_from_a_break_ends_with_its_final_event(kind: Kind, received: int) -> None:
    with serving(first(cutting(head(x_request_id=ID) + b"".join(PLAIN[:received])))) as service:
        assert kind.fetch(service.url).chunks == PLAIN
    assert len(service.asked) == (2 if received < 4 else 1)


def test_a_body_that_ends_inside_an_event_is_not_complete(kind: Kind) -> None:
    with serving(first(sending(streaming() + chunk(PLAIN[0] + PLAIN[1][:-3]) + END))) as service:
        assert kind.fetch(service.url).chunks == PLAIN


# When a stream cannot go on


@pytest.mark.parametrize("status", [400, 404, 410, 422])
def test_a_refusal_of_the_rest_is_an_error_with_the_services_own_words(kind: Kind, status: int) -> None:
    body = b'{"error": {"message": "No such request, any more."}}'
    script = first(cutting(streaming() + chunk(PLAIN[0])), sending(whole(status, body)))
    expected = rf"No such request, any more\. \(HTTP {status}\)"
    with serving(script) as service, pytest.raises(httpx.RemoteProtocolError, match=expected):
        kind.fetch(service.url)
    assert len(service.asked) == 2


@pytest.mark.parametrize("body", [b"<h1>Gone</h1>", b'{"error": "Gone"}', b'["Gone"]'])
def test_a_refusal_in_another_shape_is_quoted_as_it_is(kind: Kind, body: bytes) -> None:
    script = first(cutting(streaming() + chunk(PLAIN[0])), sending(whole(410, body)))
    with serving(script) as service, pytest.raises(httpx.RemoteProtocolError, match=r"Gone.* \(HTTP 410\)"):
        kind.fetch(service.url)


def test_a_service_that_cannot_send_the_rest_yet_is_asked_again(kind: Kind) -> None:
    answers = sending_all(
        whole(503, b"{}", x_hermes_reason="journal_unavailable"),
        whole(500, b"Internal Server Error", "text/plain"),
        whole(429, b"{}"),
        whole(200, b"<h1>Maintenance</h1>", "text/html"),
    )
    with serving(first(cutting(streaming() + chunk(PLAIN[0])), answers)) as service:
        assert kind.fetch(service.url).chunks == PLAIN
    assert [asked.seen for asked in service.asked[1:]] == [1] * 5
    assert service.connections == 2  # each of these answers was read to its end


def silence(asked: Asked, wire: Wire) -> None:
    """A stream without anything in it."""
    wire.send(streaming())
    wire.hang()


@pytest.mark.parametrize("later", [sending(whole(503, b"{}")), silence])
def test_the_first_error_is_raised_when_nothing_more_comes_for_too_long(kind: Kind, later: Script) -> None:
    with serving(first(cutting(streaming() + chunk(PLAIN[0])), later)) as service:
        started_s = time.monotonic()
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
            kind.fetch(service.url, give_up_after_s=0.6, timeout=httpx.Timeout(10.0, read=0.25))
    assert 0.6 <= time.monotonic() - started_s < 5
    assert len(service.asked) > 2


def test_an_error_that_was_overcome_is_not_raised_later(kind: Kind) -> None:
    def more_and_silence(asked: Asked, wire: Wire) -> None:
        wire.send(streaming() + chunk(PLAIN[1]))
        wire.hang()

    script = first(cutting(streaming() + chunk(PLAIN[0])), first(more_and_silence, sending(whole(503, b"{}"))))
    with serving(script) as service, pytest.raises(httpx.ReadTimeout):
        kind.fetch(service.url, give_up_after_s=0.3, timeout=httpx.Timeout(10.0, read=0.5))


@pytest.mark.parametrize("sign", ["event", "comment"])
def test_every_sign_of_life_gives_the_service_its_whole_time_again(kind: Kind, sign: str) -> None:
    events = numbered(*[b"data: a\n\n"] * 5, DONE)

    def script(asked: Asked, wire: Wire) -> None:
        tries = len(service.asked)
        if tries == 6:
            wire.send(answer(asked, events))
            return
        if tries > 1:
            time.sleep(0.4)
        wire.send(streaming() + chunk(events[tries - 1] if sign == "event" else HEARTBEAT))
        wire.cut()

    with serving(script) as service:
        started_s = time.monotonic()
        got = kind.fetch(service.url, give_up_after_s=1.5)
    assert time.monotonic() - started_s > 1.5
    assert [part for part in got.chunks if part != b": waiting\n"] == events


def test_a_stream_that_is_not_the_services_is_handed_on_untouched(kind: Kind) -> None:
    body = b"data: a\r\n\r\nid: 7\ndata: b\n\ndata: c"
    with serving(sending(head(transfer_encoding="chunked") + chunk(body) + END)) as service:
        assert kind.fetch(service.url).body == body
    with serving(cutting(head(transfer_encoding="chunked") + chunk(body))) as service, pytest.raises(LOST):
        kind.fetch(service.url)
    assert len(service.asked) == 1


def test_a_stream_without_numbers_is_handed_on_and_its_break_is_an_error(kind: Kind) -> None:
    events = [b"data: a\n\n", b"data: b\n\n"]
    with serving(sending(streaming() + chunk(b"".join(events)) + END)) as service:
        assert kind.fetch(service.url).chunks == events
    with serving(cutting(streaming() + chunk(b"".join(events)))) as service, pytest.raises(LOST):
        kind.fetch(service.url)
    assert len(service.asked) == 1


# Leaving


def test_closing_an_answer_closes_the_connection_that_it_has_come_to(kind: Kind) -> None:
    left = threading.Event()

    def rest(asked: Asked, wire: Wire) -> None:
        wire.send(streaming() + chunk(PLAIN[1]))
        wire.hang(left)

    with serving(first(cutting(streaming() + chunk(PLAIN[0])), rest)) as service:
        assert kind.take(service.url, 2) == PLAIN[:2]
        assert left.wait(5)


def test_an_answer_that_another_thread_closes_is_not_asked_for_again() -> None:
    waiting = threading.Event()

    def silent(asked: Asked, wire: Wire) -> None:
        wire.send(streaming() + chunk(PLAIN[0]))
        waiting.wait(5)
        wire.cut()

    errors: list[Exception] = []

    def read(response: httpx.Response) -> None:
        try:
            list(response.iter_raw())
        except Exception as error:
            errors.append(error)

    with serving(silent) as service, httpx.Client(transport=ReconnectingTransport()) as http:
        with http.stream("POST", service.url + CHAT, content=BODY) as response:
            reader = threading.Thread(target=read, args=(response,))
            reader.start()
            time.sleep(0.1)
            response.close()
        waiting.set()
        reader.join(5)
        assert not reader.is_alive()
    assert errors
    assert len(service.asked) == 1


def test_a_task_that_is_cancelled_while_it_waits_for_the_service_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 60.0)

    async def main(url: str) -> None:
        async with httpx.AsyncClient(transport=AsyncReconnectingTransport()) as http:
            await asyncio.wait_for(http.post(url + CHAT, content=BODY), 0.3)

    with serving(cutting(streaming() + chunk(PLAIN[0]))) as service:
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            asyncio.run(main(service.url))
        assert time.monotonic() - started_s < 5


def test_the_sdk_uses_the_connection_of_a_finished_stream_again() -> None:
    with serving(lambda asked, wire: wire.send(answer(asked, EVENTS))) as service:
        one, two = Asyncio.chat([service.url] * 2, stream=True)
    assert one == two
    assert service.connections == 1


def test_a_transport_of_the_callers_is_used_and_closed() -> None:
    used: list[str] = []

    class Inner(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            used.append(request.method)
            return super().handle_request(request)

        def close(self) -> None:
            used.append("closed")
            super().close()

    with serving(first(cutting(streaming() + chunk(PLAIN[0])))) as service:
        with httpx.Client(transport=ReconnectingTransport(transport=Inner())) as http:
            assert http.post(service.url + CHAT, content=BODY).content == b"".join(PLAIN)
        assert used == ["POST", "GET", "closed"]


# Answers that are no streams


def test_a_json_answer_cut_at_any_byte_is_asked_for_again_with_the_same_key(kind: Kind) -> None:
    sent = whole(200, json.dumps(COMPLETION, ensure_ascii=False).encode(), x_request_id=ID)
    broken: set[int] = set()

    def script(asked: Asked, wire: Wire) -> None:
        place = int(asked.path.split("/")[1])
        if place not in broken:
            broken.add(place)
            wire.send(sent[:place])
            wire.cut(reset=place % 2 == 1)
        wire.send(sent)

    with serving(script) as service:
        found = kind.chat([f"{service.url}/{place}" for place in range(len(sent))])
    assert found == [found[0]] * len(sent)
    assert found[0]["choices"][0]["message"]["content"] == "Grüße 👋"
    assert len(service.keys) == 2 * len(sent)
    assert service.keys[::2] == service.keys[1::2]
    assert len(set(service.keys)) == len(sent)


def test_a_json_answer_that_is_compressed_nevertheless_is_handed_on_as_it_is(kind: Kind) -> None:
    body = gzip.compress(json.dumps(COMPLETION).encode())
    with serving(sending(whole(200, body, content_encoding="gzip"))) as service:
        (found,) = kind.chat([service.url])
        assert kind.fetch(service.url).body == body
    assert found["choices"][0]["message"]["content"] == "Grüße 👋"


def test_a_service_that_refuses_connections_for_a_while_is_waited_for(kind: Kind) -> None:
    with serving(healthy) as service:
        pass
    listeners: list[socket.socket] = []
    threading.Timer(0.3, lambda: listeners.append(service.listen())).start()
    assert kind.fetch(service.url).chunks == PLAIN
    listeners[0].close()
    assert len(service.asked) == 1


def test_a_service_that_lets_connections_wait_too_long_is_tried_again(kind: Kind) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    service = Service(healthy, listener.getsockname()[1])
    # On Linux a full queue drops what more comes. Who stands in it says nothing and leaves when the queue moves.
    queue = [socket.socket() for _ in range(2)]
    for waiting in queue:
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())

    def move() -> None:
        for waiting in queue:
            waiting.close()
        service.accept(listener)

    threading.Timer(0.5, move).start()
    assert kind.fetch(service.url, timeout=httpx.Timeout(10.0, connect=0.2)).chunks == PLAIN
    assert len(service.asked) == 1
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_the_last_error_is_raised_when_the_service_stays_away(kind: Kind) -> None:
    with serving(first(cutting(b""), cutting(b"nonsense\r\n\r\n"))) as service:
        started_s = time.monotonic()
        with pytest.raises(httpx.RemoteProtocolError, match="nonsense"):
            kind.fetch(service.url, give_up_after_s=0.3)
    assert 0.3 <= time.monotonic() - started_s < 5
    assert len(service.asked) > 2
    with pytest.raises(httpx.ConnectError):
        kind.fetch(service.url, give_up_after_s=0.3)


def test_without_time_nothing_is_tried_again(kind: Kind) -> None:
    with serving(cutting(b"")) as service, pytest.raises(httpx.RemoteProtocolError):
        kind.fetch(service.url, give_up_after_s=0.0)
    assert len(service.asked) == 1


@pytest.mark.parametrize("begun", [b"", head(200, "application/json", content_length="9") + b"{"])
def test_the_callers_own_timeout_ends_his_wait_for_an_answer(kind: Kind, begun: bytes) -> None:
    def silent(asked: Asked, wire: Wire) -> None:
        wire.send(begun)
        wire.hang()

    with serving(silent) as service, pytest.raises(httpx.ReadTimeout):
        kind.fetch(service.url, timeout=httpx.Timeout(10.0, read=0.5))
    assert len(service.asked) <= 1  # 0: on a slow machine the request may not even have been read by then


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("headers", [{}, {"x_request_id": "0f8fad5b-d9cb-469f-a165-70867728950e"}])
def test_an_error_from_before_the_service_is_tried_again(kind: Kind, status: int, headers: dict[str, str]) -> None:
    failure = whole(status, b"Service Unavailable", "text/plain", **headers)
    with serving(sending_all(failure, failure)) as service:
        assert kind.fetch(service.url).chunks == PLAIN
    assert len(service.keys) == 3
    assert len(set(service.keys)) == 1
    assert service.connections == 1  # the answers before were read and closed


def test_an_error_from_before_the_service_is_handed_on_when_it_stays(kind: Kind) -> None:
    with serving(sending(whole(503, b"Service Unavailable", "text/plain"))) as service:
        got = kind.fetch(service.url, give_up_after_s=0.3)
    assert (got.status, got.body) == (503, b"Service Unavailable")
    assert len(service.asked) > 2


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("header", [{"x_hermes_reason": "internal"}, {"x_hermes_replica": "a"}, {"x_request_id": ID}])
def test_an_error_of_the_service_itself_is_handed_on(kind: Kind, status: int, header: dict[str, str]) -> None:
    with serving(sending(whole(status, b'{"error": {}}', **header))) as service:
        got = kind.fetch(service.url)
    assert (got.status, got.body) == (status, b'{"error": {}}')
    assert len(service.asked) == 1


@pytest.mark.parametrize("status", [200, 202, 301, 400, 404, 408, 429, 501])
def test_every_other_answer_is_handed_on(kind: Kind, status: int) -> None:
    with serving(sending(whole(status, b"{}"))) as service:
        assert kind.fetch(service.url).status == status
    assert len(service.asked) == 1


# What is sent


def test_a_body_that_can_be_read_once_is_sent_again_whole(kind: Kind) -> None:
    with serving(first(cutting(b""))) as service:
        assert kind.fetch(service.url, content=kind.once(BODY[:9], BODY[9:])).chunks == PLAIN
    assert [asked.body for asked in service.asked] == [BODY, BODY]


def test_every_request_has_a_key_of_its_own_and_the_callers_is_kept() -> None:
    with serving(sending(whole(200, b"{}"))) as service, httpx.Client(transport=ReconnectingTransport()) as http:
        request = http.build_request("POST", service.url + CHAT, content=BODY)
        for _ in range(2):
            http.send(request)
        http.post(service.url + CHAT, content=BODY, headers={"Idempotency-Key": "mine"})
    assert "idempotency-key" not in request.headers
    assert len(set(service.keys)) == 3
    assert service.keys[2] == "mine"
    assert len(service.keys[0]) == 36


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("DELETE", f"/v1/requests/{ID}"), ("POST", "/tokenize")]
)
def test_requests_without_such_a_promise_pass_untouched(kind: Kind, method: str, path: str) -> None:
    with serving(cutting(b"")) as service, pytest.raises(httpx.RemoteProtocolError):
        kind.fetch(service.url, method=method, url=service.url + path)
    (asked,) = service.asked
    assert (asked.method, asked.path, asked.body) == (method, path, BODY)
    assert "idempotency-key" not in asked.headers
    assert "gzip" in asked.headers["accept-encoding"]


# The parts


def test_pauses_are_spread_evenly_below_a_bound_that_doubles_to_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = [[RetryClock.pause_s(clock) or 0.0 for _ in range(7)] for clock in (RetryClock(60.0) for _ in range(500))]
    for pauses_s, bound_s in zip(zip(*rows, strict=True), (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0), strict=True):
        assert 0.95 * bound_s < max(pauses_s) <= bound_s
        assert 0.0 <= min(pauses_s) < 0.05 * bound_s
        assert sum(pauses_s) / len(pauses_s) == pytest.approx(bound_s / 2, rel=0.15)


def test_time_is_up_so_many_seconds_after_the_first_failure_since_the_service_was_reached() -> None:
    clock = RetryClock(0.2)
    time.sleep(0.3)  # before the first failure: a long answer takes nothing from the time to mend it
    assert clock.pause_s() is not None
    time.sleep(0.3)
    assert clock.pause_s() is None
    clock.restart()
    assert clock.pause_s() is not None


@given(st.integers())
def test_events_come_whole_once_and_in_order_however_their_bytes_and_connections_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    events = [*EVENTS[:2], HEARTBEAT, *EVENTS[2:]]
    splitter, found = EventSplitter(), []
    for _ in range(100):
        if splitter.finished:
            break
        behind = chance.randint(0, splitter.last)  # a service that sends more again than it has to
        body = after_event(b"".join(events), 1, behind)
        body = body[: chance.randint(0, 2 * len(body))]
        while body:
            size = chance.randint(1, 40)
            found += splitter.feed(body[:size])
            body = body[size:]
        splitter.part = b""
    assert [event for event in found if event != b": waiting\n"] == EVENTS


def test_the_client_needs_httpx_and_nothing_else() -> None:
    code = """
import sys
import httpx
before = set(sys.modules)
import serve_app.client
print(*sorted(set(sys.modules) - before - set(sys.stdlib_module_names)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "serve_app",
        "serve_app.client",
    }


def test_an_sdk_on_httpx2_can_use_it_through_the_alias_of_httpx2() -> None:
    code = """
import sys
import httpx2
httpx2.alias_httpx()
import openai
from serve_app.client import ReconnectingTransport
http = openai.DefaultHttpx2Client(transport=ReconnectingTransport())
sdk = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="k", http_client=http, max_retries=0)
for part in sdk.chat.completions.create(model="m", messages=[], stream=True):
    print(ascii(part.choices[0].delta.content))
"""
    broken = cutting(streaming() + chunk(EVENTS[0] + EVENTS[1][:-9]))
    with serving(first(broken, lambda asked, wire: wire.send(answer(asked, EVENTS)))) as service:
        command = [sys.executable, "-c", code, service.url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [ascii(text) for text in TEXTS]
    assert [asked.method for asked in service.asked] == ["POST", "GET"]
