"""Validates bodies: small ones at once, large ones in a thread, one at a time; and refuses what no
engine's context can hold.

Validating a large body takes many short steps, and the event loop runs between them. Two such
threads would compete with each other and with the loop for the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serve_app.errors import context_exceeded
from serve_app.ingress.validation.bodies import Parsed, parse
from serve_app.observability.metrics import Telemetry
from serve_app.policy.capacity import spare_slots
from serve_app.settings import Settings

_AT_ONCE_BYTES = 64 * 1024
_OF_THE_ANSWER = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
}
"""The fields that limit the answer; the first one that is set counts, as in vLLM."""


class Validator:
    """Validates the bodies of one ingress's requests."""

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._model = settings.model.name
        at_once = settings.workers.max_running_requests
        most = min(settings.limits.max_sequences, at_once - spare_slots(at_once))
        self._limits = settings.limits.model_copy(update={"max_sequences": most})
        self.most_tokens = 0
        """Of a prompt and its answer, in the engine that takes the most; 0 if none says so."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="validator")

    async def parse(self, path: str, body: bytes) -> Parsed:
        """See `bodies.parse` and `check_context`."""
        if len(body) <= _AT_ONCE_BYTES:
            parsed = parse(path, body, self._model, self._limits)
        else:
            loop = asyncio.get_running_loop()
            parsed = await loop.run_in_executor(
                self._thread, parse, path, body, self._model, self._limits
            )
        check_context(path, parsed.request, self.most_tokens)
        if parsed.ignored:
            self._telemetry.count("hermes_ignored_fields", by=len(parsed.ignored))
        return parsed

    def stop(self) -> None:
        """End the thread; waiting bodies are no longer validated."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def check_context(path: str, request: Mapping[str, Any], most_tokens: int) -> None:
    """Refuse what no engine can answer.

    Raises:
        RequestRefused: `context_length_exceeded`; the message names the field and both numbers.
    """
    if not most_tokens:
        return
    for param, what in _too_long(path, request, most_tokens):
        raise context_exceeded(
            f"This model's maximum context length is {most_tokens} tokens, but {what}. Please "
            "reduce it.",
            param,
        )


def _too_long(path: str, request: Mapping[str, Any], most_tokens: int) -> Iterator[tuple[str, str]]:
    set_ = [name for name in _OF_THE_ANSWER.get(path, ()) if isinstance(request.get(name), int)]
    answer: int = request[set_[0]] if set_ else 1
    if answer > most_tokens:
        yield set_[0], f"{set_[0]} is {answer}"
    prompt = request.get("prompt")
    if path != "/v1/completions" or request.get("truncate_prompt_tokens") is not None:
        return
    if not isinstance(prompt, list) or not prompt:
        return
    for ids in [prompt] if isinstance(prompt[0], int) else prompt:
        if isinstance(ids, list) and len(ids) + max(answer, 1) > most_tokens:
            yield "prompt", f"the prompt has {len(ids)} tokens and the answer may have {answer}"
