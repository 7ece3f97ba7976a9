"""A clock for bounds that are promised: it stands still while the machine does."""

from __future__ import annotations

import threading
import time
from types import TracebackType

_TICK_S, _LONGEST_TICK_S = 0.02, 0.04


class RunningTime:
    """Seconds of the `with` block for which this process got its turns.

    A thread wants to wake up every `_TICK_S`. By how much it is late, everything else in this
    process was late, too, through no fault of its own; except where the process computed meanwhile,
    because code that blocks the event loop can hold up this thread as well.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._counted: tuple[float, float, float] = (0.0, 0.0, 0.0)
        """The seconds until the last tick, when that was, and the CPU time by then."""

    def __enter__(self) -> RunningTime:
        self._counted = (0.0, time.monotonic(), time.process_time())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def now_s(self) -> float:
        """Seconds since the block began."""
        counted_s, at_s, cpu_s = self._counted
        ran_s = max(_LONGEST_TICK_S, time.process_time() - cpu_s)
        return counted_s + min(time.monotonic() - at_s, ran_s)

    def _count(self) -> None:
        while not self._stop.wait(_TICK_S):
            self._counted = (self.now_s(), time.monotonic(), time.process_time())
