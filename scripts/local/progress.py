"""Shows whether downloading and loading a model makes progress; this may take an hour."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.local import logs

_SHOWN = 110


def cache() -> Path:
    """The folder for models from the hub, as the hub's own library determines it."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"


class Loading:
    """The loading of one service's model. `source`: a folder, a built-in name, or a hub id, whose
    downloaded bytes are counted.
    """

    def __init__(self, state: Path, source: str) -> None:
        self._state = state
        self._blobs = cache() / f"models--{source.replace('/', '--')}" / "blobs"
        self._said: list[str] = []

    def downloaded_bytes(self) -> int:
        """Bytes on disk so far. A file that is being written may have its full length from the
        beginning.
        """
        if not self._blobs.exists():
            return 0
        sizes = []
        for blob in self._blobs.iterdir():
            try:
                sizes.append(blob.stat().st_blocks * 512)
            except FileNotFoundError:  # complete now, and renamed
                continue
        return sum(sizes)

    def line(self) -> str:
        """The progress as one line; it changes whenever something has moved."""
        said = logs.loading(self._state)
        new = [line for line in said if line not in self._said]
        self._said = said
        parts = [f"model: {size / 1e9:.2f} GB here"] if (size := self.downloaded_bytes()) else []
        shown = (new or said)[-1:]
        return "; ".join([*parts, *(f"engine: {line[:_SHOWN]}" for line in shown)])
