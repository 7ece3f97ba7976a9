"""Makes the output files of a batch from its segments, once, when no result is to come any more.

Lines without a result are told in the error file. Whoever repeats this writes the same files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from serve_app.batches.leading import Closed
from serve_app.batches.lines import Row, asked_by, unanswered_line
from serve_app.batches.record import Batch
from serve_app.batches.segments import folder
from serve_app.files.files import OUTPUT, File

if TYPE_CHECKING:
    from serve_app.batches.job import BatchParts

_ROWS = 1_000
"""Lines that are looked up in the index at a time."""
_SPAN_BYTES = 1 << 20
"""Of the input file that are read at a time, if several lines are in them."""


async def join(
    parts: BatchParts,
    batch: Batch,
    closed: Closed,
    segments: Sequence[str],
    unfinished: Sequence[int],
) -> Closed:
    """Write both files. Returns how the batch ends, without the id of a file that has nothing in
    it.
    """
    sizes = [tuple(map(int, name.split("-")[1:])) for name in segments]
    good, bad = [], []
    for name, (good_bytes, all_bytes) in zip(segments, sizes, strict=True):
        path = folder(batch) + name
        good += [(path, 0, good_bytes)] if good_bytes else []
        bad += [(path, good_bytes, all_bytes)] if all_bytes > good_bytes else []
    output, errors = closed.output_file_id, closed.error_file_id
    if good:
        await _write(parts, batch, output, "output", _ranges(parts, good))
    if bad or unfinished:
        pieces = _errors(parts, batch, closed, bad, unfinished)
        await _write(parts, batch, errors, "error", pieces)
    return closed._replace(
        output_file_id=output if good else "",
        error_file_id=errors if bad or unfinished else "",
    )


async def _write(
    parts: BatchParts, batch: Batch, file_id: str, what: str, pieces: AsyncIterator[bytes]
) -> None:
    facts = batch.facts
    path = parts.files.path(facts.tenant, file_id)
    size = await parts.storage.put(path, pieces)
    now_s = int(parts.clock.now_s())
    expires_s = now_s + facts.output_expires_s if facts.output_expires_s else 0
    name = f"{facts.id}_{what}.jsonl"
    await parts.files.add(File(file_id, facts.tenant, size, now_s, name, OUTPUT, path, expires_s))


async def _ranges(
    parts: BatchParts, ranges: Sequence[tuple[str, int, int]]
) -> AsyncIterator[bytes]:
    for path, begin, end in ranges:
        async for piece in parts.storage.get(path, begin, end):
            yield piece


async def _errors(
    parts: BatchParts,
    batch: Batch,
    closed: Closed,
    ranges: Sequence[tuple[str, int, int]],
    unfinished: Sequence[int],
) -> AsyncIterator[bytes]:
    async for piece in _ranges(parts, ranges):
        yield piece
    for at in range(0, len(unfinished), _ROWS):
        async for text in _told(parts, batch, closed, unfinished[at : at + _ROWS]):
            yield text


async def _told(
    parts: BatchParts, batch: Batch, closed: Closed, places: Sequence[int]
) -> AsyncIterator[bytes]:
    """What the file tells of lines that have no result."""
    rows: list[Row] = []
    for begin, end in _runs(places):
        rows += await parts.checks.rows(batch, begin, end - begin)
    for span in _spans(sorted(rows, key=lambda row: row.offset)):
        begin, end = span[0].offset, span[-1].offset + span[-1].length
        read = await parts.storage.read(batch.facts.input_path, begin, end)
        for row in span:
            line = read[row.offset - begin : row.offset - begin + row.length]
            yield unanswered_line(batch.facts.id, asked_by(line).custom_id, closed.outcome)


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Places in order, as ranges without holes."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
    return runs


def _spans(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by their place in the file, in groups that are read together."""
    spans: list[list[Row]] = []
    for row in rows:
        if spans and row.offset + row.length - spans[-1][0].offset <= _SPAN_BYTES:
            spans[-1].append(row)
        else:
            spans.append([row])
    return spans
