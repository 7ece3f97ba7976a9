"""Which writer owns a journal, by its last entry."""

from __future__ import annotations

from serve_app.contract import Cause
from serve_app.journal.attempt import Attempt
from serve_app.journal.entries import Entry
from serve_app.journal.ids import REQUEST_ID, TERMINAL_ID, EntryId, opening_id, seal_id
from serve_app.journal.standing import Standing, standing
from tests.tables import each


def at(entry_id: EntryId, nonce: bytes = b"ours") -> Entry:
    return Entry.output(entry_id, nonce, None, [], b"x", 1, None, None)


@each(
    "last, expected",
    [
        (None, Standing.FENCED),
        (at(EntryId(2, 3)), Standing.OURS),
        (at(EntryId(2, 1)), Standing.OURS),
        (Entry.void(EntryId(2, 1), b"ours", Cause.NOT_OPENED), Standing.OURS),
        (at(EntryId(2, 2), b"rival"), Standing.FENCED),
        (at(opening_id(3), b"next"), Standing.FENCED),
        (at(EntryId(1, 9), b"before"), Standing.OURS),
        (at(seal_id(1), b"before"), Standing.OURS),
        (at(REQUEST_ID, b""), Standing.OURS),
        (at(TERMINAL_ID), Standing.ENDED),
        (at(TERMINAL_ID, b"somebody"), Standing.FENCED),
    ],
)
async def test_the_last_entry_determines_the_owner_of_the_journal(
    last: Entry | None, expected: Standing
) -> None:
    attempt = Attempt("req_1", "key", 2, b"ours", "", lambda _: None)
    for number in range(3):
        attempt.append([], [b"x"], number, None)
        entry = attempt.take()
        assert entry is not None
        attempt.accepted(entry)
    assert attempt.last_built == EntryId(2, 3)
    assert standing(attempt, last) is expected
