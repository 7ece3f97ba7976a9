"""Calls of workers over one connection for each ingress and worker, in place of one Ray call for
each attempt, which would cost both processes as much as all else that a request needs of them.

A worker listens at the address of its Ray node, and its leases tell address and key (`{ns}:calls`).
Whoever connects and the worker prove to each other that they know the key before a frame is parsed,
and where Ray uses TLS, so does the connection. A call that is lost is one whose connection broke:
all its calls fail at once, as calls of a dead actor do, and the journal says how far each attempt
is. Without a connection, Ray's handle calls the worker (ADR 25).

A frame is its length in four bytes, and MessagePack: `[call, request id, epoch, cause]` to the
worker, and `[call, answer]` or `[call, "", cause, message]` back. Newer versions may add elements.

A worker's wake-ups for an ingress take the same connection, once Redis has accepted what they tell:
a message that would be published is a frame after a byte 0, which begins no MessagePack array. Like
a published one it may be lost, and where there is no connection it is published.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import secrets
import socket
import ssl
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from serve_app import timings
from serve_app.cluster.replicas import Replicas
from serve_app.contract import AttemptResult, Cause, Execute, WorkerAddress, WorkerLost
from serve_app.errors import RedisUnavailable
from serve_app.loops import ended, retrieved

log = logging.getLogger("hermes.calls")

Begin = Callable[[str, int, str], "asyncio.Task[AttemptResult]"]
"""Begins an attempt: request id, epoch, and why the previous attempt ended."""

OnWakes = Callable[[bytes], None]

_WAKE = b"\0"
_NONCE_BYTES = 16
_PROOF_BYTES = 32


class _Call(msgspec.Struct, array_like=True):
    call: int
    request_id: str
    epoch: int
    cause: str


class _Reply(msgspec.Struct, array_like=True):
    call: int
    answer: str
    cause: str = ""
    """Why there is no answer; empty if there is one."""
    message: str = ""


_encode = msgspec.msgpack.Encoder().encode
_calls = msgspec.msgpack.Decoder(_Call)
_replies = msgspec.msgpack.Decoder(_Reply)


def why_lost(error: BaseException) -> WorkerLost:
    """What a caller learns of the error that has ended an attempt, here or by Ray's report."""
    last_line = (str(error).splitlines() or [""])[-1][: timings.CALL_MESSAGE_CHARS]
    of_redis = isinstance(getattr(error, "cause", error), RedisUnavailable)
    cause = Cause.NOT_OPENED if of_redis else Cause.LOST
    return WorkerLost(f"{type(error).__name__}: {last_line}", cause)


def _proof(key: bytes, whose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, whose + nonces, "sha256")


class _Frames(asyncio.Protocol):
    """Frames over a connection: those that are sent in one turn of the loop leave in one write."""

    def __init__(self, most_bytes: int) -> None:
        self.transport: asyncio.Transport | None = None
        self.proven = False
        self._most_bytes = most_bytes
        self._received = bytearray()
        self._unsent: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # of a stream
        # End it if the other machine no longer answers. A process that dies ends its own.
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timings.CALL_UNREAD_MS)

    def send(self, frame: bytes) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += (len(frame).to_bytes(4, "big"), frame)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(unsent))

    def data_received(self, data: bytes) -> None:
        self._received += data
        at = 0
        while len(self._received) - at >= 4:
            size = int.from_bytes(self._received[at : at + 4], "big")
            if size > (self._most_bytes if self.proven else timings.CALL_FRAME_BYTES):
                self.abort("a frame that is too large")
                return
            if len(self._received) - at < 4 + size:
                break
            self._take(bytes(self._received[at + 4 : at + 4 + size]))
            if self.transport is None or self.transport.is_closing():
                return
            at += 4 + size
        del self._received[:at]

    def _take(self, frame: bytes) -> None:
        if not self.proven:
            self.greeted(frame)
            return
        try:
            self.arrived(frame)
        except ValueError:  # not logged, because it may quote what it found
            self.abort("a malformed frame")

    @abstractmethod
    def greeted(self, frame: bytes) -> None:
        """The other side proves that it knows the key."""

    @abstractmethod
    def arrived(self, frame: bytes) -> None: ...

    def abort(self, why: str = "") -> None:
        if why:
            log.warning("direct calls: connection closed: %s", why)
        if self.transport is not None:
            self.transport.abort()


# -- the worker -----------------------------------------------------------------------------------


class CallServer:
    """Takes calls for one worker, up to `most_calls` at a time. An attempt goes on when its
    caller's connection is lost.
    """

    def __init__(self, begin: Begin, most_calls: int) -> None:
        self._begin = begin
        self._most_calls = most_calls
        self._running = 0
        self.key = secrets.token_bytes(32)
        self._server: asyncio.Server | None = None
        self.connections: set[_Accepted] = set()
        self.by_channel: dict[str, _Accepted] = {}

    async def start(self, name: str, host: str) -> WorkerAddress | None:
        """Listen. Returns what callers need; None if that is not possible, and then Ray's handle
        takes all calls.
        """
        try:
            tls = ray_tls(server=True)
            proof_s = timings.CALL_PROOF_S if tls else None
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Accepted(self), host, 0, ssl=tls, ssl_handshake_timeout=proof_s
            )
        except OSError as error:  # ssl.SSLError is one
            log.warning("direct calls: cannot listen, Ray takes all calls: %s", error)
            return None
        port = self._server.sockets[0].getsockname()[1]
        return WorkerAddress(name, host, port, self.key.hex())

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()

    def send_wakes(self, channel: str, message: bytes) -> bool:
        """Send a message of wake-ups to the ingress of this channel. False: it must be published,
        because there is no connection, or the ingress does not read it, or the message is large.
        """
        connection = self.by_channel.get(channel)
        if connection is None or connection.transport is None:
            return False
        most, unread = timings.CALL_WAKE_BYTES, connection.transport.get_write_buffer_size()
        if max(unread, len(message)) >= most:
            return False
        connection.send(_WAKE + message)
        return True

    def call(self, connection: _Accepted, call: _Call) -> None:
        if self._running >= self._most_calls:
            busy = _Reply(call.call, "", Cause.NOT_OPENED, "the worker has too many calls")
            connection.send(_encode(busy))
            return
        self._running += 1
        task = self._begin(call.request_id, call.epoch, call.cause)
        task.add_done_callback(partial(self._done, connection, call.call))

    def _done(self, connection: _Accepted, call: int, task: asyncio.Task[AttemptResult]) -> None:
        self._running -= 1
        if task.cancelled():
            reply = _Reply(call, "", Cause.LOST, "the worker has stopped")
        elif (error := task.exception()) is not None:
            lost = why_lost(error)
            reply = _Reply(call, "", lost.cause, str(lost))
        else:
            reply = _Reply(call, task.result().encode())
        connection.send(_encode(reply))


class _Accepted(_Frames):
    """A connection that an ingress, or anybody else, has opened."""

    def __init__(self, server: CallServer) -> None:
        super().__init__(timings.CALL_FRAME_BYTES)
        self.channel = ""
        self._server = server
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._server.connections) >= timings.CALL_CONNECTIONS:
            self.abort("too many connections")
            return
        self._server.connections.add(self)
        self._patience = asyncio.get_running_loop().call_later(timings.CALL_PROOF_S, self.abort)
        self.send(self._nonce)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._server.connections.discard(self)
        if self._server.by_channel.get(self.channel) is self:
            del self._server.by_channel[self.channel]
        if self._patience is not None:
            self._patience.cancel()

    def greeted(self, frame: bytes) -> None:
        key, (proof, rest) = self._server.key, (frame[:_PROOF_BYTES], frame[_PROOF_BYTES:])
        if not hmac.compare_digest(proof, _proof(key, b"ingress", self._nonce + rest)):
            self.abort("a caller without the key")
            return
        assert self._patience is not None
        self._patience.cancel()
        self.proven = True
        self.channel = rest[_NONCE_BYTES:].decode("ascii", "replace")
        self._server.by_channel[self.channel] = self
        self.send(_proof(key, b"worker", self._nonce + rest))

    def arrived(self, frame: bytes) -> None:
        self._server.call(self, _calls.decode(frame))


# -- the ingress ----------------------------------------------------------------------------------


class DirectCalls:
    """Calls workers, over a connection where there is one, and `otherwise` through Ray's handle.
    `channel` is that of this ingress's wake-ups, and `on_wakes` takes a message of them.
    """

    def __init__(
        self, replicas: Replicas, otherwise: Execute, channel: str, on_wakes: OnWakes
    ) -> None:
        self._replicas, self._otherwise = replicas, otherwise
        self._channel, self._on_wakes = channel, on_wakes
        self._connections: dict[WorkerAddress, _Opened] = {}
        self._opening: dict[WorkerAddress, asyncio.Task[None]] = {}
        self._by_name: dict[str, _Opened] = {}
        self._unreachable: set[WorkerAddress] = set()
        """Addresses that could not be connected to, as was logged once for each."""
        self._numbers = itertools.count()

    def execute(
        self, request_id: str, epoch: int, replica: str, cause: str
    ) -> asyncio.Future[AttemptResult]:
        """See `Execute`."""
        connection = self._by_name.get(replica)
        if connection is None or not connection.usable:
            return asyncio.ensure_future(self._otherwise(request_id, epoch, replica, cause))
        call = _Call(next(self._numbers), request_id, epoch, cause)
        answer: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()
        connection.waiting[call.call] = answer

        def over(answer: asyncio.Future[AttemptResult]) -> None:
            connection.waiting.pop(call.call, None)
            retrieved(answer)  # the caller may have given up

        answer.add_done_callback(over)
        connection.send(_encode(call))
        return answer

    def know(self, addresses: Iterable[WorkerAddress]) -> None:
        """The leases tell these addresses: connect to those of the workers that can be called, and
        leave those that nobody listens at any more.
        """
        mine = set(self._replicas.mine(addresses))
        self._unreachable &= mine
        for address in mine - self._opening.keys():
            connection = self._connections.get(address)
            if connection is None or not connection.usable:
                opening = asyncio.create_task(self._open(address), name=f"calls-{address.name}")
                self._opening[address] = opening
        for address in self._connections.keys() - mine:
            if not self._connections[address].waiting:
                self._leave(address)

    async def _open(self, address: WorkerAddress) -> None:
        lost = partial(self._replicas.disconnected, address.name)
        connection = _Opened(bytes.fromhex(address.key), self._channel, self._on_wakes, lost)
        try:
            async with asyncio.timeout(timings.CALL_PROOF_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, address.host, address.port, ssl=ray_tls(server=False)
                )
                await connection.ready
            self._connections[address] = self._by_name[address.name] = connection
            self._unreachable.discard(address)
            self._replicas.connected(address.name)
        except OSError as error:  # TimeoutError is one
            if address not in self._unreachable:
                why = str(error) or "no answer"
                log.warning("direct calls: Ray calls %s, not reached here: %s", address.name, why)
            self._unreachable.add(address)
        finally:
            del self._opening[address]
            if self._connections.get(address) is not connection:
                connection.abort()

    def _leave(self, address: WorkerAddress) -> None:
        connection = self._connections.pop(address)
        if self._by_name.get(address.name) is connection:
            del self._by_name[address.name]
        connection.on_lost = lambda: None
        connection.abort()

    async def stop(self) -> None:
        await ended(list(self._opening.values()))
        for address in list(self._connections):
            self._leave(address)


class _Opened(_Frames):
    """A connection to a worker, and the calls that wait for its answers."""

    def __init__(
        self, key: bytes, channel: str, on_wakes: OnWakes, on_lost: Callable[[], None]
    ) -> None:
        super().__init__(timings.CALL_WAKE_BYTES)
        self.on_lost = on_lost
        self._channel = channel.encode()
        self._on_wakes = on_wakes
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._expected = b""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting: dict[int, asyncio.Future[AttemptResult]] = {}

    @property
    def usable(self) -> bool:
        return self.proven and self.transport is not None and not self.transport.is_closing()

    def greeted(self, frame: bytes) -> None:
        if self._expected:
            self.proven = hmac.compare_digest(frame, self._expected)
            if not self.proven:
                self.abort("a worker without the key")
            elif not self.ready.done():
                self.ready.set_result(None)
            return
        said = frame + (ours := self._nonce + self._channel)
        self._expected = _proof(self._key, b"worker", said)
        self.send(_proof(self._key, b"ingress", said) + ours)

    def arrived(self, frame: bytes) -> None:
        if frame.startswith(_WAKE):
            self._on_wakes(frame[1:])
            return
        reply = _replies.decode(frame)
        answer = self.waiting.get(reply.call)
        if answer is None or answer.done():
            return
        if reply.cause:
            cause = Cause.NOT_OPENED if reply.cause == Cause.NOT_OPENED else Cause.LOST
            answer.set_exception(WorkerLost(reply.message, cause))
        else:
            answer.set_result(AttemptResult.decode(reply.answer))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.proven:
            self.on_lost()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError("closed by the worker"))
            self.ready.exception()
        for answer in list(self.waiting.values()):
            if not answer.done():
                answer.set_exception(WorkerLost(f"its connection is lost: {exc or 'closed'}"))


def ray_tls(server: bool) -> ssl.SSLContext | None:
    """TLS as Ray's own connections have it: both sides show a certificate of the same authority.
    Raises OSError for a file that cannot be read, or is no certificate.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
    context = ssl.create_default_context(purpose, cafile=os.environ.get("RAY_TLS_CA_CERT"))
    context.check_hostname = False  # pods have addresses, and the authority is the cluster's own
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    return context
