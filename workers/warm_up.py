"""What has to be done with an engine before it serves: compile, and check that it can resume.

The first request for `logprobs` makes every process of the engine compile a kernel: 2 s with
vLLM's cache of compiled code, 18 s without it, and meanwhile no request makes a step. That is
longer than `workers.engine_stall_timeout_s`, so the engine would count as sick and be replaced.
"""

from __future__ import annotations

from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from serve_app.errors import SettingsError
from workers.engine_plugin import PRIOR

_SEQUENCES = (1, 2)
"""The kernel is compiled for one sequence, and again for any other number of them."""
_PRIOR_TOKENS = 40
_FIX = (
    "vLLM has not loaded the plug-in `hermes_serve` in every process of the engine: install "
    "hermes-serve again (pip install), and name it in VLLM_PLUGINS if that is set"
)


async def warm_up(engine: EngineClient, logprobs: bool) -> None:
    """Generate one token with `logprobs`, for each shape that is compiled; then resume a request.

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
