"""What a new attempt continues from, after any loss of a Redis failover: everything, or the loss is
detected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app import timings
from serve_app.contract import State
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import (
    REQUEST_ID,
    AttemptFacts,
    Entry,
    EntryId,
    Head,
    RequestFacts,
    Summary,
)
from serve_app.journal.reader import JournalReader
from workers.replay import recorded

STREAM, WHOLE = (
    Head(200, [("content-type", kind)]) for kind in ("text/event-stream", "application/json")
)
REQUEST = Entry(
    REQUEST_ID,
    {b"m": msgspec.json.encode(RequestFacts("standard", "t", "s", "m", True, 1, 2, "w"))},
)
SUMMARY = Summary(None, None, 1, 1)


class Redis:
    """One journal, and who writes to it: Redis takes nothing below its last id, and forgets what it
    is told to.
    """

    def __init__(self, streamed: bool) -> None:
        self.streamed = streamed
        self.journal = [REQUEST]
        self.epoch = 0
        self.holder: AttemptLog | None = None
        self.zombies: list[AttemptLog] = []
        self.tokens: dict[int, int] = {}
        self.lost = False

    def open(self) -> None:
        """Open the next attempt, as a replica does."""
        if self.holder is not None:
            self.zombies.append(self.holder)
        self.epoch += 1
        self.holder = attempt = AttemptLog(
            "req", "key", self.epoch, b"%d" % self.epoch, "", lambda _: None
        )
        facts = msgspec.json.encode(AttemptFacts("r", "e", 0))
        opening = Entry(EntryId(self.epoch, 0), {b"n": attempt.nonce, b"m": facts})
        self.journal.append(opening)
        attempt.history.add(opening)
        part = recorded(self.journal)
        self.lost = not part.complete and bool(part.body)
        if not part.complete:
            attempt.continue_from(REQUEST_ID, b"", 0, None)
            self.tokens[self.epoch] = 0
            return
        tokens = [token for output in part.outputs for token in output.token_ids]
        assert tokens == list(range(1, len(tokens) + 1))
        assert not self.streamed or part.events == body_events(part.body)
        attempt.continue_from(part.last, part.body, part.events, part.head)
        self.tokens[self.epoch] = len(tokens)

    def produce(self, silent: bool) -> None:
        """The current owner appends one token."""
        assert self.holder is not None
        self._append(self.holder, silent)
        self.write(self.holder)

    def produce_late(self, silent: bool) -> None:
        """A paused worker appends one token, without knowing that another attempt has begun."""
        if self.zombies:
            self._append(self.zombies[-1], silent)

    def _append(self, attempt: AttemptLog, silent: bool) -> None:
        """As a part of a character a token makes no bytes yet."""
        self.tokens[attempt.epoch] = token = self.tokens[attempt.epoch] + 1
        body, events = [], attempt._events
        if self.streamed and not silent:
            events += 1
            body = [b"id: %d\ndata: %d of attempt %d\n\n" % (events, token, attempt.epoch)]
        head = STREAM if body and events == 1 else None
        attempt.append([[0, "x", [token], None, None, None]], body, events, head)

    def write(self, attempt: AttemptLog, before_the_end: int | None = None) -> None:
        """All that it has, or so many entries of it before its end; refused is fenced."""
        left = before_the_end
        while left != 0 and (entry := attempt.take()) is not None:
            if left is not None:
                if attempt.ends_with(entry):
                    return
                left -= 1
            if entry.id <= self.journal[-1].id:
                attempt.close(fenced=True)
                return
            ending = attempt.ending if attempt.ends_with(entry) else None
            self.journal += [entry, ending[0]] if ending else [entry]
            attempt.accepted(entry)

    def forget(self, many: int, first: int) -> None:
        """It comes back older. Who lives connects again, in some order, and appends what is
        missing.
        """
        del self.journal[max(1, len(self.journal) - many) :]
        living = [*self.zombies, *([self.holder] if self.holder is not None else [])]
        for attempt in living[first:] + living[:first]:
            if not attempt.closed.done() and self.journal[-1].id <= attempt.last_built:
                attempt.restart_after(self.journal[-1].id)
                self.write(attempt)

    def die(self) -> None:
        self.holder = None

    def die_ending(self, entries: int) -> None:
        """The holder dies after so many entries of its end, which is too much for one."""
        if self.holder is not None and not self.holder.closed.done():
            self._append(self.holder, False)
            self._append(self.holder, False)
            self._end(self.holder)
            self.write(self.holder, entries)
        self.die()

    def finish(self) -> bytes:
        """The holder completes the response. Returns what it is."""
        if self.holder is None or self.holder.closed.done():
            self.open()
        assert self.holder is not None
        self._end(self.holder)
        self.write(self.holder)
        return b"".join([self.holder._older, *(entry.body for entry in self.holder.history)])

    def _end(self, attempt: AttemptLog) -> None:
        body = [] if self.streamed else [b"whole, of ", b"attempt %d" % self.epoch, b"." * 30]
        attempt.append([], body, attempt._events, STREAM if self.streamed else WHOLE)
        attempt.stop(State.COMPLETED, None, SUMMARY, None)


def body_events(body: bytes) -> int:
    return body.count(b"\n\n")


def read(reader: JournalReader, journal: Iterable[Entry]) -> None:
    for entry in journal:
        if entry.id > reader.position:
            reader.feed(entry)


def told(reader: JournalReader) -> str | None:
    return reader.ending.reason if reader.ending is not None else "nothing"


STEPS = st.one_of(
    st.just(("open",)),
    st.tuples(st.just("produce"), st.booleans()),
    st.tuples(st.just("produce_late"), st.booleans()),
    st.tuples(st.just("forget"), st.integers(1, 6), st.integers(0, 2)),
    st.just(("die",)),
    st.tuples(st.just("die_ending"), st.integers(1, 6)),
    st.just(("read",)),
)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_with_a_gap_is_never_continued(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "ENTRY_BYTES", 40)
    monkeypatch.setattr(timings, "PACK_BYTES", 1_500)

    @settings(max_examples=400)
    @given(st.lists(STEPS, max_size=25))
    @example(
        [
            ("produce", False),
            ("open",),
            ("produce_late", False),
            ("forget", 1, 0),
            ("produce", False),
            ("open",),
        ]
    )
    def run(steps: list[tuple[Any, ...]]) -> None:
        async def main() -> None:
            redis, reader, seen = Redis(streamed), JournalReader(position=REQUEST_ID), b""
            redis.open()
            for name, *arguments in steps:
                if name == "read":
                    read(reader, (entry for entry in redis.journal if entry.needed_by_readers))
                    seen += reader.take()
                elif name == "produce" and (redis.holder is None or redis.holder.closed.done()):
                    redis.open()
                elif name != "produce" or not redis.lost:
                    getattr(redis, name)(*arguments)
            if redis.lost:
                return  # it ends as `attempt_lost`
            whole = redis.finish()
            before = list(redis.journal)
            read(reader, (entry for entry in before if entry.needed_by_readers))
            seen += reader.take()
            assert told(reader) == "journal_lost" or seen == whole
            fresh = JournalReader()
            read(fresh, before)
            assert told(fresh) == "journal_lost" or fresh.take() == whole

        asyncio.run(main())

    run()
