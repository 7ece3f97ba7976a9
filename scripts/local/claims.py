"""Numbers that one process of this machine holds at a time. Standard library only."""

from __future__ import annotations

import fcntl
import os
from functools import cached_property
from pathlib import Path
from typing import BinaryIO


class Claims:
    """The numbers of one kind. When a process ends, the kernel takes back what it held, whatever
    ended it.

    A lock of `flock` would pass on to what the process forks, which may outlive it.
    """

    def __init__(self, kind: str) -> None:
        # Not TMPDIR: two runs on one machine may have two.
        self._path = Path("/tmp") / f"hermes-{kind}-{os.getuid()}"
        self._mine: set[int] = set()

    def take(self, number: int) -> bool:
        """Hold a number from now on; false if any process, this one included, holds it already."""
        if number in self._mine:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        self._mine.add(number)
        return True

    def give_back(self, number: int) -> None:
        """Hold it no longer."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)
        self._mine.remove(number)

    @cached_property
    def _file(self) -> BinaryIO:
        return self._path.open("ab")  # opened once: closing it anywhere would release every number
