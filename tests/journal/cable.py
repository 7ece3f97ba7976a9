"""A client's connection to Redis that can be cut between any two commands, or die without a word.

The command in flight is lost, executed without an answer, or executed much later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Self
from urllib.parse import urlsplit

import hiredis

from serve_app.settings import Settings

UNSENT, UNANSWERED, LATE, RETRIED, HANGING = "unsent", "unanswered", "late", "retried", "hanging"


def behind(cable: Cable, settings: Settings) -> Settings:
    """The settings of a process that is connected through a cable."""
    return settings.model_copy(
        update={"redis": settings.redis.model_copy(update={"url": cable.url})}
    )


class Cable:
    """A client's connection to Redis: forwards one command at a time, and can be cut at any of
    them.
    """

    def __init__(self, redis_url: str) -> None:
        self._redis = urlsplit(redis_url)
        self._plans: deque[tuple[bytes, str, int]] = deque()
        self._held: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._before_the_retry: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._carrying: set[asyncio.Task[None]] = set()
        self.hung = asyncio.Event()
        self.dead = False
        """Whether it reads and answers nothing, as a firewall that has forgotten a connection."""
        self.accepted = self.unheard = self.left = 0
        """Connections that came, what was read while `dead`, and connections that have gone."""
        self.cuts: list[tuple[str, str]] = []
        """The cuts so far: how, and the first word of the command."""

    async def start(self) -> Self:
        """Start listening."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        login = self._redis.netloc.rpartition("@")[0]
        self.url = self._redis._replace(netloc=f"{login}@127.0.0.1:{port}").geturl()
        return self

    __aenter__ = start

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.drop()

    def cut(self, word: str, how: str, after: int = 0) -> None:
        """Cut at the next command that begins with `word` (after skipping some); empty: any
        command.
        """
        self._plans.append((word.encode(), how, after))

    def mend(self) -> None:
        """Cancel cuts that have not happened; the next connection forwards everything."""
        self._plans.clear()
        self.cuts.clear()
        self.hung.clear()

    def drop(self) -> None:
        """Close all open connections."""
        for task in self._carrying:
            task.cancel()

    def revive(self) -> None:
        """Answer again; what was sent meanwhile is lost, and so are its connections."""
        self.dead = False
        self.drop()

    async def arrive(self) -> None:
        """Deliver held commands to Redis, long after their senders have given up."""
        held, self._held = self._held, []
        await self._arrive_before_the_retry()
        await self._give(held)

    async def _arrive_before_the_retry(self) -> None:
        held, self._before_the_retry = self._before_the_retry, []
        await self._give(held)

    async def _give(
        self, held: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> None:
        for command, reader, writer in held:
            await self._ask(command, reader, writer, hiredis.Reader())
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        self.accepted += 1
        up, kept = None, False
        try:
            up = await asyncio.open_connection(self._redis.hostname, self._redis.port)
            kept = await self._carry(reader, writer, *up)
        except (OSError, asyncio.CancelledError):
            pass  # the client or Redis has gone, or the cable was dropped
        finally:
            self._carrying.discard(task)
            self.left += 1
            writer.transport.abort()
            if up and not kept:
                up[1].close()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *up: *tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> bool:
        """Until either end goes or a cut is due. Returns whether the connection to Redis is needed
        for later.
        """
        commands, replies = hiredis.Reader(), hiredis.Reader()
        while data := await reader.read(1 << 16):
            if self.dead:
                self.unheard += 1
                continue
            commands.feed(data)
            while (command := commands.gets()) is not False:
                how = self._fate(command)
                if how == UNSENT:
                    return False
                if how in (LATE, RETRIED, HANGING):
                    (self._before_the_retry if how == RETRIED else self._held).append(
                        (command, *up)
                    )
                    self.hung.set()
                    while how == HANGING and await reader.read(1 << 16):
                        pass
                    return True
                if command[0] == b"XADD" and self._before_the_retry:
                    await self._arrive_before_the_retry()
                answer = await self._ask(command, *up, replies)
                if how == UNANSWERED:
                    return False
                writer.write(answer)
        return False

    def _fate(self, command: list[bytes]) -> str:
        greeting = command[0] in (b"AUTH", b"SELECT", b"CLIENT")
        if greeting or not self._plans or not command[0].startswith(self._plans[0][0]):
            return ""
        word, how, after = self._plans.popleft()
        if after:
            self._plans.appendleft((word, how, after - 1))
            return ""
        self.cuts.append((how, command[0].decode()))
        return how

    async def _ask(
        self,
        command: Any,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        replies: hiredis.Reader,
    ) -> bytes:
        writer.write(hiredis.pack_command(tuple(command)))
        answer = b""
        while replies.gets() is False:
            data = await reader.read(1 << 16)
            if not data:
                raise ConnectionError("Redis has closed the connection")
            replies.feed(data)
            answer += data
        return answer
