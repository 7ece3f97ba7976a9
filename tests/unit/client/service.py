"""A scripted service on a real socket that can cut the connection after any byte."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from serve_app.journal.events import DONE, EventNumberer, after_event

ID = "req_0123456789abcdef"
CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "stream": true, "messages": []}'
ROOT = Path(__file__).parents[3]
LOST = (
    httpx.ReadError,
    httpx.RemoteProtocolError,
)  # which of the two depends on when the system notices


@dataclass
class Asked:
    """A request as received."""

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
        """Close the connection: silently, or with the reset of a dead process."""
        if reset:
            self._connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        raise Cut

    def hang(self, left: threading.Event | None = None) -> None:
        """Send nothing until the client leaves; then set `left`."""
        with suppress(OSError):
            while self._connection.recv(1):
                pass
        if left is not None:
            left.set()
        raise Cut


class Cut(Exception):
    """The script has closed the connection."""


Script = Callable[[Asked, Wire], None]


@dataclass
class Service:
    """Runs `script` for every request; `asked` holds the received requests."""

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
        """Serve connections until the listener is closed."""
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
    """A service on its own port."""
    service = Service(script, 0)
    listener = service.listen()
    try:
        yield service
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def head(
    status: int = 200, kind: str = "text/event-stream; charset=utf-8", /, **headers: str
) -> bytes:
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
    data = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def numbered(*events: bytes) -> list[bytes]:
    """Events as in the journal."""
    numberer = EventNumberer()
    return [numberer.number(event) for event in events]


TEXTS = ("Grüße", " 👋", "")
EVENTS = numbered(*(chat_chunk(text) for text in TEXTS), DONE)
STREAM = b"".join(EVENTS)
PLAIN = numbered(b"data: a\n\n", b"data: b\n\n", b"data: c\n\n", DONE)
COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Grüße 👋"},
        }
    ],
}


def answer(asked: Asked, events: list[bytes] = PLAIN) -> bytes:
    """A healthy service's answer: the stream, or its rest."""
    if asked.method == "GET":
        assert asked.path.endswith(f"/v1/requests/{ID}/events")
    rest = after_event(b"".join(events), 1, asked.seen if asked.method == "GET" else 0)
    return streaming() + (chunk(rest) if rest else b"") + END


def first(script: Script, then: Script | None = None) -> Script:
    """Plays `script` for the first request and `then`, by default a healthy service, for all
    others.
    """
    requests = iter([script])

    def play(asked: Asked, wire: Wire) -> None:
        next(requests, then or healthy)(asked, wire)

    return play


def cutting(data: bytes, reset: bool = False) -> Script:
    """Send this and close the connection."""

    def play(asked: Asked, wire: Wire) -> None:
        wire.send(data)
        wire.cut(reset)

    return play


def sending(data: bytes) -> Script:
    return lambda asked, wire: wire.send(data)


def sending_all(*answers: bytes) -> Script:
    """Send these one after another, and then act as a healthy service."""
    rest = iter(answers)
    return lambda asked, wire: wire.send(next(rest, b"") or answer(asked))


def healthy(asked: Asked, wire: Wire) -> None:
    wire.send(answer(asked))
