"""The one writer of a worker process: fenced appends, group commit, wake-ups published after the
answers.

The main loop is `_run`. Each turn sends one pipeline: one `XADD` for every journal with something
new, and what is published for entries that were accepted before. (An ingress with a connection to
this worker gets its wake-ups there, without a turn.) Whatever is appended meanwhile goes into the
next turn.

A turn is followed by a pause, in which the engine keeps what its running requests make (`Pause`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from serve_app import timings
from serve_app.errors import AnswerLost, Fenced, RedisUnavailable
from serve_app.journal.attempt_log import AttemptLog, AttemptState, Pause
from serve_app.journal.entries import (
    FIRST_OPENING_ID,
    REQUEST_ID,
    AttemptFacts,
    Entry,
    EntryId,
    RequestFacts,
    Wake,
    decode_facts,
    encode_wakes,
    entry_from_redis,
    flatten,
    opening_id,
    wake_of,
)
from serve_app.loops import Loops, backoff, ended
from serve_app.observability.logs import Outage
from serve_app.redis.connection import Command, RespConnection, connect
from serve_app.redis.keyspace import body_key, journal_key
from serve_app.redis.link import RedisLink, SharedConnection
from serve_app.redis.replies import (
    Reply,
    all_answered,
    answered,
    is_demoted,
    is_full,
    is_refused_for_now,
)
from serve_app.requests.lifecycle import Ended, append, append_though_full, end
from serve_app.requests.store import long_questions, with_body
from serve_app.settings import Settings

log = logging.getLogger("hermes.journal")

_FIRST_ENTRIES = 2
"""The request and the opening: all that a first attempt finds."""


def standing(attempt: AttemptLog, last: Entry | None) -> AttemptState:
    """The state of an attempt whose journal has this last entry; None: the journal is gone. `OPEN`:
    it owns the journal, in which entries after the last one may be missing.

    The writer checks it when Redis rejects an append, after a reconnect (Redis may have come back
    with older data), and while an attempt appends nothing (otherwise it would not notice that its
    request was ended).
    """
    if last is None:
        return AttemptState.FENCED
    if last.terminal:
        return AttemptState.ENDED if last.nonce == attempt.nonce else AttemptState.FENCED
    newer = last.id > attempt.last_built
    rival = last.id.epoch == attempt.epoch and last.nonce != attempt.nonce
    return AttemptState.FENCED if newer or rival else AttemptState.OPEN


class JournalWriter:
    """Appends for all attempts of this process over one connection. Long journals and large bodies
    are read over others.
    """

    def __init__(self, settings: Settings, loops: Loops | None = None) -> None:
        self._settings = settings
        self._link = RedisLink(settings.redis)
        self._within_s = settings.redis.response_timeout_s
        self._loops = loops or Loops()
        self._shared = SharedConnection(self._connect, quiet_s=0.0)  # the loop sets its own pace
        self._attempts: dict[str, AttemptLog] = {}
        self._dirty: dict[AttemptLog, None] = {}
        """Attempts with something to append, in their order."""
        self._backoff: dict[AttemptLog, None] = {}
        """Attempts that Redis refuses for now. The others do not wait for them."""
        self.pause = Pause(settings.journal.linger_ms / 1000)
        self._refusals = 0
        self._retry: asyncio.TimerHandle | None = None
        self._wakes: dict[str, list[Wake]] = {}
        """By channel; they leave at the end of the loop's turn in which they came. An opening's
        waits for what follows it.
        """
        self._leaving: asyncio.Handle | None = None
        self._openings_leave: asyncio.TimerHandle | None = None
        self._messages: list[tuple[str, bytes]] = []
        """Channels, and what is to be published to them."""
        self.send_wakes: Callable[[str, bytes], bool] = lambda channel, message: False
        """Sends a message of wake-ups over an ingress's connection; False if it must be published
        to the channel.
        """
        self._something_to_do = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failures = 0
        self._packing: dict[AttemptLog, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Connect (or keep trying) and start flushing."""
        self._tasks = [
            self._loops.keep("journal-writer", self._run),
            self._loops.keep("journal-silence", self._watch_silence),
        ]

    async def stop(self) -> None:
        """Stop flushing and close the connection; entries that are not accepted yet remain so."""
        await self._loops.end(*self._tasks)
        await ended(list(self._packing.values()))
        await self._shared.close()
        await self._link.close()

    @property
    def kept_bytes(self) -> int:
        """How much memory the accepted entries of all attempts take. Any thread may ask."""
        return sum(attempt.history.memory_bytes for attempt in list(self._attempts.values()))

    # -- opening ----------------------------------------------------------------------------------

    async def open(
        self, request_id: str, epoch: int, nonce: bytes, facts: AttemptFacts
    ) -> tuple[AttemptLog, list[Entry]]:
        """Open attempt `epoch` and read the journal, including its body: in one round trip, unless
        they are large. One whose request has ended is closed.

        Raises:
            Fenced: the journal is gone or has ended, or a newer epoch or another writer owns it.
            RedisUnavailable: Redis cannot be reached.
        """
        self._check_free(request_id, epoch)
        connection = await self._shared.get()
        key, body = (of(self._settings.namespace, request_id) for of in (journal_key, body_key))
        opening = Entry.opening(epoch, nonce, facts)
        commands: list[Command] = [
            ("XADD", key, "NOMKSTREAM", str(opening.id), *flatten(opening)),
            ("XRANGE", key, "-", "+", "COUNT", _FIRST_ENTRIES + 1),
            ("GETRANGE", body, 0, timings.LARGE_BYTES),
        ]
        replies = await connection.ask(commands, self._within_s)
        if not _is_whole(replies):
            replies[1:] = await self._link.call(long_questions(key, body), large=True)
            self._check_free(request_id, epoch)
            if not connection.usable:  # what was appended over it may be lost, and not restored
                raise AnswerLost("connection to Redis lost while reading a long journal")
        entries = _read_answers(request_id, epoch, nonce, replies)
        asked = decode_facts(entries[0], RequestFacts) if entries[0].id == REQUEST_ID else None
        channel = asked.wake_channel if asked else ""
        attempt = AttemptLog(request_id, key, epoch, nonce, channel, self._mark)
        attempt.settings, attempt.pause = self._settings.journal, self.pause
        attempt.queued = entries[0].queue_entry
        attempt.history.add(entries[-1])
        if older := self._attempts.get(request_id):  # given up by the dispatchers, and back here
            self._forget(older, fenced=True)
        self._attempts[request_id] = attempt
        self._announce(attempt, entries[-1])
        return attempt, entries

    def _check_free(self, request_id: str, epoch: int) -> None:
        if request_id in self._attempts and self._attempts[request_id].epoch >= epoch:
            raise Fenced(f"{request_id} is already worked on here")

    def _mark(self, attempt: AttemptLog) -> None:
        if attempt not in self._backoff:
            self._dirty[attempt] = None
            self._something_to_do.set()

    # -- the loop ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        outage = Outage(log, "journal: cannot append")
        while True:
            if not (self._dirty or self._messages or self._due):
                self._something_to_do.clear()
                await self._something_to_do.wait()
            connection: RespConnection | None = None
            try:
                connection = await self._shared.get()
                if self._due:
                    await self._restore(connection, list(self._backoff))
                refused = await self._flush(connection)
                self._failures = 0
                if refused:
                    outage.failed(refused)
                elif not self._backoff:
                    outage.over()
                    self._refusals = 0
            except RedisUnavailable as error:
                self._failures += 1
                if connection is not None:
                    connection.abort()
                outage.failed(f"{error}; {len(self._attempts)} attempts wait")
            if self._failures:
                await asyncio.sleep(backoff(timings.APPEND_RETRY_S, self._failures))

    async def _flush(self, connection: RespConnection) -> str:
        """Send one pipeline. Returns why Redis rejected an append, if the reason is temporary."""
        messages, self._messages = self._messages, []
        commands: list[Command] = [("PUBLISH", *message) for message in messages]
        batch = []
        for attempt in self._dirty:
            if (entry := attempt.take()) is not None:
                batch.append((attempt, entry))
                commands.append(self._appending(attempt, entry))
            elif attempt.packing is not None and attempt not in self._packing:
                packing = self._pack(attempt, attempt.packing)
                self._packing[attempt] = asyncio.create_task(packing, name="pack")
        self._dirty = {}
        self.pause.begin(len(batch))
        refused = ""
        try:
            replies = await connection.ask(commands, self._within_s) if commands else []
            for (attempt, entry), reply in zip(batch, replies[len(messages) :], strict=True):
                if not isinstance(reply, Exception):
                    self._settle(attempt, entry, mine=bool(reply))
                elif is_refused_for_now(reply):
                    attempt.met_full = is_full(reply)
                    self._defer(attempt)
                    refused = f"refused for now: {reply}"
                    if is_demoted(reply):
                        connection.abort()  # the name may lead to the new primary by now
                else:
                    log.debug("request %s: append refused: %s", attempt.request_id, reply)
                    ends = attempt.ending if attempt.ends_with(entry) else None
                    written = ends[0] if ends else entry
                    mine = await self._was_ours(connection, attempt, written)
                    self._settle(attempt, entry, mine)
        except BaseException:  # nobody else would check again what is not settled
            for attempt, _ in batch:
                self._mark(attempt)
            raise
        return refused

    async def _pack(self, attempt: AttemptLog, work: Callable[[], bytes | None]) -> None:
        """Pack a long transcript where it keeps no other stream waiting."""
        packed = None
        try:
            packed = await asyncio.to_thread(work)
        finally:
            del self._packing[attempt]
            attempt.packed(packed)
            self._mark(attempt)

    def _appending(self, attempt: AttemptLog, entry: Entry) -> Command:
        if attempt.ending and attempt.ends_with(entry):
            terminal, summary = attempt.ending
            its = (attempt.request_id, (entry, terminal), summary, attempt.queued, attempt.bytes)
            return end(self._settings, Ended(*its))
        stopping = attempt.state is AttemptState.STOPPING
        command = append_though_full if attempt.met_full and stopping else append
        return command(attempt.key, entry)

    def _settle(self, attempt: AttemptLog, entry: Entry, mine: bool) -> None:
        """An append was answered: either the entry is in the journal, or this attempt is fenced."""
        if not mine:
            self._forget(attempt, fenced=True)
            return
        ending = attempt.ending if attempt.ends_with(entry) else None
        attempt.accepted(entry)
        self._announce(attempt, ending[0].after_output(entry) if ending else entry)
        if ending:
            self._forget(attempt, fenced=False)
        elif entry.quit:
            self._forget(attempt, fenced=True)
        elif attempt.pending:
            self._mark(attempt)

    @property
    def _due(self) -> bool:
        """Whether it is time to try again what Redis has refused."""
        return bool(self._backoff) and self._retry is None

    def _defer(self, attempt: AttemptLog) -> None:
        """Redis refuses this attempt for now: look at it again later."""
        self._backoff[attempt] = None
        self._dirty.pop(attempt, None)
        if self._retry is None:
            self._refusals += 1
            pause_s = backoff(timings.APPEND_RETRY_S, self._refusals)
            self._retry = asyncio.get_running_loop().call_later(pause_s, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._something_to_do.set()

    async def _watch_silence(self) -> None:
        """Check whether the journals of silent attempts have been ended or have lost entries: an
        attempt that appends nothing would not find out. Reconnect for this if necessary.
        """
        before: dict[str, EntryId] = {}
        while True:
            await asyncio.sleep(timings.WRITER_SILENCE_S)
            with suppress(RedisUnavailable):
                before = await self._fence_silent(before)

    async def _fence_silent(self, before: dict[str, EntryId]) -> dict[str, EntryId]:
        """Returns what attempts that have nothing to append have built last, by request; those with
        the same `before` are silent.
        """
        quiet = {name: one for name, one in self._attempts.items() if not one.pending}
        silent = [one for name, one in quiet.items() if before.get(name) == one.last_built]
        now = {name: one.last_built for name, one in quiet.items()}
        if silent:
            lasts = await self._last_entries(await self._shared.get(), silent)
            for attempt, last in zip(silent, lasts, strict=True):
                if isinstance(last, Exception):
                    continue
                if standing(attempt, last) is AttemptState.FENCED:
                    self._forget(attempt, fenced=True)
        return now

    async def _last_entries(
        self, connection: RespConnection, attempts: Sequence[AttemptLog]
    ) -> list[Entry | Exception | None]:
        """The last entry of each attempt's journal, in one round trip; None if the journal is gone,
        an exception if Redis answered with an error.
        """
        commands = [("XREVRANGE", attempt.key, "+", "-", "COUNT", "1") for attempt in attempts]
        return [
            raw if isinstance(raw, Exception) else entry_from_redis(raw[0]) if raw else None
            for raw in await connection.ask(commands, self._within_s)
        ]

    async def _was_ours(
        self, connection: RespConnection, attempt: AttemptLog, entry: Entry
    ) -> bool:
        """Redis rejected an append: was it a retry of our own, or are we fenced? The same nonce
        (and kind) means our own.
        """
        position = str(entry.id)
        commands = [("XRANGE", attempt.key, position, position)]
        (raw,) = await connection.ask(commands, self._within_s)
        if not answered(raw, what=f"reading back {position}"):
            return False
        found = entry_from_redis(raw[0])
        return found.nonce == attempt.nonce and found.state == entry.state

    # -- after an entry ---------------------------------------------------------------------------

    def _announce(self, attempt: AttemptLog, entry: Entry) -> None:
        if attempt.channel and entry.needed_by_readers:
            wake = wake_of(
                attempt.request_id,
                entry,
                None if entry.id == FIRST_OPENING_ID else attempt.announced,
            )
            attempt.announced = str(entry.id)
            self._wakes.setdefault(attempt.channel, []).append(wake)
            loop = asyncio.get_running_loop()
            if not entry.id.opens:
                self._leaving = self._leaving or loop.call_soon(self._send_wakes)
            elif self._openings_leave is None:
                self._openings_leave = loop.call_later(timings.OPENING_WAKE_S, self._send_wakes)

    def _send_wakes(self) -> None:
        if self._openings_leave is not None:
            self._openings_leave.cancel()
        self._leaving = self._openings_leave = None
        wakes, self._wakes = self._wakes, {}
        for channel, items in wakes.items():
            if not self.send_wakes(channel, message := encode_wakes(items)):
                self._messages.append((channel, message))
                self._something_to_do.set()

    def _forget(self, attempt: AttemptLog, fenced: bool) -> None:
        if self._attempts.get(attempt.request_id) is attempt:
            del self._attempts[attempt.request_id]
        self._dirty.pop(attempt, None)
        self._backoff.pop(attempt, None)
        attempt.close(fenced)

    # -- connection -------------------------------------------------------------------------------

    async def _connect(self) -> RespConnection:
        connection = await connect(self._settings.redis)
        try:
            await self._restore(connection, list(self._attempts.values()))
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _restore(self, connection: RespConnection, attempts: Sequence[AttemptLog]) -> None:
        """After a reconnect or a refusal, append again what Redis lacks: it may have come back with
        older data.
        """
        if not attempts:
            return
        lasts = await self._last_entries(connection, attempts)
        for attempt, last in zip(attempts, lasts, strict=True):
            if is_demoted(last):
                raise RedisUnavailable(f"reading {attempt.request_id}: {last}")
            if isinstance(last, Exception):
                self._defer(attempt)
                continue
            self._backoff.pop(attempt, None)
            # entries may have been accepted although the answer was lost: readers must check
            attempt.announced = ""
            stands = standing(attempt, last)
            if last is None or stands is AttemptState.FENCED:
                self._forget(attempt, fenced=True)
            elif stands is AttemptState.ENDED:
                self._announce(attempt, last)
                self._forget(attempt, fenced=False)
            else:
                attempt.restart_after(last.id)
                if attempt.pending:
                    self._mark(attempt)  # the loop may sleep: opening an attempt connects, too
                elif last.quit:  # it was accepted, and only the answer was lost
                    self._forget(attempt, fenced=True)


def _is_whole(replies: Sequence[Reply]) -> bool:
    """Whether the first answers hold everything. An empty body may be one that is gone."""
    return not any(isinstance(reply, Exception) for reply in replies[1:]) and (
        len(replies[1]) <= _FIRST_ENTRIES and 0 < len(replies[2]) <= timings.LARGE_BYTES
    )


def _read_answers(
    request_id: str, epoch: int, nonce: bytes, replies: Sequence[Reply]
) -> list[Entry]:
    """The journal, whose last entry is the opening; its first entry holds the body."""
    added, raw, body = replies
    all_answered((raw, body), what=f"reading {request_id}")
    entries = with_body([entry_from_redis(item) for item in raw], body)
    # The journal decides, not the answer to the append: a retry and a rival's get the same error.
    if not entries or entries[-1].id != opening_id(epoch) or entries[-1].nonce != nonce:
        if is_refused_for_now(added):
            answered(added, what=f"opening {request_id}")
        raise Fenced(f"{request_id}: epoch {epoch} is not ours")
    return entries
