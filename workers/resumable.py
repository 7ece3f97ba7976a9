"""The recording and replaying `EngineClient`: vLLM's serving layer talks to it as to the engine.

It always asks the engine for deltas, also where the serving layer wants only the final output, and merges them
itself: so a non-streamed request leaves the same trail in the journal as a streamed one. Outputs that older
attempts have left there are handed to the serving layer again, so that its parsers, usage and stop logic rebuild
their state; then the engine goes on from prompt + tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from serve_app.settings import DEFAULT_TENANT
from workers.engine import Progress
from workers.recorder import Recorder, current
from workers.replay import CannotContinue
from workers.seam import Seam, obstacle


class RecordingClient:
    """Delegates all of `EngineClient` to the engine; records what `generate` yields."""

    def __init__(self, engine: EngineClient, progress: Progress) -> None:
        self._engine = engine
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `EngineClient.generate`; outside of a recorded request it only delegates."""
        self._progress.begun()
        try:
            recorder = current.get()
            if recorder is None:
                outputs = self._engine.generate(prompt, sampling_params, request_id, **options)
            else:
                outputs = self._recorded(recorder, prompt, sampling_params, request_id, options)
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self._progress.ended()

    async def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As `EngineClient.encode` (embeddings and such), in the tenant's own part of the prefix cache."""
        recorder = current.get()
        if recorder is not None:
            prompt = _salted(prompt, recorder.tenant)
        outputs = self._engine.encode(prompt, pooling_params, request_id, **options)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _recorded(
        self, recorder: Recorder, prompt: Any, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        merge = params.output_kind is RequestOutputKind.FINAL_ONLY
        params.output_kind = RequestOutputKind.DELTA
        generation = recorder.next_generation()
        prompt = _salted(prompt, recorder.tenant)
        deltas = self._deltas(recorder, generation, prompt, params, request_id, options)
        try:
            async with aclosing(deltas):
                if merge:
                    yield await _merged(deltas)
                    return
                async for output in deltas:
                    yield output
        except (EngineDeadError, EngineGenerateError):
            recorder.fail()
            raise

    async def _deltas(
        self, recorder: Recorder, generation: int, prompt: Any, params: SamplingParams, request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """First what is in the journal, then what the engine adds to it."""
        seam = self._seam(recorder, generation, prompt, params, request_id)
        if seam is None:
            new = self._engine.generate(prompt, params, request_id, **options)
        else:
            for recorded in recorder.recorded.outputs:
                try:
                    output = seam.replay(recorded)
                except CannotContinue as error:
                    recorder.lose(str(error))
                recorder.replay(recorded)
                yield output
                if not output.finished:
                    recorder.pulled()
            if seam.finished:
                return
            new = seam.continued(self._engine, options)
        async with aclosing(new):
            async for output in new:
                _record(output, recorder, generation)
                yield output
                if not output.finished:
                    recorder.pulled()

    def _seam(
        self, recorder: Recorder, generation: int, prompt: Any, params: SamplingParams, request_id: str
    ) -> Seam | None:
        """None where there is nothing to go on from, or nobody has seen it and it cannot be continued."""
        if not recorder.recorded.outputs:
            return None
        why = obstacle(prompt, params, recorder.recorded, generation)
        if not why:
            config = self._engine.model_config
            return Seam(self._engine.renderer.tokenizer, config.max_model_len, prompt, params, request_id)
        if recorder.recorded.seen:
            recorder.lose(why)
        recorder.restart()
        return None


def _salted(prompt: Any, tenant: str) -> Any:
    """A prompt whose cached prefix no other tenant can hit: how soon the first token comes would tell who asked before.

    The salt is a digest of the tenant and the caller's own `cache_salt`, so that no salt of one tenant's is another's.
    Where nobody needs a key, everybody is one tenant, and what has no salt shares its prefixes.
    """
    own = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if not isinstance(prompt, dict) or (tenant == DEFAULT_TENANT and not own):
        return prompt
    digest = hashlib.blake2b(digest_size=32)
    for part in (tenant, own or ""):
        digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    return {**prompt, "cache_salt": digest.hexdigest()}


async def _merged(deltas: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    whole: RequestOutput | None = None
    async for output in deltas:
        if whole is None:
            whole = output
        else:
            whole.add(output, aggregate=True)
    if whole is None:
        raise EngineGenerateError("the engine ended a request without an output")
    whole.outputs.sort(key=lambda item: item.index)
    return whole


def _record(output: RequestOutput, recorder: Recorder, generation: int) -> None:
    for item in output.outputs:
        recorder.record(
            item.index if generation == 0 else -generation, item.text, item.token_ids, item.finish_reason,
            item.stop_reason, output.num_cached_tokens, len(output.prompt_token_ids or ()),
        )  # fmt: skip
