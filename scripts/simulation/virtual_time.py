"""An event loop whose time jumps to the next timer, and the clock that shows this time.

Code under this loop runs as it does live; only nobody ever waits.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

EPOCH_S = 1_700_000_000.0
"""Unix time at which every simulation starts."""

_Result = TypeVar("_Result")


class _Jumping(selectors.SelectSelector):
    """Instead of waiting for sockets, of which there are none, move the time on."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """`timeout` is the time until the next timer, as the event loop knows it."""
        if timeout is None:
            raise RuntimeError("the simulation waits for something that nothing will ever cause")
        self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, in virtual time."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def work(self, time_s: float) -> None:
        """Compute for that long; nothing else runs meanwhile."""
        self._jumping.now_s += time_s


class VirtualClock:
    """`serve_app.clock.Clock` in virtual time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def monotonic_s(self) -> float:
        """The loop's time."""
        return self._loop.time()

    def unix_s(self) -> float:
        """The loop's time since `EPOCH_S`."""
        return EPOCH_S + self._loop.time()


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in virtual time, from second 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
