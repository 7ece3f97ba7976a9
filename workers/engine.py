"""The interface of an engine, the same for all engines, and whether it can serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.contract import EngineReport
from serve_app.journal.entries import RequestLine
from workers.attempt import Attempt, EngineFailed


class Progress:
    """An engine that has work and makes no step for too long (`workers.engine_stall_timeout_s`) is
    sick, even if it answers pings.
    """

    on_step: Callable[[], None] | None = None
    """Called behind each step, when all of its outputs have been handed over."""

    def __init__(self) -> None:
        self._generating = 0
        self._moved_s = 0.0

    def begun(self) -> None:
        """A generation now waits for the engine."""
        if not self._generating:
            self._moved_s = SYSTEM.monotonic_s()
        self._generating += 1

    def ended(self) -> None:
        self._generating -= 1

    @property
    def idle(self) -> bool:
        return not self._generating

    def stepped(self) -> None:
        """The engine has made a step, and handed over its outputs."""
        self._moved_s = SYSTEM.monotonic_s()
        if self.on_step is not None:
            self.on_step()

    def check(self, stall_s: float) -> None:
        """Raise `EngineFailed` if there is work, and was no step for `stall_s` seconds."""
        silent_s = SYSTEM.monotonic_s() - self._moved_s
        if self._generating and silent_s > stall_s:
            raise EngineFailed(
                f"{self._generating} generations wait, "
                f"and the engine made no step for {silent_s:.1f} s"
            )


class Engine(Protocol):
    """An engine with an OpenAI-compatible server in the same process."""

    progress: Progress
    name: str
    """In the response header `x-hermes-engine` and in the journal, such as `vllm-0.32.0`."""
    fingerprint: str
    """What must be equal in two engines so that one can continue what the other began."""

    async def start(self) -> None:
        """Load the model; returns when requests can be served.

        Raises:
            SettingsError: an engine argument is unknown or impossible.
        """

    async def serve(
        self, request_id: str, line: RequestLine, body: bytes, attempt: Attempt
    ) -> None:
        """Answer one HTTP request through `attempt`, whose `failure` says why there is no answer.
        Cancelling the task aborts the generation.

        Raises:
            EngineFailed: the engine died or broke; `attempt.engine_failed` is set.
        """

    def report(self, name: str) -> EngineReport | None:
        """What the memory of the engine of this worker's lease holds, and how much of that is used;
        None of one that has none.
        """

    async def check_health(self) -> None:
        """Raise if it cannot serve."""

    async def stop(self) -> None:
        """End its processes."""


class EngineHealth:
    """An engine that was found sick stays sick; `on_sick` is told once, with its check's error."""

    def __init__(self, engine: Engine, on_sick: Callable[[Exception], Awaitable[None]]) -> None:
        self._engine = engine
        self._on_sick = on_sick
        self.sick: asyncio.Future[None] = asyncio.Future()
        """Done when the engine is sick."""

    def check(self) -> None:
        """Raise `EngineFailed` if the engine was found sick."""
        if self.sick.done():
            raise EngineFailed("the engine has failed")

    async def examine(self) -> None:
        try:
            await self._engine.check_health()
        except Exception as error:
            if not self.sick.done():
                self.sick.set_result(None)
                await self._on_sick(error)

    async def watch(self) -> None:
        """Check the engine forever, because Serve's own checks take many seconds."""
        while True:
            await asyncio.sleep(timings.HEALTH_LOOK_S)
            if not self.sick.done():
                await self.examine()
