"""Ids of journal entries, `<epoch>-<seq>`: they are the fencing tokens. Pure.

0-1            the client's request
k-0            attempt k is opened by a worker (k = 1, 2, ...)
k-1, k-2, ...  output of attempt k
max-max        the terminal entry: nothing can follow it

Earlier versions gave the last output before the terminal entry the id k-max.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_ID_PART = 18_446_744_073_709_551_615


class EntryId(NamedTuple):
    """A stream id: epoch and sequence number. Compares as Redis does."""

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"

    @classmethod
    def parse(cls, text: str | bytes) -> EntryId:
        """Parse Redis's `<ms>-<seq>` form."""
        epoch, _, seq = (text.decode() if isinstance(text, bytes) else text).partition("-")
        return cls(int(epoch), int(seq))

    @property
    def opens(self) -> bool:
        """Whether this is the id of an attempt's opening."""
        return self.seq == 0 and self.epoch > 0

    def is_next_to(self, before: EntryId) -> bool:
        """Whether the same attempt wrote `before` directly before this entry."""
        return self.epoch == before.epoch and self.seq == before.seq + 1


BEGINNING = EntryId(0, 0)
REQUEST_ID = EntryId(0, 1)
TERMINAL_ID = EntryId(MAX_ID_PART, MAX_ID_PART)


def following(position: EntryId) -> str:
    """The smallest id after a position, for the start of a stream range. Nothing follows the
    terminal entry.
    """
    if position.seq < MAX_ID_PART:
        return f"{position.epoch}-{position.seq + 1}"
    return f"{position.epoch + 1}-0" if position.epoch < MAX_ID_PART else str(position)


def opening_id(epoch: int) -> EntryId:
    """The id of the entry with which a worker opens an attempt: before all other entries of its
    epoch.
    """
    return EntryId(epoch, 0)


FIRST_OPENING_ID = opening_id(1)
