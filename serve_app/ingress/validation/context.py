"""Requests that are longer than the model's context, before they wait for an engine. Pure.

The limit on the answer is known here, and the length of a prompt of token ids, alone and together.
A text is tokenised by the worker, which refuses in the same way (`workers/vllm_failures.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.errors import RequestRefused, context_exceeded

_LIMITS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
"""The fields that limit the answer; the first one that is set counts, as in vLLM."""


def check_context(path: str, request: Mapping[str, Any], most_tokens: int) -> None:
    """Refuse what no engine can answer.

    Args:
        request: the validated body.
        most_tokens: of a prompt and its answer, in the engine that takes the most; 0 if no engine
            says so.

    Raises:
        RequestRefused: `context_length_exceeded`; the message names the field and both numbers.
    """
    if not most_tokens:
        return
    answer = 1
    for name in _LIMITS.get(path, ()):
        limit = request.get(name)
        if isinstance(limit, int):
            answer = limit
            if limit > most_tokens:
                raise _refused(f"{name} is {limit}", most_tokens, name)
            break
    if path == "/v1/completions" and request.get("truncate_prompt_tokens") is None:
        for size in _sizes(request.get("prompt")):
            if size + max(answer, 1) > most_tokens:
                raise _refused(
                    f"the prompt has {size} tokens and the answer may have {answer}",
                    most_tokens,
                    "prompt",
                )


def _sizes(prompt: Any) -> Iterator[int]:
    """The lengths of prompts that are given as token ids."""
    if not isinstance(prompt, list) or not prompt:
        return
    if isinstance(prompt[0], int):
        yield len(prompt)
        return
    for one in prompt:
        if isinstance(one, list):
            yield len(one)


def _refused(what: str, most_tokens: int, param: str) -> RequestRefused:
    return context_exceeded(
        f"This model's maximum context length is {most_tokens} tokens, but {what}. Please reduce "
        "it.",
        param,
    )
