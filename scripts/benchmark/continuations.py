"""Shows on a model and its accelerator that a generation goes on behind a cut as if unbroken.

Each kind of request is generated uncut, then continued from prompt and tokens behind several cuts,
by the plug-in and the parameters that a worker uses, and compared token by token. The prefix cache
is emptied before each run, as in an engine that has not seen the first attempt. One line of JSON
for each kind: `uncut` says how often the engine repeats itself in a batch of another size, which is
up to its kernels; `in_a_batch` and `alone` say how often the continuation is the same.

    VLLM_LOGGING_LEVEL=ERROR .venv/bin/python -m scripts.benchmark.continuations --model /my/model
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt, __version__
from vllm.sampling_params import StructuredOutputsParams

from serve_app.local.environment import ROOT
from workers.engine_plugin import PRIOR

_TEXTS = [
    f"{asked} {about}"
    for asked in ("Tell me a story about", "Explain to a child", "Write a letter about", "What is")
    for about in ("a lighthouse.", "the rain.", "an old clock.", "five animals.")
]
_ALONE = 3
"""Prompts that are also continued one at a time: the batch of the first attempt is gone then."""
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 10, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 6},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def kinds(tokens: int) -> dict[str, dict[str, Any]]:
    """Sampling parameters by the name of what they show; those with a seed are run again."""
    greedy = {"temperature": 0.0, "max_tokens": tokens}
    seeded = {**greedy, "temperature": 1.0, "seed": 7}
    counted = {"presence_penalty": 0.6, "frequency_penalty": 0.3, "bad_words": ["the", " and"]}
    schema = StructuredOutputsParams(json=_SCHEMA)
    return {
        "greedy": greedy,
        "repetition penalty": {**greedy, "repetition_penalty": 1.05},
        "presence and frequency penalty, bad words": {**greedy, **counted},
        "min_tokens, logit_bias": {**greedy, "min_tokens": tokens // 2, "logit_bias": {101: 0.5}},
        "JSON schema": {**greedy, "structured_outputs": schema},
        "seed, run again": seeded,
        "seed, top_p, top_k, run again": {**seeded, "top_p": 0.9, "top_k": 40},
    }


def generate(
    llm: LLM, prompts: Sequence[list[int]], of: dict[str, Any], priors: Sequence[list[int]]
) -> list[list[int]]:
    """The token ids behind each prompt's prior tokens, all generated at once."""
    llm.reset_prefix_cache()
    params = [
        SamplingParams(**of, extra_args={PRIOR: prior} if prior else None) for prior in priors
    ]
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [
        list(answer.outputs[0].token_ids) for answer in llm.generate(inputs, params, use_tqdm=False)
    ]


def compare(
    llm: LLM, prompts: list[list[int]], of: dict[str, Any], cuts_each: int
) -> dict[str, str]:
    """How many continuations are the same, as `same of all`."""
    again = "seed" in of
    whole = generate(llm, prompts, of, [[] for _ in prompts])
    same: dict[str, list[bool]] = {"uncut": [], "in_a_batch": [], "alone": []}
    for prompt, answer in zip(prompts[:_ALONE], whole, strict=False):
        same["uncut"] += [generate(llm, [prompt], of, [[]])[0] == answer]
    for turn in range(cuts_each):
        cuts = [
            1 + (7 * index + turn * len(answer) // cuts_each) % max(1, len(answer) - 1)
            for index, answer in enumerate(whole)
        ]
        begun = [answer[:-1][:cut] for answer, cut in zip(whole, cuts, strict=True)]
        priors = [[] for _ in begun] if again else begun
        together = generate(llm, prompts, of, priors)
        for index, answer in enumerate(whole):
            same["in_a_batch"] += [priors[index] + together[index] == answer]
        for index in range(_ALONE):
            rest = generate(llm, [prompts[index]], of, [priors[index]])[0]
            same["alone"] += [priors[index] + rest == whole[index]]
    return {name: f"{sum(found)} of {len(found)}" for name, found in same.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--model", default=str(ROOT / "workers" / "tiny_model"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--cuts", type=int, default=2, help="of each answer")
    parser.add_argument("--args", type=json.loads, default={}, help="of the engine, as JSON")
    given = parser.parse_args()
    engine = {"max_model_len": 1024, "gpu_memory_utilization": 0.5, **given.args}
    llm = LLM(given.model, dtype=given.dtype, disable_log_stats=True, **engine)
    config = llm.llm_engine.vllm_config
    about = {
        "vllm": __version__,
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "dtype": str(config.model_config.dtype),
    }
    print(json.dumps(about), flush=True)
    tokenizer = llm.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in _TEXTS
    ]
    for name, of in kinds(given.tokens).items():
        print(json.dumps({"request": name, **compare(llm, prompts, of, given.cuts)}), flush=True)


if __name__ == "__main__":
    main()
