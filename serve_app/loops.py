"""Background loops. A process whose loop has died looks alive: its lease is renewed and its probes
answer, but nobody does the loop's work. Therefore no loop is a bare task: one that ends, by an
error, by returning or by a cancellation that did not come from us, is restarted after a growing
pause. If it keeps ending, `failing` names it, and Serve replaces the replica.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any

from serve_app import timings
from serve_app.clock import SYSTEM, Clock
from serve_app.errors import HermesError, RedisUnavailable

if TYPE_CHECKING:  # the commands use Redis, too, and have no metrics
    from serve_app.observability.logs import Outage
    from serve_app.observability.metrics import Telemetry

log = logging.getLogger("hermes.loops")

Work = Callable[[], Awaitable[None]]


class Loops:
    """The background loops of one process (in tests, of one part)."""

    def __init__(self, telemetry: Telemetry | None = None, clock: Clock = SYSTEM) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._kept: dict[asyncio.Task[None], str] = {}
        self._failed_s: dict[str, deque[float]] = {}

    def keep(self, name: str, work: Work) -> asyncio.Task[None]:
        """Run `work()`, which never returns, until `end` with the returned task, or `stop`."""
        if self._telemetry is not None:
            self._telemetry.of("hermes_loop_restarts", name)  # its series, at 0
        self._failed_s.setdefault(name, deque(maxlen=timings.LOOP_FAILURES))
        task = asyncio.create_task(self._run(name, work), name=name)
        self._kept[task] = name
        return task

    async def end(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            self._kept.pop(task, None)
        await ended(tasks)

    async def stop(self) -> None:
        await self.end(*self._kept)

    @property
    def failing(self) -> list[str]:
        """The loops that have ended `LOOP_FAILURES` times lately, or are not running."""
        since_s = self._clock.monotonic_s() - timings.LOOP_FAILURES_WITHIN_S
        often = {
            name
            for name, at_s in self._failed_s.items()
            if len(at_s) == timings.LOOP_FAILURES and at_s[0] > since_s
        }
        return sorted(often | {name for task, name in self._kept.items() if task.done()})

    def check_health(self) -> None:
        """Serve calls this, and replaces the replica if a loop keeps ending."""
        if failing := self.failing:
            raise HermesError(f"background loops keep ending: {', '.join(failing)}")

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
                self._failed(name, error)  # not our cancellation: a library's timeout has leaked
            except Exception as error:
                self._failed(name, error)
            lately = sum(
                at_s > self._clock.monotonic_s() - timings.LOOP_FAILURES_WITHIN_S
                for at_s in failed_s
            )
            await asyncio.sleep(backoff(timings.LOOP_RESTART_S, lately))

    def _failed(self, name: str, error: BaseException | None) -> None:
        self._failed_s[name].append(self._clock.monotonic_s())
        if self._telemetry is not None:
            self._telemetry.count("hermes_loop_restarts", name)
        problem = "it returned" if error is None else repr(error)
        log.error("loop %s ended, restarting it: %s", name, problem, exc_info=error)


async def repeat(every_s: float, sweep: Work, outage: Outage) -> None:
    """Sweep without an end; `outage` is told while Redis cannot be reached."""
    while True:
        await asyncio.sleep(jittered(every_s))
        try:
            await sweep()
            outage.over()
        except RedisUnavailable as error:
            outage.failed(error)


def retrieved(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception, which asyncio would report. A done callback for what several share,
    because all that waited may have gone.
    """
    if not done.cancelled():
        done.exception()


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended, and ignore their results. If a cancellation coincides
    with a timeout inside a library, the library may treat it as the timeout and continue.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=timings.LOOP_CANCEL_AGAIN_S)
        for task in done:
            retrieved(task)


_EMPTY = Context()


async def first(within_s: float, *futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done, with a time limit: `asyncio.wait` at half its price, which
    every request pays twice.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    # A cancelled timer may stay with the loop until its time, and would keep the caller's context.
    limit = loop.call_later(within_s, end, context=_EMPTY)
    for future in futures:
        future.add_done_callback(end)
    try:
        await over
    finally:
        limit.cancel()
        for future in futures:
            future.remove_done_callback(end)


def backoff(pauses_s: Sequence[float], failures: int) -> float:
    """The jittered pause after this many failures; the last pause repeats."""
    return jittered(pauses_s[min(failures, len(pauses_s)) - 1])


def jittered(seconds: float) -> float:
    """About this long, at random, so that callers that failed together do not retry together."""
    return seconds * random.uniform(0.5, 1.5)
