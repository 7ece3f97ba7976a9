"""Between vLLM's engine and its server app: the outputs of a request that nobody has taken yet.

vLLM merges them when its server is late. In a pause of the journal's writer they wait and are
merged, too: before the server makes an event of each.
"""

from __future__ import annotations

from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import async_llm
from vllm.v1.engine.output_processor import RequestOutputCollector

from serve_app.journal.pause import Pause
from workers.attempt import current


class PausingCollector(RequestOutputCollector):  # type: ignore[misc]
    """vLLM's own, of the request that the running task serves."""

    output: Any

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        attempt = current.get()
        self._pause = Pause() if attempt is None else attempt.pause
        self._begun = False

    def put(self, output: Any) -> None:
        """In a pause only what a client waits for wakes the server: the first output, the last, and
        errors.
        """
        running = self._begun and isinstance(output, RequestOutput) and not output.finished
        self._begun = True
        if running and self.output is None and self._pause.holds(self._wake):
            self.output = output
        else:  # vLLM merges it with what is held
            super().put(output)
        if not running:
            self._wake()

    def _wake(self) -> None:
        if self.output is not None:  # `get` would not wait any more, and find nothing for ever
            self.ready.set()


def install() -> None:
    """Have the engine make this kind."""
    if not hasattr(async_llm, RequestOutputCollector.__name__):
        raise RuntimeError("vLLM's engine takes its collectors from elsewhere")
    async_llm.RequestOutputCollector = PausingCollector
