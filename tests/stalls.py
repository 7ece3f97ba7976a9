"""How long a test's machine stood still: of this process, and of all that waited for a core.

A test that failed beside long stalls may have failed by slowness. Nothing decides by these figures;
they are printed, so that a reader can.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 0.02
_PRESSURE = Path("/proc/pressure/cpu")


@dataclass(frozen=True)
class Stalled:
    """Seconds for which something stood still."""

    own_s: float
    """This process was late by so much in all."""
    waited_s: float
    """So long at least one task of the machine was ready to run and had no core (Linux counts it;
    0 where it does not).
    """

    def __sub__(self, other: Stalled) -> Stalled:
        return Stalled(self.own_s - other.own_s, self.waited_s - other.waited_s)

    def __str__(self) -> str:
        return f"stalled_own_s={self.own_s:.1f} waited_for_a_core_s={self.waited_s:.1f}"


class Stalls:
    """Counts stalls from when it is made."""

    def __init__(self) -> None:
        self._own_s = 0.0
        threading.Thread(target=self._tick, daemon=True, name="stalls").start()

    def so_far(self) -> Stalled:
        """All stalls since this was made."""
        waited_s = 0.0
        with suppress(OSError, ValueError, IndexError):
            waited_s = int(_PRESSURE.read_text().split("total=")[1].split()[0]) / 1e6
        return Stalled(self._own_s, waited_s)

    def _tick(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_TICK_S)
            now = time.monotonic()
            self._own_s += max(0.0, now - last - 2 * _TICK_S)
            last = now
