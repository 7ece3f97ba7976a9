"""A transcript in pieces equals the whole, from whichever position a reader continues."""

from __future__ import annotations

import random
import zlib

from serve_app.journal.events import PIECE_BYTES, Pieces, after_event
from tests.tables import each

_random = random.Random(7)


def stream(events: int, longest: int) -> bytes:
    """Events of various lengths, with comments between them."""
    parts = []
    for number in range(1, events + 1):
        if number % 7 == 0:
            parts.append(b": a comment\n\n")
        parts.append(
            b"id: %d\ndata: %b\n\n"
            % (number, _random.randbytes(_random.randrange(longest)).hex().encode())
        )
    return b"".join(parts)


def taken(pieces: Pieces) -> list[bytes]:
    found = []
    while not pieces.done:
        found.append(pieces.take())
    assert pieces.take() == b""
    return found


@each("level", [0, 1, 9])
@each("events, longest", [(0, 10), (1, 10), (300, 2_000), (3, 400_000)])
def test_pieces_are_everything_after_the_last_seen_event(
    events: int, longest: int, level: int
) -> None:
    whole = stream(events, longest)
    packed = zlib.compress(whole, level)
    for seen in {0, 1, events // 2, events, events + 3}:
        found = taken(Pieces(packed, seen_events=seen))
        assert b"".join(found) == after_event(whole, 1, seen)
        assert all(len(piece) <= PIECE_BYTES + 2 * longest + 40 for piece in found)


def test_a_transcript_that_was_cut_off_ends() -> None:
    whole = stream(300, 2_000)
    assert whole.startswith(b"".join(taken(Pieces(zlib.compress(whole)[:-1000]))))


def test_what_unpacks_to_very_much_comes_in_pieces() -> None:
    pieces = Pieces(zlib.compress(b"x" * (64 << 20)))
    for _ in range(4):
        assert 0 < len(pieces.take()) <= PIECE_BYTES
