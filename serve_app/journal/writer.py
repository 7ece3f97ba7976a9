"""The one writer of a worker process: fenced appends, group commit, publish after the answers.

The main loop is `_run`: each turn sends one pipeline, which holds the wake-ups of what the turn before got
accepted, and one `XADD` for every journal that has something new. What is appended meanwhile rides in the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from serve_app.errors import Fenced, JournalUnavailable
from serve_app.journal import opening
from serve_app.journal.attempt import Attempt
from serve_app.journal.bodies import body_key
from serve_app.journal.connection import DEMOTED, TRANSIENT, Command, Reply, RespConnection, connect
from serve_app.journal.entries import (
    REQUEST_ID,
    TERMINAL_ID,
    AttemptFacts,
    Entry,
    EntryId,
    RequestFacts,
    Wake,
    decode_facts,
    encode_wakes,
    entry_from_redis,
    flatten,
    journal_key,
    needed_by_readers,
    wake_of,
)
from serve_app.journal.shared import SharedConnection
from serve_app.journal.unfenced import intrude
from serve_app.logs import Outage
from serve_app.loops import Loops, jittered
from serve_app.settings import Settings

log = logging.getLogger("hermes.journal")

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
_SILENCE_S = 1.0


class JournalWriter:
    """Appends for all attempts of this process over one connection."""

    def __init__(self, settings: Settings, loops: Loops | None = None) -> None:
        self._settings = settings
        self._loops = loops or Loops()
        self._shared = SharedConnection(self._connect, quiet_s=0.0)  # the loop has a pace of its own
        self._attempts: dict[str, Attempt] = {}
        self._dirty: dict[str, Attempt] = {}
        self._wakes: dict[str, list[Wake]] = {}
        self._after: list[Command] = []
        self._something_to_do = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failures = 0

    async def start(self) -> None:
        """Connect (or go on trying) and begin to flush."""
        self._tasks = [
            self._loops.keep("journal-writer", self._run),
            self._loops.keep("journal-silence", self._watch_silence),
        ]

    async def stop(self) -> None:
        """Stop flushing and close the connection; what is not accepted yet stays unaccepted."""
        await self._loops.end(*self._tasks)
        await self._shared.close()

    # -- opening ---------------------------------------------------------------------------------------------

    async def open(self, request_id: str, epoch: int, nonce: bytes, facts: AttemptFacts) -> tuple[Attempt, list[Entry]]:
        """Open attempt `epoch` and read the journal, its body in place, in one round trip.

        Raises:
            Fenced: the journal is gone, or has ended, or a newer epoch or another writer holds it.
            JournalUnavailable: Redis cannot be reached.
        """
        if request_id in self._attempts and self._attempts[request_id].epoch >= epoch:
            raise Fenced(f"{request_id} is already worked on here")
        connection = await self._shared.get()
        key = journal_key(self._settings.namespace, request_id)
        questions = opening.questions(key, body_key(self._settings.namespace, request_id), epoch, nonce, facts)
        async with asyncio.timeout(self._settings.redis.response_timeout_s):
            replies = await connection.call(questions)
        entries = opening.read_answers(request_id, epoch, nonce, replies)
        channel = decode_facts(entries[0], RequestFacts).wake if entries[0].id == REQUEST_ID else ""
        attempt = Attempt(request_id, key, epoch, nonce, channel, self._mark)
        attempt.history.append(entries[-1])
        if request_id in self._attempts:  # given up by the dispatchers, and now opened anew on the same replica
            self._forget(self._attempts[request_id], fenced=True)
        self._attempts[request_id] = attempt
        self._announce(attempt, entries[-1])
        return attempt, entries

    def abandon(self, attempt: Attempt) -> None:
        """The attempt cannot go on: append nothing more; a later epoch takes over."""
        self._forget(attempt, fenced=True)

    def _mark(self, attempt: Attempt) -> None:
        self._dirty[attempt.request_id] = attempt
        self._something_to_do.set()

    # -- the loop --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        outage = Outage(log, "journal: cannot append")
        while True:
            if not (self._dirty or self._wakes or self._after):
                self._something_to_do.clear()
                await self._something_to_do.wait()
            connection: RespConnection | None = None
            try:
                connection = await self._shared.get()
                async with asyncio.timeout(self._settings.redis.response_timeout_s):
                    refused = await self._flush(connection)
                self._failures = 0 if not refused else self._failures + 1
                outage.failed(refused) if refused else outage.over()
            except (JournalUnavailable, TimeoutError) as error:
                self._failures += 1
                if connection is not None:
                    connection.abort()
                outage.failed(f"{str(error) or 'no answer from Redis'}; {len(self._attempts)} attempts wait")
            if self._failures:
                await asyncio.sleep(jittered(_RETRY_S[min(self._failures, len(_RETRY_S)) - 1]))

    async def _flush(self, connection: RespConnection) -> str:
        """One pipeline. Returns why Redis refused an append, if it did for a reason that passes."""
        after, wakes = self._after, self._wakes
        self._after, self._wakes = [], {}
        commands = after + [("PUBLISH", channel, encode_wakes(items)) for channel, items in wakes.items()]
        batch = [(attempt, entry) for attempt in self._dirty.values() if (entry := attempt.take()) is not None]
        self._dirty = {}
        others = len(commands)
        for attempt, entry in batch:
            commands.append(("XADD", attempt.key, "NOMKSTREAM", str(entry.id), *flatten(entry)))
        try:
            replies = await connection.call(commands) if commands else []
        except BaseException:  # a wake-up may be lost, a trim or an expiry not
            self._after = after + self._after
            for attempt, _ in batch:
                self._again(attempt)
            raise
        refused = ""
        try:
            for (attempt, entry), reply in zip(batch, replies[others:], strict=True):
                if isinstance(reply, Exception) and str(reply).startswith(TRANSIENT):
                    self._again(attempt)
                    refused = f"refused for now: {reply}"
                    if str(reply).startswith(DEMOTED):
                        connection.abort()  # perhaps the name leads to the new primary by now
                else:
                    await self._settle(connection, attempt, entry, reply)
        except BaseException:  # lost while a refusal was read back: nobody else would look at the rest again
            for attempt, _ in batch:
                self._again(attempt)
            raise
        return refused

    async def _settle(self, connection: RespConnection, attempt: Attempt, entry: Entry, reply: Reply) -> None:
        """An append was answered: it is in the journal, or this attempt is fenced."""
        if isinstance(reply, Exception):
            mine = await self._read_back(connection, attempt, entry)
        else:
            mine = reply is not None
        if not mine:
            if not self._settings.journal.fencing and await intrude(connection, attempt):
                self._again(attempt)
            else:
                self._forget(attempt, fenced=True)
            return
        attempt.accepted(entry)
        self._announce(attempt, entry)
        if entry.terminal:
            self._retain(attempt, compacted=b"z" in entry.fields)
            self._forget(attempt, fenced=False)
        elif entry.quit:
            self._forget(attempt, fenced=True)
        elif attempt.pending:
            self._again(attempt)

    def _again(self, attempt: Attempt) -> None:
        if self._attempts.get(attempt.request_id) is attempt:
            self._dirty[attempt.request_id] = attempt

    async def _read_back(self, connection: RespConnection, attempt: Attempt, entry: Entry) -> bool:
        """Refused: mine (a retry of my own append), or fenced? The same nonce (and kind) means mine."""
        position = str(entry.id)
        (raw,) = await connection.call([("XRANGE", attempt.key, position, position)])
        if isinstance(raw, Exception):
            raise JournalUnavailable(f"reading back {position}: {raw}")
        if not raw:
            return False
        found = entry_from_redis(raw[0])
        return found.nonce == attempt.nonce and found.state == entry.state

    async def _watch_silence(self) -> None:
        """Who appends nothing is refused nothing: one that waits in the engine must look whether it has been ended."""
        before: dict[str, EntryId] = {}
        while True:
            await asyncio.sleep(_SILENCE_S)
            now = {name: attempt.last_built for name, attempt in self._attempts.items() if not attempt.pending}
            silent = [self._attempts[name] for name, built in now.items() if before.get(name) == built]
            before = now
            if silent and (connection := self._shared.current) is not None:
                with suppress(JournalUnavailable, TimeoutError):
                    async with asyncio.timeout(self._settings.redis.response_timeout_s):
                        await self._look_at(connection, silent)

    async def _look_at(self, connection: RespConnection, attempts: Sequence[Attempt]) -> None:
        commands = [("XREVRANGE", attempt.key, "+", "-", "COUNT", "1") for attempt in attempts]
        for attempt, raw in zip(attempts, await connection.call(commands), strict=True):
            if isinstance(raw, Exception) or attempt.closed.done():
                continue
            last = entry_from_redis(raw[0]) if raw else None
            if not self._settings.journal.fencing:
                continue
            if last is None or (last.nonce != attempt.nonce and last.id >= EntryId(attempt.epoch, 0)):
                self._forget(attempt, fenced=True)

    # -- after an entry --------------------------------------------------------------------------------------

    def _announce(self, attempt: Attempt, entry: Entry) -> None:
        if entry.terminal and attempt.announced:
            return  # the seal has told all
        if attempt.channel and needed_by_readers(entry):
            wake = wake_of(attempt.request_id, entry, None if entry.id == (1, 0) else attempt.announced)
            attempt.announced = str(entry.id)
            self._wakes.setdefault(attempt.channel, []).append(wake)
            self._something_to_do.set()

    def _retain(self, attempt: Attempt, compacted: bool) -> None:
        if compacted:
            self._after.append(("XTRIM", attempt.key, "MINID", str(TERMINAL_ID)))
        self._after.append(("PEXPIRE", attempt.key, int(self._settings.journal.retention_s * 1000)))
        self._something_to_do.set()

    def _forget(self, attempt: Attempt, fenced: bool) -> None:
        if self._attempts.get(attempt.request_id) is attempt:
            del self._attempts[attempt.request_id]
            self._dirty.pop(attempt.request_id, None)
        attempt.close(fenced)

    # -- connection ------------------------------------------------------------------------------------------

    async def _connect(self) -> RespConnection:
        connection = await connect(self._settings.redis)
        try:
            async with asyncio.timeout(self._settings.redis.response_timeout_s):
                await self._make_whole(connection)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _make_whole(self, connection: RespConnection) -> None:
        """After a reconnect: Redis may have come back a little older; append again what it lost."""
        attempts: Sequence[Attempt] = list(self._attempts.values())
        if not attempts:
            return
        commands = [("XREVRANGE", attempt.key, "+", "-", "COUNT", "1") for attempt in attempts]
        for attempt, raw in zip(attempts, await connection.call(commands), strict=True):
            if isinstance(raw, Exception):
                raise JournalUnavailable(f"reading {attempt.request_id}: {raw}")
            attempt.announced = ""  # entries may have been accepted whose answer was lost: readers must look
            last = entry_from_redis(raw[0]) if raw else None
            if last is None or (last.id > attempt.last_built and not last.terminal):
                self._forget(attempt, fenced=True)
            elif last.terminal and last.nonce == attempt.nonce:
                attempt.accepted(last)
                self._announce(attempt, last)
                self._retain(attempt, compacted=b"z" in last.fields)
                self._forget(attempt, fenced=False)
            elif last.terminal or (last.id.epoch == attempt.epoch and last.nonce != attempt.nonce):
                self._forget(attempt, fenced=True)
            else:
                attempt.rewind(last.id)
                if attempt.pending:
                    self._mark(attempt)  # the loop may be asleep: also who opens an attempt connects
                elif last.quit:  # it had been accepted, and only the answer was lost
                    self._forget(attempt, fenced=True)
