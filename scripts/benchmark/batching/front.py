"""Turns a batcher on an event loop: sends what it starts, and tells it what has ended."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from .batcher import Batcher
from .job import Job
from .occupancy import Occupancy

Send = Callable[[Job], Awaitable[None]]


class Front:
    """One batcher between those who submit jobs and the endpoint that ``send`` reaches.

    It has no loop of its own: an arrival, an end and the batcher's own time each cause one turn.
    """

    def __init__(self, batcher: Batcher, send: Send) -> None:
        now_s = time.perf_counter()
        self.turns = 0
        self.turn_s = 0.0
        """Seconds spent in the batcher itself."""
        self.running = Occupancy(now_s)
        self.slots = Occupancy(now_s)
        """0 while the batcher has no bound."""
        self._batcher = batcher
        self._send = send
        self._ended: dict[Job, asyncio.Future[bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._in_flight = 0
        self._closed = False

    async def perform(self, job: Job) -> bool:
        """Hand ``job`` to the batcher and return when it has ended, or when the front has closed;
        whether it was sent.
        """
        if self._closed:
            return False
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ended[job] = ended
        self._batcher.add(job)
        self._turn()
        return await ended

    async def close(self, grace_s: float) -> None:
        """Send nothing more, and return when what was sent has ended; after ``grace_s`` the rest of
        it is broken off.
        """
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        for ended in self._ended.values():
            ended.set_result(False)
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _turn(self) -> None:
        if self._closed:
            return
        now_s = time.perf_counter()
        started = self._batcher.next(now_s)
        wake_s = self._batcher.wake_s()
        self.turn_s += time.perf_counter() - now_s
        self.turns += 1
        for job in started:
            task = asyncio.get_running_loop().create_task(self._run(job, self._ended.pop(job)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._set_alarm(now_s, wake_s)
        self.slots.note(now_s, self._batcher.slots or 0)
        if started:
            self._in_flight += len(started)
            self.running.note(now_s, self._in_flight)

    def _set_alarm(self, now_s: float, wake_s: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wake_s is not None:
            delay_s = max(0.0, wake_s - now_s)
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._turn)

    async def _run(self, job: Job, ended: asyncio.Future[bool]) -> None:
        try:
            await self._send(job)
        except asyncio.CancelledError:
            _settle(ended, None)
            raise
        except Exception as broken:
            _settle(ended, broken)
        else:
            _settle(ended, None)
        self._batcher.ended(job)
        self._in_flight -= 1
        self.running.note(time.perf_counter(), self._in_flight)
        self._turn()


def _settle(ended: asyncio.Future[bool], broken: Exception | None) -> None:
    """Wake whoever waits for the job, unless nobody does any more."""
    if ended.done():
        return
    if broken is None:
        ended.set_result(True)
    else:
        ended.set_exception(broken)
