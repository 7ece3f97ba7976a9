"""One pipelined connection to Redis, for the hot paths: raw RESP through hiredis, no pool, no per-command objects.

redis-py costs some 15 µs a command in a pipeline, more than Redis itself needs for the append; the writer and
the subscriber send and receive for every flush, so they speak the protocol directly. All else uses redis-py.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.connection import parse_url
from redis.exceptions import RedisError

from serve_app.errors import AnswerLost, JournalUnavailable
from serve_app.journal.sentinel import find_primary
from serve_app.journal.shared import SharedConnection
from serve_app.redis_address import is_tls, sentinel_address
from serve_app.settings import RedisSettings

Command = tuple[Any, ...]
Reply = Any

DEMOTED = ("READONLY ", "MASTERDOWN ")
"""Errors of a Redis that is not the primary (any more)."""

TRANSIENT = ("OOM ", "LOADING ", "BUSY ", "READONLY ", "MASTERDOWN ", "TRYAGAIN ", "NOREPLICAS ", "MISCONF ")
"""Errors of a Redis that will take the same command later."""


class RespConnection(asyncio.Protocol):
    """A connection whose replies come in the order of its commands.

    `on_push` receives pub/sub messages `(channel, payload)`; `on_lost` is called once, when the connection ends.
    """

    def __init__(
        self,
        on_push: Callable[[bytes, bytes], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[int, list[Reply], asyncio.Future[list[Reply]]]] = deque()
        self._on_push = on_push
        self._on_lost = on_lost

    @property
    def usable(self) -> bool:
        """Whether commands can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if self._on_push is not None and isinstance(reply, list) and reply and reply[0] == b"message":
                self._on_push(reply[1], reply[2])
                continue
            expected, replies, future = self._waiting[0]
            replies.append(reply)
            if len(replies) == expected:
                self._waiting.popleft()
                if not future.done():
                    future.set_result(replies)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for _, _, future in self._waiting:
            if not future.done():
                future.set_exception(AnswerLost(f"connection to Redis lost: {exc or 'closed by Redis'}"))
        self._waiting.clear()
        if self._on_lost is not None:
            self._on_lost()

    def call(self, commands: Sequence[Command]) -> asyncio.Future[list[Reply]]:
        """Send commands in one write; the future gives their replies, errors among them as exception objects.

        Raises:
            JournalUnavailable: if the connection is not open, or ends before the last reply.
            ValueError: a command holds what cannot be sent. Nothing was sent then, and nothing waits for a reply.
        """
        if self._transport is None or self._transport.is_closing():
            raise JournalUnavailable("no connection to Redis")
        packed = b"".join([_packed(command) for command in commands])
        future: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self._waiting.append((len(commands), [], future))
        self._transport.write(packed)
        return future

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()


def _packed(command: Command) -> bytes:
    """A command as Redis reads it. hiredis ends the process at an int whose digits Python refuses to write."""
    for argument in command:
        if type(argument) is int and not -(2**63) <= argument < 2**64:
            raise ValueError("a number of more than 64 bits cannot be sent to Redis")
    try:
        return bytes(hiredis.pack_command(command))
    except TypeError as error:
        raise ValueError(f"what cannot be sent to Redis: {error}") from None


async def connect(
    settings: RedisSettings,
    on_push: Callable[[bytes, bytes], None] | None = None,
    on_lost: Callable[[], None] | None = None,
) -> RespConnection:
    """Open a connection and log in.

    Raises:
        JournalUnavailable: if Redis cannot be reached, is loading, or refuses the password.
    """
    target = await _target(settings)
    loop = asyncio.get_running_loop()
    connection = RespConnection(on_push, on_lost)
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            if "path" in target:
                await loop.create_unix_connection(lambda: connection, target["path"])
            else:
                tls = ssl.create_default_context(cafile=settings.ca_file or None) if is_tls(settings.url) else None
                host, port = target.get("host", "localhost"), target.get("port", 6379)
                await loop.create_connection(lambda: connection, host, port, ssl=tls)
            hello: list[Command] = []
            if target.get("password"):
                user = (target["username"],) if target.get("username") else ()
                hello.append(("AUTH", *user, target["password"]))
            hello.append(("SELECT", target.get("db", 0)))
            for reply in await connection.call(hello):
                if isinstance(reply, Exception):
                    connection.abort()
                    raise JournalUnavailable(f"Redis refused the connection: {reply}")
    except (OSError, TimeoutError) as error:
        connection.abort()
        raise JournalUnavailable(f"cannot reach Redis: {error or type(error).__name__}") from None
    return connection


async def _target(settings: RedisSettings) -> dict[str, Any]:
    """Where to connect to, and with which login and database, as redis-py names them."""
    address = sentinel_address(settings.url)
    if address is None:
        return parse_url(settings.url)  # type: ignore[no-any-return, no-untyped-call]
    try:
        host, port = await find_primary(settings, address)
    except (RedisError, OSError) as error:
        raise JournalUnavailable(f"cannot find Redis: {error or type(error).__name__}") from None
    return {"host": host, "port": port, "db": address.db, **address.login}


class RedisLink:
    """One connection, shared by all who call; opened when it is needed, and again after it was lost."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._shared = SharedConnection(lambda: connect(settings))

    async def call(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands in one write and wait for their replies, errors among them as exception objects.

        Raises:
            JournalUnavailable: Redis cannot be reached, or did not answer in time; whether it acted is not known.
        """
        connection = await self._shared.get()
        try:
            async with asyncio.timeout(self._settings.response_timeout_s):
                replies = await connection.call(commands)
        except TimeoutError:
            connection.abort()
            raise AnswerLost(f"no answer from Redis in {self._settings.response_timeout_s:g} s") from None
        if any(isinstance(reply, Exception) and str(reply).startswith(DEMOTED) for reply in replies):
            connection.abort()  # perhaps the name leads to the new primary by now
        return replies

    async def close(self) -> None:
        """Let go of the connection."""
        await self._shared.close()
