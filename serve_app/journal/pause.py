"""The pause behind a turn of the journal's writer, in which an engine keeps what its running
requests make: several outputs of a request become one, which costs what an output of one token
costs (ADR 26). Pure.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from serve_app import timings

_PLANNED_SHARE = 0.9
"""Of the longest wait: steps are not equally long."""


def together(outputs_per_s: float, streams: int, longest_s: float) -> int:
    """How many outputs of a stream become one, so that a worker writes no more than
    `timings.ENTRIES_PER_S` if no output may wait longer than `longest_s`. 1: there is no pause.

    Args:
        streams: each has an output in every step of the engine.
    """
    step_s = streams / outputs_per_s if outputs_per_s else math.inf
    within = 1 + int(_PLANNED_SHARE * longest_s / step_s)
    return max(1, min(within, int(outputs_per_s / timings.ENTRIES_PER_S)))


class Pause:
    """Begun by the writer with a turn. It ends when the engine has made as many outputs of a stream
    as the load calls for: right behind a step, so that none has waited for nothing. If the steps
    become slower meanwhile, it ends when an output has waited for `longest_s`.

    `on`: whether it lasts; `together`: after how many outputs of a stream it ends.

    Args:
        longest_s: 0: there is none.
    """

    def __init__(self, longest_s: float = 0.0) -> None:
        self.on = False
        self.together = 1
        self._longest_s = longest_s
        self._wakes: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False
        self._outputs = self._streams = 0
        self._since_s = 0.0

    def begin(self, entries: int) -> None:
        """A turn of the writer appends so many entries."""
        now_s = asyncio.get_running_loop().time()
        self._streams = max(self._streams, entries)
        if (passed_s := now_s - self._since_s) >= timings.LOAD_S:
            self.together = together(self._outputs / passed_s, self._streams, self._longest_s)
            self._outputs = self._streams = 0
            self._since_s = now_s
        self.on = self.on or self.together > 1

    def holds(self, waiting: int, wake: Callable[[], None]) -> bool:
        """Whether a running request's new output waits for the end of the pause (hot path). What a
        client waits for must not: a request's first output, its end, an error.

        Args:
            waiting: how many outputs of the request nobody has taken yet, without this one.
            wake: called at the end of the pause if this is the first of them.
        """
        self._outputs += 1
        if not self.on:
            return False
        loop = asyncio.get_running_loop()
        if not waiting:
            self._wakes.append(wake)
            if self._timer is None:
                self._timer = loop.call_later(self._longest_s, self.end)
        if waiting + 1 >= self.together and not self._ending:
            self._ending = True
            loop.call_soon(self._end_behind, self._outputs)
        return True

    def _end_behind(self, outputs: int) -> None:
        """End it when the engine's step has handed over all of its outputs. vLLM's does so in
        several turns of the event loop, with some outputs in each.
        """
        if outputs == self._outputs:
            self.end()
        elif self._ending:
            asyncio.get_running_loop().call_soon(self._end_behind, self._outputs)

    def end(self) -> None:
        """Wake everybody whose outputs wait."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self.on = self._ending = False
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()
