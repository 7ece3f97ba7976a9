"""Continues a generation from the outputs in the journal.

The engine continues with `detokenize=False` on prompt + tokens. This module produces text, stop
strings and the finish reason with vLLM's own incremental detokenizer. The detokenizer is built on
the *original* prompt and fed every token from the first one, so the result equals that of an
uninterrupted run. (Letting the engine detokenize after a longer prompt gives wrong text.)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, SamplingType
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from workers.replay import CannotContinue, Output, Recorded


def obstacle(prompt: Any, params: SamplingParams, recorded: Recorded, generation: int) -> str:
    """Why a generation cannot be continued exactly; empty if it can."""
    if generation or any(output.index for output in recorded.outputs):
        return "it has several generations"
    if not (isinstance(prompt, dict) and prompt.get("type") in ("token", "multimodal")):
        return "its prompt is not tokens"
    found = {
        "n": params.n != 1,
        "seed": params.seed is not None and params.sampling_type is not SamplingType.GREEDY,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "bad_words": bool(params.bad_words),
        "logprobs": params.logprobs is not None or params.prompt_logprobs is not None,
        "structured output": params.structured_outputs is not None,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "repetition_detection": params.repetition_detection is not None,
        "extra_args": bool(params.extra_args),
        "detokenize": not params.detokenize,
    }
    return next(
        (f"its {name} cannot be carried over" for name, there in found.items() if there), ""
    )


class Continuation:
    """One generation, from its recorded outputs on.

    Args:
        tokenizer: the model's, as the engine uses it.
        max_model_len: in tokens; applies if the request sets no limit.
        params: of the whole generation, as the serving layer created them.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_model_len: int,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
    ) -> None:
        self._prompt = prompt
        self._prompt_ids: list[int] = list(prompt["prompt_token_ids"])
        self._params = params
        self._request_id = request_id
        self._limit = max_model_len - len(self._prompt_ids)
        if params.max_tokens is not None:
            self._limit = min(self._limit, params.max_tokens)
        self._token_ids: list[int] = []
        self._cached_tokens: int | None = None
        request: Any = SimpleNamespace(
            request_id=request_id,
            sampling_params=params,
            prompt_token_ids=self._prompt_ids,
            prompt_embeds=None,
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self.finished = False

    def replay(self, recorded: Output) -> RequestOutput:
        """A recorded output as the engine gave it, after checking that the detokenizer produces the
        same text.

        Raises:
            CannotContinue: the text differs, so this is not the tokenizer of the recorded attempt.
        """
        self._token_ids += recorded.token_ids
        if recorded.cached_tokens is not None:
            self._cached_tokens = recorded.cached_tokens
        # After a stop *token* the detokenizer omits its text; a stop *string* it finds by
        # itself, as it did then.
        stop_token = recorded.finish_reason == "stop" and not isinstance(recorded.stop_reason, str)
        self._detokenizer.update(list(recorded.token_ids), stop_token)
        text = self._detokenizer.get_next_output_text(
            recorded.finish_reason is not None, delta=True
        )
        if text != recorded.text:
            raise CannotContinue("the recorded tokens give a different text here")
        self.finished = recorded.finish_reason is not None
        return self._output(text, recorded.token_ids, recorded.finish_reason, recorded.stop_reason)

    async def continued(
        self, engine: EngineClient, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's new outputs: at most the tokens that remain."""
        if (
            len(self._token_ids) >= self._limit
        ):  # never send this to the engine: max_tokens=0 would crash it
            yield self._output(
                self._detokenizer.get_next_output_text(True, delta=True), [], "length", None
            )
            return
        prompt = {**self._prompt, "prompt_token_ids": self._prompt_ids + self._token_ids}
        deltas = engine.generate(prompt, self._remaining(), self._request_id, **options)
        async with aclosing(deltas):
            async for delta in deltas:
                output = self._detokenized(delta.outputs[0])
                yield output
                if output.finished:
                    return

    def _remaining(self) -> SamplingParams:
        params = self._params.clone()
        done = len(self._token_ids)
        params.max_tokens = self._limit - done
        params.min_tokens = max(0, params.min_tokens - done)
        params.detokenize = False
        params.stop = []
        params.output_text_buffer_length = 0
        params.output_kind = RequestOutputKind.DELTA
        # Parameters that the engine core cannot handle kill it, and all other requests with it.
        params._verify_args()
        return params

    def _detokenized(self, item: CompletionOutput) -> RequestOutput:
        """Detokenize as vLLM's output processor does, in the same order."""
        token_ids, finish_reason, stop_reason = (
            list(item.token_ids),
            item.finish_reason,
            item.stop_reason,
        )
        before = self._detokenizer.num_output_tokens()
        stop_string = self._detokenizer.update(token_ids, finish_reason == "stop")
        if stop_string:
            finish_reason, stop_reason = "stop", stop_string
            del token_ids[self._detokenizer.num_output_tokens() - before :]
        text = self._detokenizer.get_next_output_text(finish_reason is not None, delta=True)
        return self._output(text, token_ids, finish_reason, stop_reason)

    def _output(
        self,
        text: str,
        token_ids: list[int],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> RequestOutput:
        item = CompletionOutput(
            index=0,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt.get("prompt"),
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=None,
            outputs=[item],
            finished=finish_reason is not None,
            num_cached_tokens=self._cached_tokens,
        )
