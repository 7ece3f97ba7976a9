"""Finds and ends a request that blocks the worker's event loop with one long step, of more CPU time
than `workers.max_event_loop_block_s`.

All requests of a worker share one loop. While one of them computes there, no other request's tokens
are sent, and the lease is not renewed. The watch runs in a thread, because a blocked loop cannot
watch itself. It counts only the CPU time of the loop's thread, so no request is blamed if the
process is stopped, starved or waiting. Nor does it count garbage collections: how long one takes
depends on everything that the process holds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Literal

from serve_app import timings
from serve_app.observability.metrics import Telemetry
from workers.attempt import current

log = logging.getLogger("hermes.worker")


class LoopWatch:
    """Watches the loop that starts this. `held_s`: the most CPU time of one step."""

    def __init__(self, held_s: float, telemetry: Telemetry | None = None) -> None:
        self._held_s = held_s
        self._telemetry = telemetry
        self._watched: dict[str, asyncio.Future[float]] = {}
        self._beat_cpu_s = 0.0
        self._collecting_since_s: float | None = None
        self._collected_s = 0.0
        """CPU seconds that the loop's thread has spent on garbage collections."""
        self._stopped = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._loop_thread)
        self._beat()
        gc.callbacks.append(self._collects)
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def watched(self, request_id: str) -> Iterator[asyncio.Future[float]]:
        """A future that is done when the request has blocked the loop: for how many seconds."""
        held: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._watched[request_id] = held
        try:
            yield held
        finally:
            if self._watched.get(request_id) is held:
                del self._watched[request_id]

    def _beat(self) -> None:
        """The loop runs: nothing blocks it now."""
        self._beat_cpu_s = time.thread_time() - self._collected_s
        self._timer = self._loop.call_later(timings.LOOP_LOOK_S, self._beat)

    def _collects(self, phase: Literal["start", "stop"], _: dict[str, int]) -> None:
        """Python calls this before and after a garbage collection, in the thread that does it."""
        if threading.get_ident() != self._loop_thread:
            return
        if phase == "start":
            self._collecting_since_s = time.thread_time()
        elif self._collecting_since_s is not None:
            self._collected_s += time.thread_time() - self._collecting_since_s
            self._collecting_since_s = None

    def _computed_s(self) -> float | None:
        """CPU seconds of the loop's thread without its garbage collections; None during one."""
        collected_s = self._collected_s
        used_s = time.clock_gettime(self._clock)
        between = self._collecting_since_s is None and collected_s == self._collected_s
        return used_s - collected_s if between else None

    def _watch(self) -> None:
        step: tuple[float, object] = (0.0, None)
        began_s = looked_s = self._computed_s() or 0.0
        told = False
        seen: list[str] = []
        """The requests that the further looks at this step have named."""
        while not self._stopped.wait(timings.LOOP_LOOK_S):
            if (now_s := self._computed_s()) is None:
                continue
            task = asyncio.current_task(self._loop)
            if task is None or (self._beat_cpu_s, task) != step:
                # Within one turn of the loop a task makes one step. What was not seen yet began
                # after both of these.
                step, told, seen = (self._beat_cpu_s, task), False, []
                began_s = max(looked_s, self._beat_cpu_s)
            elif not told:
                seen.append(self._named_in_frames())
            if task is not None and not told and now_s - began_s >= self._held_s:
                told = True
                # A task of all requests turns from one to another: it names one if all looks do.
                same = len(seen) > 1 and len(set(seen)) == 1
                self._tell(_request_of(task) or (seen[0] if same else ""), now_s - began_s)
            looked_s = now_s

    def _tell(self, request_id: str, seconds: float) -> None:
        if self._telemetry is not None:
            self._telemetry.count("hermes_event_loop_blocks")
        frame = sys._current_frames().get(self._loop_thread)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
        whose = request_id or "no request that is known"
        log.warning("the event loop is blocked for %.1f s by %s, at %s", seconds, whose, where)
        if request_id and not self._stopped.is_set():
            self._loop.call_soon_threadsafe(self._held, request_id, seconds)

    def _held(self, request_id: str, seconds: float) -> None:
        held = self._watched.get(request_id)
        if held is not None and not held.done():
            held.set_result(seconds)

    def _named_in_frames(self) -> str:
        """The request that a shared task (such as vLLM's output handler) is working on: the one
        whose id the innermost frame with such ids has in a variable; empty if it has several.
        """
        known = list(self._watched)
        frame = sys._current_frames().get(self._loop_thread)
        while frame is not None:
            values = list(frame.f_locals.values())
            texts = [value for value in values if isinstance(value, str) and len(value) < 200]
            if named := [one for one in known if any(one in text for text in texts)]:
                return named[0] if len(named) == 1 else ""
            frame = frame.f_back
        return ""


def _request_of(task: asyncio.Task[object]) -> str:
    """The request for which a task was started, from the task's context. Python 3.11 exposes that
    only through the garbage collector.
    """
    context = next((found for found in gc.get_referents(task) if isinstance(found, Context)), None)
    attempt = context.get(current) if context is not None else None
    return attempt.request_id if attempt is not None else ""
