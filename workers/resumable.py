"""The recording `EngineClient`: vLLM's serving layer talks to it as to the engine, and every output is recorded.

It always asks the engine for deltas, also where the serving layer wants only the final output, and merges them
itself: so a non-streamed request leaves the same trail in the journal as a streamed one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from workers.recorder import Recorder, current


class RecordingClient:
    """Delegates all of `EngineClient` to the engine; records what `generate` yields."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `EngineClient.generate`; outside of a recorded request it only delegates."""
        recorder = current.get()
        if recorder is None:
            async for output in self._engine.generate(prompt, sampling_params, request_id, **options):
                yield output
            return
        merge = sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        sampling_params.output_kind = RequestOutputKind.DELTA
        deltas = self._engine.generate(prompt, sampling_params, request_id, **options)
        try:
            if merge:
                yield await _merged(deltas, recorder)
                return
            async for output in deltas:
                _record(output, recorder)
                yield output
                if not output.finished:
                    recorder.pulled()
        except (EngineDeadError, EngineGenerateError):
            recorder.fail()
            raise
        finally:
            await deltas.aclose()


async def _merged(deltas: AsyncGenerator[RequestOutput, None], recorder: Recorder) -> RequestOutput:
    whole: RequestOutput | None = None
    async for output in deltas:
        _record(output, recorder)
        if whole is None:
            whole = output
        else:
            whole.add(output, aggregate=True)
        if not output.finished:
            recorder.pulled()
    if whole is None:
        raise EngineGenerateError("the engine ended a request without an output")
    whole.outputs.sort(key=lambda item: item.index)
    return whole


def _record(output: RequestOutput, recorder: Recorder) -> None:
    for item in output.outputs:
        recorder.record(
            item.index, item.text, item.token_ids, item.finish_reason, item.stop_reason, output.num_cached_tokens,
            len(output.prompt_token_ids or ()),
        )  # fmt: skip
