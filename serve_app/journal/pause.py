"""How long an engine keeps what its running requests make. Pure."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from serve_app import timings

_PLANNED_SHARE = 0.9
"""Of the longest wait: steps are not equally long."""


class Pause:
    """The pause behind a turn of the journal's writer, in which an engine keeps what its running
    requests make: several outputs of a request become one, which costs what an output of one token
    costs (ADR 26).

    For each entry of a turn it lasts 1/`timings.ENTRIES_PER_S`, and it ends right behind the
    engine's last step in this time, so that no output has waited for nothing. There is none if
    fewer than two steps fit in: nothing would be merged.

    `on`: whether outputs of the next step wait.

    Args:
        longest_s: no output waits longer. 0: there is no pause.
    """

    def __init__(self, longest_s: float = 0.0) -> None:
        self.on = False
        self._longest_s = longest_s
        self._until_s = self._first_s = self._stepped_s = -math.inf
        self._step_s = math.inf
        self._wakes: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, entries: int) -> None:
        """A turn of the writer appends so many entries."""
        until_s = asyncio.get_running_loop().time() + entries / timings.ENTRIES_PER_S
        self._until_s = max(self._until_s, until_s)
        self.on = self.on or self._two_steps_fit()

    def stepped(self) -> None:
        """The engine has made a step, and handed over its outputs."""
        now_s = asyncio.get_running_loop().time()
        self._step_s, self._stepped_s = now_s - self._stepped_s, now_s
        if not self._wakes:
            self.on = self.on and self._two_steps_fit()
        elif not self._fits(self._first_s, now_s + self._step_s):
            self.end()

    def _two_steps_fit(self) -> bool:
        next_s = self._stepped_s + self._step_s
        return self._fits(next_s, next_s + self._step_s)

    def _fits(self, first_s: float, step_s: float) -> bool:
        """Whether outputs that wait since `first_s` may wait for a step at `step_s`."""
        return step_s <= min(self._until_s, first_s + _PLANNED_SHARE * self._longest_s)

    def holds(self, wake: Callable[[], None]) -> bool:
        """Whether a running request's new output waits (hot path); it is asked for the first of
        those that wait. What a client waits for must not: the first output of a request, its end,
        an error.

        Args:
            wake: called at the end of the pause.
        """
        if not self.on:
            return False
        if not self._wakes:
            loop = asyncio.get_running_loop()
            self._first_s = loop.time()
            self._timer = loop.call_later(self._longest_s, self.end)
        self._wakes.append(wake)
        return True

    def end(self) -> None:
        """Wake everybody whose outputs wait."""
        if self._timer is not None:
            self._timer.cancel()
        self.on = False
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()
