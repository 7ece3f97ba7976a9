"""An HTTP server on a real socket that runs a script for every request, and can cut the connection
after any byte.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from select import select
from typing import Any


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

    def pause(self, seconds: float | None = None) -> None:
        """Send nothing for so long, by default for ever; a client that leaves ends the script."""
        if select([self._connection], [], [], seconds)[0]:
            raise Cut


class Cut(Exception):
    """The script has closed the connection, or the client has."""


Script = Callable[[Asked, Wire], None]


@dataclass
class Server:
    """Runs `script` for every request; `asked` holds the received requests."""

    script: Script
    port: int = 0
    tls: ssl.SSLContext | None = None
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
        if self.tls:  # each connection shakes hands in its own thread
            listener = self.tls.wrap_socket(
                listener, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()
        return listener

    def accept(self, listener: socket.socket) -> None:
        """Serve connections until the listener is closed."""
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
def serving(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """A server on its own port."""
    server = Server(script, tls=tls)
    listener = server.listen()
    try:
        yield server
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


def whole(status: int, body: bytes, kind: str = "application/json", **headers: str) -> bytes:
    return head(status, kind, content_length=str(len(body)), **headers) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


END = b"0\r\n\r\n"


def event(data: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def cutting(data: bytes, reset: bool = False) -> Script:
    """Send this and close the connection."""

    def play(asked: Asked, wire: Wire) -> None:
        wire.send(data)
        wire.cut(reset)

    return play


def sending(data: bytes) -> Script:
    return lambda asked, wire: wire.send(data)
