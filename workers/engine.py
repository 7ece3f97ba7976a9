"""What a worker asks of an engine. One signature for all, so that no caller asks which one it has."""

from __future__ import annotations

import time
from typing import Protocol

from serve_app.journal.entries import RequestLine
from workers.recorder import Recorder


class EngineFailed(Exception):
    """The engine failed under a request; another replica may serve it."""


class Progress:
    """Health means progress: an engine with work and without a step for too long is sick, whatever its ping says."""

    def __init__(self) -> None:
        self._generating = 0
        self._moved_s = 0.0

    def begun(self) -> None:
        """A generation waits for the engine."""
        if not self._generating:
            self._moved_s = time.monotonic()
        self._generating += 1

    def ended(self) -> None:
        """It waits no more."""
        self._generating -= 1

    def stepped(self) -> None:
        """The engine has made a step."""
        self._moved_s = time.monotonic()

    def check(self, stall_s: float) -> None:
        """Raise if the engine stands still.

        Raises:
            EngineFailed: it has work, and made no step for `stall_s` seconds.
        """
        silent_s = time.monotonic() - self._moved_s
        if self._generating and silent_s > stall_s:
            raise EngineFailed(f"{self._generating} generations wait, and no step for {silent_s:.1f} s")


class Engine(Protocol):
    """An engine with an OpenAI-compatible server in the same process."""

    @property
    def name(self) -> str:
        """What the response header `x-hermes-engine` and the journal say, such as `vllm-0.32.0`."""
        ...

    async def start(self) -> None:
        """Load the model; return when requests can be served.

        Raises:
            SettingsError: an engine argument is unknown or impossible.
        """
        ...

    async def serve(self, request_id: str, line: RequestLine, body: bytes, recorder: Recorder) -> None:
        """Answer one HTTP request through `recorder`. Cancelling the task aborts the generation.

        Raises:
            EngineFailed: the engine died or broke; `recorder.broken` is set.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """What must be equal in two engines for one to go on where the other stopped."""
        ...

    async def check_health(self) -> None:
        """Raise if the engine cannot serve."""
        ...

    async def stop(self) -> None:
        """End the engine's processes."""
        ...
