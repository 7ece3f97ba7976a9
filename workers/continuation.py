"""Continues a generation from the outputs in the journal, and checks at the start that the engine
can.

The engine goes on behind the recorded tokens (`engine_plugin`), or generates all of them again
where it cannot (`needs_regeneration`), with `detokenize=False`. This module produces text, stop
strings and the finish reason with vLLM's own incremental detokenizer, which is fed every token from
the first one, so the result equals that of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import copy
from types import SimpleNamespace
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.utils.async_utils import merge_async_iterators
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

from serve_app.contract import NotResumed
from serve_app.errors import SettingsError
from workers.engine_plugin import PRIOR
from workers.replay import CannotContinue, Output, TokenLogprobs


def needs_regeneration(params: SamplingParams) -> bool:
    """Whether a generation repeats itself, but has a state that its tokens do not tell: the random
    numbers that were drawn, or the tokens of a thought that were counted.
    """
    return (
        params.sampling_type is SamplingType.RANDOM_SEED or params.thinking_token_budget is not None
    )


def unsupported_reason(prompt: Any, params: SamplingParams) -> str:
    """Which part of a request makes it impossible to continue its generation; empty if none."""
    if not (isinstance(prompt, dict) and prompt.get("type") in ("token", "multimodal")):
        return "a prompt that is not text"
    sampled = params.sampling_type is SamplingType.RANDOM
    if params.thinking_token_budget is not None and sampled:
        return "thinking_token_budget without a seed"
    if params.prompt_logprob_token_ids is not None:
        return "prompt_logprob_token_ids"
    return ""


class Continuation:
    """One call to the engine's `generate`, from its recorded outputs on, with the parameters of the
    whole generation.
    """

    def __init__(
        self, engine: EngineClient, prompt: Any, params: SamplingParams, request_id: str
    ) -> None:
        self._prompt = prompt
        self._prompt_ids: list[int] = list(prompt["prompt_token_ids"])
        self._request_id = request_id
        self._cached_tokens: int | None = None
        self._cache_writes = 0
        self._sequences = [
            _Sequence(engine, index, self._prompt_ids, params, request_id)
            for index in range(params.n)
        ]

    @property
    def begun(self) -> bool:
        return any(sequence.token_ids for sequence in self._sequences)

    @property
    def to_regenerate(self) -> int:
        """How many tokens the engine generates a second time."""
        return sum(one.to_regenerate for one in self._sequences if not one.finished)

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self._sequences)

    def replay(self, recorded: Output) -> RequestOutput:
        """A recorded output as the engine gave it, after checking that the detokenizer produces the
        same text: this is the tokenizer of the recorded attempt.
        """
        if recorded.cached_tokens is not None:
            self._cached_tokens = recorded.cached_tokens
            self._cache_writes = recorded.cache_writes
        if recorded.sequence >= len(self._sequences):
            why = "the journal has more sequences than the request"
            raise CannotContinue(NotResumed.OUTPUT_MISMATCH, why)
        return self._output(self._sequences[recorded.sequence].replay(recorded), recorded)

    async def continued(
        self, options: dict[str, Any], again: Callable[[int], None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's new outputs: at most the tokens that remain. `again` is told numbers of
        tokens that the engine has computed again.
        """
        open_ones = [sequence for sequence in self._sequences if not sequence.finished]
        new = merge_async_iterators(
            *(sequence.continued(dict(self._prompt), options, again) for sequence in open_ones)
        )
        async with aclosing(new):
            async for _, item in new:
                yield self._output(item)

    def _output(self, item: CompletionOutput, recorded: Output | None = None) -> RequestOutput:
        prompt_logprobs = recorded.prompt_logprobs if recorded else None
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt.get("prompt"),
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=prompt_logprobs and _as_vllm_has_them(prompt_logprobs),
            outputs=[item],
            finished=self.finished,
            num_cached_tokens=self._cached_tokens,
            num_cache_creation_tokens=self._cache_writes,
        )


class _Sequence:
    """One of the `n` answers."""

    def __init__(
        self,
        engine: EngineClient,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
    ) -> None:
        self._engine = engine
        self._index = index
        self._params = _of_child(params, index)
        self._request_id = f"{index}_{request_id}" if params.n > 1 else request_id
        self._limit = engine.model_config.max_model_len - len(prompt_ids)
        if params.max_tokens is not None:
            self._limit = min(self._limit, params.max_tokens)
        self.token_ids: list[int] = []
        self._tokenizer = engine.renderer.tokenizer if params.detokenize else None
        request: Any = SimpleNamespace(request_id=request_id, sampling_params=params)
        request.prompt_token_ids, request.prompt_embeds = prompt_ids, None
        self._detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        self.finished = False

    @property
    def to_regenerate(self) -> int:
        return len(self.token_ids) if needs_regeneration(self._params) else 0

    def replay(self, recorded: Output) -> CompletionOutput:
        self.token_ids += recorded.token_ids
        # After a stop *token* the detokenizer omits its text; a stop *string* it finds by
        # itself, as it did then.
        stop_token = recorded.finish_reason == "stop" and not isinstance(recorded.stop_reason, str)
        self._detokenizer.update(list(recorded.token_ids), stop_token)
        self.finished = recorded.finish_reason is not None
        text = self._detokenizer.get_next_output_text(self.finished, delta=True)
        if text != recorded.text:
            why = "the recorded tokens give a different text on this engine"
            raise CannotContinue(NotResumed.OUTPUT_MISMATCH, why)
        logprobs = recorded.logprobs and _as_vllm_has_them(recorded.logprobs)
        item = CompletionOutput(self._index, text, recorded.token_ids, None, logprobs)
        item.finish_reason, item.stop_reason = recorded.finish_reason, recorded.stop_reason
        return item

    async def continued(
        self, prompt: Any, options: dict[str, Any], again: Callable[[int], None]
    ) -> AsyncGenerator[CompletionOutput, None]:
        """The engine's outputs behind the recorded ones."""
        if len(self.token_ids) >= self._limit:  # the engine would generate one more
            self.finished = True
            text = self._detokenizer.get_next_output_text(True, delta=True)
            yield CompletionOutput(self._index, text, [], None, None, finish_reason="length")
            return
        to_regenerate, repeated = self.to_regenerate, 0
        had = len(prompt["prompt_token_ids"]) + len(self.token_ids)
        deltas = self._engine.generate(prompt, self._of_the_rest(), self._request_id, **options)
        async with aclosing(deltas):
            async for delta in deltas:
                if had:
                    again(had - (delta.num_cached_tokens or 0))
                    had = 0
                item = delta.outputs[0]
                if repeated < to_regenerate:
                    repeated += self._without_what_is_known(item, repeated, to_regenerate)
                    if not item.token_ids and item.finish_reason is None:
                        continue
                yield (item := self._detokenized(item))
                if item.finish_reason is not None:
                    return

    def _without_what_is_known(self, item: CompletionOutput, repeated: int, known: int) -> int:
        """Take the tokens that the journal has out of an output; returns how many."""
        again = list(item.token_ids[: known - repeated])
        if again != self.token_ids[repeated : repeated + len(again)] or (
            item.finish_reason is not None and len(item.token_ids) == len(again)
        ):
            why = "the engine has generated other tokens than the first time"
            raise CannotContinue(NotResumed.OUTPUT_MISMATCH, why)
        item.token_ids = item.token_ids[len(again) :]
        item.logprobs = item.logprobs and item.logprobs[len(again) :]
        return len(again)

    def _of_the_rest(self) -> SamplingParams:
        params = copy(self._params)
        if not needs_regeneration(params):
            params.extra_args = {**(params.extra_args or {}), PRIOR: list(self.token_ids)}
        params.detokenize = False
        params.stop = []
        params.output_text_buffer_length = 0
        params.output_kind = RequestOutputKind.DELTA
        params.prompt_logprobs = None
        # Parameters that the engine core cannot handle kill it, and all other requests with it.
        params._verify_args()
        return params

    def _detokenized(self, item: CompletionOutput) -> CompletionOutput:
        """Detokenize as vLLM's output processor does, in the same order."""
        token_ids = list(item.token_ids)
        before = self._detokenizer.num_output_tokens()
        stop_string = self._detokenizer.update(token_ids, item.finish_reason == "stop")
        if stop_string:
            item.finish_reason, item.stop_reason = "stop", stop_string
            del token_ids[self._detokenizer.num_output_tokens() - before :]
        self.finished = item.finish_reason is not None
        item.index = self._index
        item.token_ids = token_ids
        item.text = self._detokenizer.get_next_output_text(self.finished, delta=True)
        item.logprobs = item.logprobs and self._decoded(item.logprobs[: len(token_ids)])
        self.token_ids += token_ids
        return item

    def _decoded(self, logprobs: Any) -> Any:
        """Log probabilities with the text of their tokens, which depends on the tokens before."""
        if self._tokenizer is None:
            return logprobs
        vllms = LogprobsProcessor(self._tokenizer, None, None, None, None, None)
        context = self.token_ids[-4:]
        for position in logprobs:
            ids = list(position)
            texts = vllms._verify_tokens(
                convert_ids_list_to_tokens(self._tokenizer, ids), ids, context
            )
            for one, text in zip(position.values(), texts, strict=True):
                one.decoded_token = text
            context = [*context[-3:], ids[0]]
        return logprobs


def _of_child(params: SamplingParams, index: int) -> SamplingParams:
    """What vLLM makes of the parameters for one of `n` sequences (`parallel_sampling`)."""
    child = copy(params)
    child.n = 1
    if params.n > 1 and params.seed is not None:
        child.seed = params.seed + index
    return child


def _as_vllm_has_them(recorded: Sequence[TokenLogprobs | None]) -> Any:
    """Recorded log probabilities, one dictionary for each token."""
    return [
        position
        and {
            token_id: Logprob(float("-inf") if logprob is None else logprob, rank, text)
            for token_id, logprob, rank, text in position
        }
        for position in recorded
    ]


# -- at the engine's start ------------------------------------------------------------------------

_SEQUENCES = (1, 2)
"""The kernel is compiled for one sequence, and again for any other number of them."""
_PRIOR_TOKENS = 40
_FIX = (
    "vLLM has not loaded the plug-in `hermes_serve` in every process of the engine: install "
    "hermes-serve again (pip install), and name it in VLLM_PLUGINS if that is set"
)


async def warm_up(engine: EngineClient, logprobs: bool) -> None:
    """Generate one token with `logprobs`, for each shape that is compiled; then resume a request.

    The first request for `logprobs` makes every process of the engine compile a kernel: 2 s with
    vLLM's cache of compiled code, 18 s without it, and meanwhile no request makes a step. That is
    longer than `workers.engine_stall_timeout_s`, so the engine would count as sick and be replaced.

    Raises:
        SettingsError: the engine cannot resume.
    """
    if logprobs:
        for sequences in _SEQUENCES:
            params = SamplingParams(n=sequences, max_tokens=1, logprobs=1)
            await _generated(engine, f"warm-up-{sequences}", params)
    await _check_that_it_resumes(engine)


async def _check_that_it_resumes(engine: EngineClient) -> None:
    """The scheduler must count the prior tokens, the sampler must penalise them, and a grammar must
    have accepted them.
    """
    # Whichever of two tokens a model prefers, a penalty of 80 outweighs it. No `logit_bias`: vLLM
    # refuses it with speculative decoding.
    for there, other in ((10, 11), (11, 10)):
        params = SamplingParams(
            temperature=0,
            max_tokens=_PRIOR_TOKENS + 1,
            ignore_eos=True,
            allowed_token_ids=[there, other],
            frequency_penalty=2.0,
            detokenize=False,
            extra_args={PRIOR: [there] * _PRIOR_TOKENS},
        )
        if await _generated(engine, f"check-penalties-{there}", params) != [other]:
            raise SettingsError(_FIX)
    tokenizer = engine.renderer.tokenizer
    if tokenizer is None:
        return
    words = "one two three"
    params = SamplingParams(
        temperature=0,
        max_tokens=32,
        structured_outputs=StructuredOutputsParams(choice=[words]),
        extra_args={PRIOR: tokenizer.encode(words, add_special_tokens=False)},
    )
    if len(await _generated(engine, "check-grammar", params, reasoning_ended=True)) > 1:
        raise SettingsError(_FIX)


async def _generated(
    engine: EngineClient, name: str, params: SamplingParams, **options: Any
) -> list[int]:
    params.output_kind = RequestOutputKind.FINAL_ONLY
    outputs: Any = engine.generate({"prompt_token_ids": [0]}, params, name, **options)
    return [token_id async for output in outputs for token_id in output.outputs[0].token_ids]
