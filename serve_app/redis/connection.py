"""A pipelined connection to Redis: raw RESP through hiredis, without objects per command; and how
one is opened, with TLS, a login, and Sentinels that know where the primary is.

redis-py would cost about 15 µs per command in a pipeline, more than Redis itself needs.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from itertools import chain
from typing import Any, NamedTuple, cast

import hiredis

from serve_app import timings
from serve_app.errors import AnswerLost, RedisRefuses, RedisUnavailable
from serve_app.redis.replies import Reply, check_refused, is_unknown_script
from serve_app.settings import RedisSettings
from serve_app.settings.redis_address import Login

Command = tuple[Any, ...] | bytes
"""Its words, or all of it as Redis reads it."""


class Script(str):
    """A Lua script that is sent as its digest, once a connection has sent it whole."""

    digest: str

    def __new__(cls, text: str) -> Script:
        made = super().__new__(cls, text)
        made.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        return made


def as_arguments(commands: Sequence[Command]) -> list[object]:
    """For a script that executes them: of each command the number of its words, and the words."""
    return [word for command in commands for word in (len(command), *command)]


class _Call(NamedTuple):
    """Commands whose replies are awaited."""

    expected: int
    replies: list[Reply]
    future: asyncio.Future[list[Reply]]
    within_s: float
    until_s: float


class RespConnection(asyncio.Protocol):
    """A connection whose replies arrive in the order of its commands. `on_push` receives pub/sub
    messages `(channel, payload)`; `on_lost` is called once, when the connection ends.
    """

    def __init__(
        self,
        on_push: Callable[[bytes, bytes], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Call] = deque()
        self._scripts: set[Script] = set()
        """Those that Redis has, unless it has forgotten them."""
        self._unsent: list[list[bytes]] = []
        """The newest of these calls, which leave together at the end of the loop's turn: a write of
        its own costs both sides more than a command."""
        self._look: asyncio.TimerHandle | None = None
        self._looks_s = math.inf
        self._on_push = on_push
        self._on_lost = on_lost
        self._unasked: Reply = None
        """What Redis said without a question, before it closed: why it refuses the connection."""

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def refusal(self) -> Exception | None:
        """The error that Redis has closed the connection with."""
        return self._unasked if isinstance(self._unasked, Exception) else None

    @property
    def _why_closed(self) -> str:
        return "closed by Redis" if self._unasked is None else str(self._unasked)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is one, but is not declared as such
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._next()) is not False:
            if self._on_push and isinstance(reply, list) and reply[:1] == [b"message"]:
                self._on_push(reply[1], reply[2])
            elif not self._waiting:
                self._unasked = reply
            else:
                call = self._waiting[0]
                call.replies.append(reply)
                if len(call.replies) == call.expected:
                    self._waiting.popleft()
                    if not call.future.done():
                        call.future.set_result(call.replies)

    def _next(self) -> Reply:
        """The next whole reply; False if there is none yet, or what came is no reply at all."""
        try:
            return self._reader.gets()
        except hiredis.HiredisError as error:  # another server listens there
            self._unasked = str(error)
            self.abort()
            return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._look is not None:
            self._look.cancel()
        sent = len(self._waiting) - len(self._unsent)
        for number, call in enumerate(self._waiting):
            if call.replies and isinstance(call.replies[-1], Exception):  # its last words
                self._unasked = call.replies[-1]
            if not call.future.done():
                why = exc if exc and self._unasked is None else self._why_closed
                lost = AnswerLost if number < sent else RedisUnavailable
                call.future.set_exception(lost(f"connection to Redis lost: {why}"))
        self._waiting.clear()
        self._unsent.clear()
        if self._on_lost is not None:
            self._on_lost()

    def call(
        self, commands: Sequence[Command], within_s: float = math.inf
    ) -> asyncio.Future[list[Reply]]:
        """Send commands, in one write with all others of this turn of the loop. The future gives
        their replies; errors are exception objects among them. If a reply is late, the connection
        is dropped.

        Raises:
            RedisUnavailable: the connection is not open, or ends before the last reply; if it is
                `AnswerLost`, it is unknown whether Redis has executed the commands or will.
            ValueError: a command cannot be encoded, and none of them is sent.
        """
        if self._transport is None or self._transport.is_closing():
            raise RedisUnavailable(f"no connection to Redis: {self._why_closed}")
        packed = [_packed(command) for command in commands]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Reply]] = loop.create_future()
        if not commands:
            future.set_result([])
            return future
        if not self._unsent:
            loop.call_soon(self.flush)
        self._unsent.append(packed)
        until_s = loop.time() + within_s
        self._waiting.append(_Call(len(commands), [], future, within_s, until_s))
        if until_s < self._looks_s:
            self._look_at(until_s)
        return future

    def flush(self) -> None:
        """Send what has been collected."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(chain.from_iterable(self._unsent)))
            self._unsent.clear()

    async def ask(self, commands: Sequence[Command], within_s: float) -> list[Reply]:
        """`call`, and wait for the replies. A script that Redis has forgotten is sent again."""
        sent = [self._shortened(command) for command in commands]
        replies = await self.call(sent, within_s)
        forgotten = [
            number
            for number, command in enumerate(commands)
            if sent[number] is not command and is_unknown_script(replies[number])
        ]
        if forgotten:
            whole = [commands[number] for number in forgotten]
            for number, reply in zip(forgotten, await self.call(whole, within_s), strict=True):
                replies[number] = reply
        return replies

    def _shortened(self, command: Command) -> Command:
        if isinstance(command, bytes) or len(command) < 2 or type(command[1]) is not Script:
            return command
        _, script, *more = command
        if script in self._scripts:
            return ("EVALSHA", script.digest, *more)
        self._scripts.add(script)
        return command

    def _look_at(self, at_s: float) -> None:
        """Look for late replies then. One timer does for all calls."""
        if self._look is not None:
            self._look.cancel()
        self._looks_s = at_s
        loop = asyncio.get_running_loop()
        # in no caller's context, which may hold its request
        self._look = loop.call_at(at_s, self._drop_if_late, context=Context())

    def _drop_if_late(self) -> None:
        self._look, self._looks_s = None, math.inf
        awaited = [call for call in self._waiting if not call.future.done()]
        first = min(awaited, key=lambda call: call.until_s, default=None)
        if first is None or first.until_s == math.inf:
            return
        if first.until_s > asyncio.get_running_loop().time():
            self._look_at(first.until_s)
            return
        for call in awaited:
            late = AnswerLost(f"no answer from Redis in {first.within_s:g} s")
            call.future.set_exception(late)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _packed(command: Command) -> bytes:
    """Encode a command. hiredis aborts the process for an int too large for Python to print."""
    if isinstance(command, bytes):
        return command
    for argument in command:
        if type(argument) is int and not -(2**63) <= argument < 2**64:
            raise ValueError("a number of more than 64 bits cannot be sent to Redis")
    try:
        return bytes(hiredis.pack_command(command))
    except TypeError as error:
        raise ValueError(f"this cannot be sent to Redis: {error}") from None


async def connect(
    settings: RedisSettings,
    on_push: Callable[[bytes, bytes], None] | None = None,
    on_lost: Callable[[], None] | None = None,
) -> RespConnection:
    """Open a connection to the primary and log in.

    Raises:
        RedisUnavailable: Redis cannot be reached; `RefusedForNow` if it is loading or has no room
            for another client; `RedisRefuses` if it rejects the login or the database.
    """
    connection = RespConnection(on_push, on_lost)
    address = settings.address
    if address.primary:
        host, port = await _find_primary(settings)
    else:
        host, port = address.nodes[0] if address.nodes else ("", 0)
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            await _open(connection, settings, host, port)
            await _greet(connection, address.login, ("SELECT", address.db))
    except BaseException as error:
        connection.abort()
        if isinstance(error, OSError | TimeoutError):
            raise RedisUnavailable(f"cannot reach Redis: {_said(error)}") from None
        if isinstance(error, RedisUnavailable):
            check_refused("the connection", connection.refusal)  # it came before any question
        if isinstance(error, AnswerLost) and address.tls:
            # TLS 1.3 checks a client's certificate after the handshake, and the server's reset can
            # overtake its alert.
            raise AnswerLost(f"{error} (it may require a client certificate)") from None
        raise
    return connection


async def _open(connection: RespConnection, settings: RedisSettings, host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    if not host:
        await loop.create_unix_connection(lambda: connection, settings.address.path)
        return
    tls = None
    if settings.address.tls:
        try:
            tls = await tls_context(settings.ca_file)
        except OSError as error:
            file = settings.ca_file
            raise RedisUnavailable(f"cannot read redis.ca_file '{file}': {error}") from None
    await loop.create_connection(lambda: connection, host, port, ssl=tls)


async def _greet(connection: RespConnection, login: Login, first: Command) -> Reply:
    """Log in, and return the answer to the first command."""
    hello: list[Command] = [first]
    if login:
        user = (login["username"],) if "username" in login else ()
        hello.insert(0, ("AUTH", *user, login.get("password", "")))
    asked = connection.call(hello)
    connection.flush()  # what ends the connection from now on may be an answer
    replies = await asked
    for command, reply in zip(hello, replies, strict=True):
        check_refused(str(command[0]), reply)
    return replies[-1]


async def _find_primary(settings: RedisSettings) -> tuple[str, int]:
    """Ask the Sentinels one after the other for host and port of the primary, which is never
    remembered: it may be another one by now.

    Raises:
        RedisUnavailable: no Sentinel answers, or none knows a living primary of that name;
            `RedisRefuses` if all of them refuse to tell.
    """
    address = settings.address
    problems: list[str] = []
    refusals: list[RedisRefuses] = []
    for host, port in address.nodes:
        sentinel = RespConnection()
        try:
            async with asyncio.timeout(timings.SENTINEL_ANSWER_S):
                await _open(sentinel, settings, host, port)
                known = await _greet(sentinel, address.own_login, ("SENTINEL", "MASTERS"))
        except RedisRefuses as error:
            refusals.append(RedisRefuses(error.what, f"{error.answer} (says Sentinel)"))
            problems.append(f"{host}:{port} {error}")
        except (OSError, TimeoutError, RedisUnavailable) as error:
            problems.append(f"{host}:{port} {_said(error)}")
        else:
            for facts in (dict(zip(one[::2], one[1::2], strict=False)) for one in known):
                flags = set(facts[b"flags"].split(b","))
                living = b"master" in flags and not flags & {b"s_down", b"o_down"}
                if living and facts[b"name"] == address.primary.encode():
                    return facts[b"ip"].decode(), int(facts[b"port"])
        finally:
            sentinel.abort()
    if len(refusals) == len(address.nodes):
        raise refusals[0]
    told = f" ({', '.join(problems)})" if problems else ""
    raise RedisUnavailable(f"no Sentinel knows a living primary '{address.primary}'{told}")


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


_Stamp = tuple[int, int, int]
_contexts: dict[str, tuple[_Stamp | None, ssl.SSLContext]] = {}
_making = threading.Lock()


async def tls_context(ca_file: str) -> ssl.SSLContext:
    """The TLS context of all connections, made in a thread at the first call and again when the
    file of CA certificates (empty: the system's) has changed. Reading them takes some 40 ms, and
    during an outage connections are opened many times a second.

    Raises:
        OSError: the file cannot be read, or holds no certificate.
    """
    return await asyncio.to_thread(_context, ca_file)


def _context(ca_file: str) -> ssl.SSLContext:
    with _making:
        file = ca_file or ssl.get_default_verify_paths().cafile
        found = os.stat(file) if file else None
        stamp = (found.st_mtime_ns, found.st_ino, found.st_size) if found else None
        if ca_file not in _contexts or _contexts[ca_file][0] != stamp:
            _contexts[ca_file] = stamp, ssl.create_default_context(cafile=ca_file or None)
        return _contexts[ca_file][1]
