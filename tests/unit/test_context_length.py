"""What is longer than any engine's context is refused before it waits, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.validation.context import check_context

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "request_", "param"),
    [
        (CHAT, {"max_tokens": 101}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 101, "max_tokens": 5}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "a text", "max_tokens": 101}, "max_tokens"),
        (RESPONSES, {"max_output_tokens": 101}, "max_output_tokens"),
        (COMPLETIONS, {"prompt": [7] * 101}, "prompt"),
        (COMPLETIONS, {"prompt": [[7], [7] * 101]}, "prompt"),
    ],
)
def test_what_no_engine_can_answer_is_refused(
    path: str, request_: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        check_context(path, request_, 100)
    assert refused.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert refused.value.status == 400
    assert refused.value.param == param
    assert b'"code":"context_length_exceeded"' in refused.value.body()
    assert "101" in refused.value.message
    check_context(path, request_, 101)
    check_context(path, request_, 0)


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 101}),
        (COMPLETIONS, {"prompt": "many words " * 1000, "max_tokens": 100}),
        (COMPLETIONS, {"prompt": [7] * 60, "max_tokens": 60}),
        (COMPLETIONS, {"prompt": [7] * 500, "truncate_prompt_tokens": 50}),
        (COMPLETIONS, {"prompt": ["a", "b"] * 100}),
        ("/v1/embeddings", {"input": [7] * 500, "max_tokens": 500}),
    ],
)
def test_what_vllm_answers_is_not(path: str, request_: dict[str, Any]) -> None:
    check_context(path, request_, 100)
