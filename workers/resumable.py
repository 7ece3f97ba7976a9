"""The recording and replaying `EngineClient`, which vLLM's serving layer uses in place of the
engine.

It always asks the engine for deltas and merges them itself if the serving layer wants only the
final output. So a response that is not streamed leaves the same record in the journal as a streamed
one. Outputs recorded by older attempts are passed to the serving layer again, so that its parsers,
usage and stop logic rebuild their state; then the engine goes on behind their tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import async_llm
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector

from serve_app.contract import Cause, NotResumed
from serve_app.journal.attempt_log import Pause
from serve_app.policy.classes import engine_priority
from serve_app.settings import DEFAULT_TENANT
from workers import grammars
from workers.answers import merged, of_the_text
from workers.attempt import Attempt, current
from workers.continuation import Continuation, needs_regeneration, unsupported_reason
from workers.engine import Progress
from workers.engine_plugin import PRIOR
from workers.replay import CannotContinue, TokenLogprobs

_TOO_WIDE = "The request contains an integer of more than 64 bits, which the engine cannot take."
"""vLLM cannot send it to the engine's process, and reports an error of its own."""
_MOST_STOPS = 112
"""vLLM's second model runner has room for 128, and needs some for the model's own."""
_AT_ONCE = 64
"""Recorded outputs after which other requests get their turn: a long answer has thousands."""


class RecordingClient:
    """Delegates all of `EngineClient` to the engine, and records what `generate` yields.

    Args:
        rerun_tokens: how many tokens of a request may be generated a second time.
        prompts_vary: whether a later attempt may make another prompt of the same request.
        by_priority: whether the engine's scheduler goes by priorities; vLLM refuses them otherwise.
        grammars: the engine's backend for structured outputs.
    """

    def __init__(
        self,
        engine: EngineClient,
        progress: Progress,
        rerun_tokens: int,
        prompts_vary: bool = False,
        by_priority: bool = False,
        grammars: str = "",
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._rerun_tokens = rerun_tokens
        self._prompts_vary = prompts_vary
        self._by_priority = by_priority
        self._grammars = grammars

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `EngineClient.generate`; outside of a recorded request it only delegates."""
        self._progress.begun()
        try:
            attempt = current.get()
            if attempt is None:
                outputs = self._engine.generate(prompt, sampling_params, request_id, **options)
            else:
                outputs = self._recorded(attempt, prompt, sampling_params, request_id, options)
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self._progress.ended()

    async def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Like `EngineClient.encode` (embeddings and similar), in the tenant's own part of the
        prefix cache.
        """
        attempt = current.get()
        if attempt is not None:
            prompt = _salted(prompt, attempt.facts.tenant)
            options = self._prioritised(attempt, attempt.next_generation() > 0, options)
        outputs = self._engine.encode(prompt, pooling_params, request_id, **options)
        async with aclosing(outputs):
            async for output in outputs:
                if attempt is not None and output.finished:
                    attempt.read(len(output.prompt_token_ids), output.num_cached_tokens or 0)
                yield output

    def _prioritised(
        self, attempt: Attempt, one_of_several: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """With the priority of the request's class, which the journal holds, so every attempt has
        the same.
        """
        if not self._by_priority:
            return options
        return {**options, "priority": engine_priority(attempt.facts.request_class, one_of_several)}

    async def _recorded(
        self,
        attempt: Attempt,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        merge = params.output_kind is RequestOutputKind.FINAL_ONLY
        params.output_kind = RequestOutputKind.DELTA
        if params.extra_args and PRIOR in params.extra_args:  # only ours counts, never a client's
            params.extra_args = {k: v for k, v in params.extra_args.items() if k != PRIOR}
        grammars.prepare(params, self._grammars)
        _check_room(params, self._engine.renderer.tokenizer)
        generation = attempt.next_generation()
        options = self._prioritised(attempt, generation > 0 or params.n > 1, options)
        prompt = _salted(prompt, attempt.facts.tenant)
        deltas = self._deltas(attempt, generation, prompt, params, request_id, options)
        if params.num_logprobs is not None and params.detokenize:  # not those of a beam search
            deltas = of_the_text(deltas, params, self._engine.renderer.tokenizer)
        try:
            async with aclosing(deltas):
                if merge:
                    if (whole := await merged(deltas, params)) is None:
                        raise EngineGenerateError("the engine ended a request without an output")
                    yield whole
                    return
                async for output in deltas:
                    yield output
        except (EngineDeadError, EngineGenerateError) as error:
            if isinstance(error.__cause__, OverflowError):
                raise ValueError(_TOO_WIDE) from None
            attempt.stop(Cause.ENGINE_FAILED)
            raise
        except CannotContinue as error:
            attempt.stop(error)
            raise

    async def _deltas(
        self,
        attempt: Attempt,
        generation: int,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """First the outputs in the journal, then the engine's new ones."""
        why = unsupported_reason(prompt, params)
        if attempt.recorded.outputs and not attempt.recorded.seen:
            if why or needs_regeneration(params):
                attempt.restart()
        elif attempt.recorded.outputs and why:
            why = f"{why} cannot be carried over to another engine"
            attempt.fail_continuation(NotResumed.UNSUPPORTED_PARAMETER, why)
        continuation = None
        if attempt.recorded.outputs:
            prompt = attempt.recorded.prompt(generation, prompt)
            continuation = Continuation(self._engine, prompt, params, request_id)
            replayed = self._replayed(attempt, generation, continuation)
            async with aclosing(replayed):
                async for output in replayed:
                    yield output
            if continuation.finished:
                return
            await attempt.wait_for_replay(len(attempt.recorded.outputs))
            attempt.regenerate(continuation.to_regenerate, self._rerun_tokens)
        if first := continuation is None or not continuation.begun:
            new = self._engine.generate(prompt, params, request_id, **options)
        else:
            assert continuation is not None
            new = continuation.continued(options, attempt.count_recompute)
        async with aclosing(new):
            async for output in new:
                if output.finished:
                    _check_followed(output, params)
                async with attempt.one_at_a_time:
                    if first:
                        prompt_tokens = len(output.prompt_token_ids or ())
                        attempt.read(prompt_tokens, output.num_cached_tokens or 0)
                    _record(output, attempt, generation, first, first and self._prompts_vary)
                    yield output
                first = False
                if not output.finished:
                    attempt.flush_previous()

    async def _replayed(
        self, attempt: Attempt, generation: int, continuation: Continuation
    ) -> AsyncGenerator[RequestOutput, None]:
        """A generation's recorded outputs, each when those before it have been consumed."""
        for number, recorded in enumerate(attempt.recorded.outputs):
            if recorded.generation != generation:
                continue
            if not (number + 1) % _AT_ONCE:
                await asyncio.sleep(0)
            await attempt.wait_for_replay(number)
            output = continuation.replay(recorded)
            try:
                yield output
            finally:
                attempt.mark_replayed()
            if not output.finished:
                attempt.flush_previous()


def _check_room(params: SamplingParams, tokenizer: Any) -> None:
    """The second model runner has room for so much of a request; with more its engine ends."""
    if params.min_tokens and len(params.stop_token_ids or ()) > _MOST_STOPS:
        raise VLLMValidationError(
            f"Beside 'min_tokens', at most {_MOST_STOPS} 'stop_token_ids' are allowed.",
            parameter="stop_token_ids",
        )
    if params.bad_words:
        params.update_from_tokenizer(tokenizer)
        tokens = sum(map(len, params.bad_words_token_ids or ()))
        if tokens > (most := envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS):
            raise VLLMValidationError(
                f"The 'bad_words' are {tokens} tokens, with and without a blank before them; at "
                f"most {most} are allowed.",
                parameter="bad_words",
            )


def _check_followed(output: RequestOutput, params: SamplingParams) -> None:
    """The engine ends a request as if by a defect when it cannot compile its grammar, when no token
    may follow in it, as in a grammar that never ends (`root ::= "a" root`), and when its grammar
    holds up the others (`workers/engine_plugin.py`).
    """
    errors = (item for item in output.outputs if item.finish_reason == "error")
    if params.structured_outputs is not None and any(errors):
        raise VLLMValidationError(
            "The schema, grammar or regex cannot be compiled, takes the engine too long, or "
            "nothing can follow in it; please make it smaller or simpler."
        )


def _salted(prompt: Any, tenant: str) -> Any:
    """A prompt whose cached prefix no other tenant can hit. Otherwise the time to the first token
    would reveal what others have asked.

    The salt is a digest of the tenant and the caller's own `cache_salt`, so no salt of one tenant
    equals another's. If no API key is required, all requests belong to one tenant, and requests
    without a salt share their prefixes.
    """
    own = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if not isinstance(prompt, dict) or (tenant == DEFAULT_TENANT and not own):
        return prompt
    digest = hashlib.blake2b(digest_size=32)
    for part in (tenant, own or ""):
        digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    return {**prompt, "cache_salt": digest.hexdigest()}


def _record(
    output: RequestOutput, attempt: Attempt, generation: int, first: bool, with_prompt: bool
) -> None:
    """Record an output, the generation's first or a later one, with or without its prompt."""
    for item in output.outputs:
        cache_writes = (output.num_cache_creation_tokens or 0) if first else 0
        beside = item.index if generation else 0
        prompt_ids = output.prompt_token_ids if with_prompt else None
        prompt_logprobs = output.prompt_logprobs if item is output.outputs[0] else None
        more: Sequence[Any] = (cache_writes,) if cache_writes else ()
        if beside or item.logprobs or prompt_logprobs or prompt_ids:  # few outputs have these
            logprobs = _plain(item.logprobs), _plain(prompt_logprobs)
            more = (cache_writes, beside, *logprobs, prompt_ids)
        attempt.record(
            item.index if generation == 0 else -generation,
            item.text,
            item.token_ids,
            item.finish_reason,
            item.stop_reason,
            output.num_cached_tokens if first else None,
            more,
        )


def _plain(logprobs: Any) -> list[TokenLogprobs | None] | None:
    return logprobs and [
        position
        and [
            (token_id, one.logprob, one.rank, one.decoded_token)
            for token_id, one in position.items()
        ]
        for position in logprobs
    ]


class PausingCollector(RequestOutputCollector):  # type: ignore[misc]
    """Between vLLM's engine and its server app: the outputs of the request that the running task
    serves which nobody has taken yet. vLLM merges them when its server is late. In a pause of the
    journal's writer they wait and are merged, too: before the server makes an event of each.
    """

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
    """Have the engine make collectors of this kind."""
    if not hasattr(async_llm, RequestOutputCollector.__name__):
        raise RuntimeError("vLLM's engine takes its collectors from elsewhere")
    async_llm.RequestOutputCollector = PausingCollector
