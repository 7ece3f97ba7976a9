"""Runs what vLLM compiles at its first use, before the engine serves.

The first request for `logprobs` makes every process of the engine compile a kernel: 2 s with
vLLM's cache of compiled code, 18 s without it, and meanwhile no request makes a step. That is
longer than `workers.stall_s`, so the engine would count as sick and be replaced.
"""

from __future__ import annotations

from vllm.engine.protocol import EngineClient
from vllm.sampling_params import SamplingParams

_SEQUENCES = (1, 2)
"""The kernel is compiled for one sequence, and again for any other number of them."""


async def warm_up(engine: EngineClient) -> None:
    """Generate one token with `logprobs`, for each shape that is compiled."""
    for sequences in _SEQUENCES:
        params = SamplingParams(n=sequences, max_tokens=1, logprobs=1)
        async for _ in engine.generate({"prompt_token_ids": [0]}, params, f"warm-up-{sequences}"):
            pass
