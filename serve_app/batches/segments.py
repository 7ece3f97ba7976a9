"""Results of lines, and the segments in which the storage has them until a batch is over.

A segment has the lines of the output file first and those of the error file behind them; its name
says how many bytes each has.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

from serve_app import timings
from serve_app.batches.leading import Marked, insist
from serve_app.batches.record import Batch
from serve_app.files.storage import each

if TYPE_CHECKING:
    from serve_app.batches.job import BatchParts

FOLDER = "segments/"
SEGMENT_BYTES = 8 << 20
MOST_LINES = 2_000


def folder(batch: Batch) -> str:
    """Where the storage has what belongs to a batch that is not over."""
    return f"{FOLDER}{batch.facts.id}/"


class Result(NamedTuple):
    """Of a line."""

    place: int
    request_id: str
    """Empty if it never had one."""
    good: bool
    text: bytes
    """As it is in the output or error file."""


class Results:
    """Those of a batch that are not in a segment yet."""

    def __init__(self, parts: BatchParts, batch: Batch) -> None:
        self._parts, self._batch = parts, batch
        self._kept: list[Result] = []
        self.bytes = 0
        self._oldest_s = 0.0
        """When the first of them came, in monotonic seconds."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, result: Result) -> None:
        if not self._kept:
            self._oldest_s = self._parts.clock.local.monotonic_s()
        self._kept.append(result)
        self.bytes += len(result.text)

    def due(self, all_there_are: bool) -> bool:
        """Whether to write a segment. `all_there_are`: no line runs, which may have another."""
        waits_s = self._parts.clock.local.monotonic_s() - self._oldest_s
        full = self.bytes >= SEGMENT_BYTES or len(self) >= MOST_LINES
        return bool(self) and (full or all_there_are or waits_s >= timings.BATCH_SEGMENT_S)

    async def write(self) -> int:
        """Write some of them into a segment, and mark their lines, whose requests are released.
        Returns how many.
        """
        some, size = list[Result](), 0
        for result in self._kept[:MOST_LINES]:
            if size and size + len(result.text) > SEGMENT_BYTES:
                break
            some.append(result)
            size += len(result.text)
        good = [one.text for one in some if one.good]
        bad = [one.text for one in some if not one.good]
        name = f"{secrets.token_hex(8)}-{sum(map(len, good))}-{size}"
        batch, parts = self._batch, self._parts
        path = folder(batch) + name
        await insist(batch, "write a segment", lambda: parts.storage.put(path, each(*good, *bad)))
        ids = [one.request_id for one in some if one.request_id]
        used, releasing = await insist(batch, "read usage", lambda: parts.requests.releasing(ids))
        marked = Marked([one.place for one in some], len(good), len(bad), used, releasing)
        await insist(batch, "mark lines", lambda: parts.leading.mark(batch, name, marked))
        for outcome, lines in (("completed", good), ("failed", bad)):
            parts.telemetry.done(outcome, len(lines))
        del self._kept[: len(some)]
        self.bytes -= size
        self._oldest_s = parts.clock.local.monotonic_s()
        return len(some)
