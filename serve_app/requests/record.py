"""What is known of a request, derived from its journal whenever it is read: nothing else stores its
state, so nothing can disagree with it. `reading` in lifecycle.py is the command for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from serve_app.contract import CompletionStats, State
from serve_app.errors import Unreadable
from serve_app.journal.entries import (
    REQUEST_ID,
    AttemptFacts,
    Entry,
    RequestFacts,
    Summary,
    decode_facts,
    decode_line,
    entry_from_redis,
)
from serve_app.journal.usage import Usage
from serve_app.redis.replies import Reply, answered


class Record:
    """What the entries say; those with bytes may lack them. What cannot be decoded raises
    `Unreadable` when it is asked for.

    Args:
        entries: in order: the request and every opening unless they are trimmed, the last entry
            that counts events, and the last one.
        size: about how many bytes the last one has, if no others remain.
    """

    def __init__(self, entries: Sequence[Entry], size: int = 0) -> None:
        self.first, self.last = entries[0], entries[-1]
        self.size = int(self.last.fields.get(b"s", size))
        """As it was counted when the request ended."""
        self.entries = entries

    @classmethod
    def from_redis(cls, reply: Reply) -> Record | None:
        """The record in the script's reply; None if there is no journal (any more)."""
        found = answered(reply)
        if not found:
            return None
        size, *raw = found
        return cls(sorted(map(entry_from_redis, raw), key=lambda entry: entry.id), size)

    @property
    def ended(self) -> bool:
        return self.last.ends

    @property
    def state(self) -> State:
        return self.last.state or (State.RUNNING if self.openings else State.QUEUED)

    @cached_property
    def summary(self) -> Summary | None:
        """None if the request has not ended."""
        return self.last.summary

    @cached_property
    def facts(self) -> RequestFacts | None:
        if self.first.id == REQUEST_ID:
            return decode_facts(self.first, RequestFacts)
        return self.summary.request if self.summary else None

    @property
    def path(self) -> str:
        """That of the HTTP request; empty if it is trimmed."""
        return decode_line(self.first).path if self.first.id == REQUEST_ID else ""

    @cached_property
    def openings(self) -> list[AttemptFacts]:
        """The attempts, unless they are trimmed."""
        return [decode_facts(entry, AttemptFacts) for entry in self.entries if entry.id.opens]

    @property
    def attempt(self) -> AttemptFacts | None:
        """The last attempt."""
        its = self.summary.attempt if self.summary else None
        return its or (self.openings[-1] if self.openings else None)

    @property
    def attempts(self) -> int:
        """The epoch of the last attempt."""
        opened = [entry.id.epoch for entry in self.entries if entry.id.opens]
        return max(*opened, self.summary.attempts if self.summary else 0, 0)

    @property
    def events(self) -> int:
        """How many events the answer has so far."""
        return next((entry.events for entry in reversed(self.entries) if entry.counts), 0)

    @property
    def used(self) -> Usage | None:
        """What the request has used; None if it has not ended."""
        if self.summary is None:
            return None
        if not self.last.used:  # version 0.2 has counted nothing else
            return Usage(output=self.summary.output_tokens)
        return Usage.decode(self.last.used)

    @property
    def written(self) -> CompletionStats | None:
        """What the request has written; None if it has not ended, or nobody can read that."""
        try:
            summary, used = self.summary, self.used
            if summary is None or used is None:
                return None
            whole = self.last.state is State.COMPLETED and used.output > 0
            return CompletionStats(used.output, whole, summary.attempts > 0, used.prompt)
        except Unreadable:
            return None

    def ending(self, ended_ms: int) -> Summary:
        """The summary of a request that ends now, from outside."""
        return Summary(
            request=self.facts,
            attempt=self.attempt,
            attempts=self.attempts,
            ended_ms=ended_ms,
            began_ms=self.openings[0].opened_ms if self.openings else 0,
        )
