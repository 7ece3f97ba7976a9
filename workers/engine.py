"""What a worker asks of an engine. One signature for all, so that no caller asks which one it has."""

from __future__ import annotations

from typing import Protocol

from serve_app.journal.entries import RequestLine
from workers.recorder import Recorder


class EngineFailed(Exception):
    """The engine failed under a request; another replica may serve it."""



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

    async def check_health(self) -> None:
        """Raise if the engine cannot serve."""
        ...

    async def stop(self) -> None:
        """End the engine's processes."""
        ...
