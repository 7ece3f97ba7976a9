"""Reads what a terminal entry holds of the response."""

from __future__ import annotations

import zlib

from serve_app.journal.entries import Entry


def transcript(entry: Entry) -> bytes | None:
    """All response bytes, if the terminal entry holds them."""
    packed = entry.packed
    return None if packed is None else zlib.decompress(packed)
