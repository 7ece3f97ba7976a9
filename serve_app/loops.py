"""Background loops: one that ends by itself is started again, and one that keeps ending makes its process unhealthy.

A process whose loop has died looks alive: its lease is renewed, its probes answer, and what the loop did is missed by
nobody. So no loop is a bare task. A loop that ends by an error (or by returning, or by a cancellation that nobody
asked for) is logged, counted and started again, each time a little later; one that ends again and again is named by
`failing`, and Serve replaces the replica.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from serve_app.errors import HermesError
from serve_app.telemetry import Telemetry

log = logging.getLogger("hermes.loops")

Work = Callable[[], Awaitable[None]]

FAILURES = 5
WITHIN_S = 60.0
_ASK_AGAIN_S = 0.5
_AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class LoopFailed(HermesError):
    """A background loop ends again and again: only a new process can help."""


class Loops:
    """The loops of one process (or, in a test, of one part)."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry
        self._kept: dict[asyncio.Task[None], str] = {}
        self._failed_s: dict[str, deque[float]] = {}

    def keep(self, name: str, work: Work) -> asyncio.Task[None]:
        """Run `work()`, which never returns, until `end` is called for the task."""
        if self._telemetry is not None:
            self._telemetry.loop_kept(name)
        self._failed_s.setdefault(name, deque(maxlen=FAILURES))
        task = asyncio.create_task(self._run(name, work), name=name)
        self._kept[task] = name
        return task

    async def end(self, *tasks: asyncio.Task[None]) -> None:
        """End loops for good."""
        for task in tasks:
            self._kept.pop(task, None)
        await ended(tasks)

    @property
    def failing(self) -> list[str]:
        """Loops that have ended `FAILURES` times in the last minute, and such as do not run at all."""
        since_s = time.monotonic() - WITHIN_S
        often = {name for name, at_s in self._failed_s.items() if len(at_s) == FAILURES and at_s[0] > since_s}
        return sorted(often | {name for task, name in self._kept.items() if task.done()})

    def check_health(self) -> None:
        """Called where Serve asks for the health of the replica.

        Raises:
            LoopFailed: a loop does not stay up.
        """
        if failing := self.failing:
            raise LoopFailed(f"background loops do not stay up: {', '.join(failing)}")

    async def _run(self, name: str, work: Work) -> None:
        failed_s = self._failed_s[name]
        while True:
            try:
                await work()
                self._failed(name, None)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self._failed(name, error)  # somebody else's: a library's time limit has leaked
            except Exception as error:
                self._failed(name, error)
            lately = sum(at_s > time.monotonic() - WITHIN_S for at_s in failed_s)
            await asyncio.sleep(jittered(_AGAIN_S[min(lately, len(_AGAIN_S)) - 1]))

    def _failed(self, name: str, error: BaseException | None) -> None:
        self._failed_s[name].append(time.monotonic())
        if self._telemetry is not None:
            self._telemetry.loop_restarted(name)
        problem = "it returned" if error is None else repr(error)
        log.error("loop %s ended and is started again: %s", name, problem, exc_info=error)


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended, whatever they end with.

    Asked once is not enough: a library may take a cancellation that comes together with a time limit of its own for
    that limit, and go on.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=_ASK_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved: who ends it does not want it


def jittered(seconds: float) -> float:
    """About so long: who has failed together must not come back together."""
    return seconds * random.uniform(0.5, 1.5)
