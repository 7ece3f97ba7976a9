"""A response as OpenAI's object, which repeats what its client has asked, in every state."""

from __future__ import annotations

from typing import Any

import msgspec

from serve_app.contract import State
from serve_app.ingress.conversations import PREFIX, Fields, fields_of
from serve_app.journal.facts import RequestFacts

_ECHOED: Fields = {
    "instructions": msgspec.Raw(b"null"),
    "max_output_tokens": msgspec.Raw(b"null"),
    "max_tool_calls": msgspec.Raw(b"null"),
    "metadata": msgspec.Raw(b"{}"),
    "parallel_tool_calls": msgspec.Raw(b"true"),
    "previous_response_id": msgspec.Raw(b"null"),
    "prompt": msgspec.Raw(b"null"),
    "prompt_cache_key": msgspec.Raw(b"null"),
    "reasoning": msgspec.Raw(b"null"),
    "safety_identifier": msgspec.Raw(b"null"),
    "service_tier": msgspec.Raw(b'"auto"'),
    "text": msgspec.Raw(b'{"format":{"type":"text"}}'),
    "tool_choice": msgspec.Raw(b'"auto"'),
    "tools": msgspec.Raw(b"[]"),
    "top_logprobs": msgspec.Raw(b"0"),
    "truncation": msgspec.Raw(b'"disabled"'),
    "user": msgspec.Raw(b"null"),
}
"""What a response repeats of its request, and OpenAI's defaults."""
_CHOSEN_BY_ENGINE: Fields = {
    "frequency_penalty": msgspec.Raw(b"0.0"),
    "presence_penalty": msgspec.Raw(b"0.0"),
    "temperature": msgspec.Raw(b"1.0"),
    "top_p": msgspec.Raw(b"1.0"),
}
"""The same of fields for which a model may have defaults of its own: its answer says them."""
_NULL = b"null"


def unfinished(
    request_id: str,
    facts: RequestFacts,
    asked: bytes | None,
    state: State,
    error: dict[str, Any] | None = None,
) -> bytes:
    """A response without an answer.

    Args:
        asked: the body of its request; None if it is not known here.
        error: `code` and `message`, if it has failed.
    """
    status = state if state in (State.QUEUED, State.CANCELLED) else State.FAILED
    failed = error is not None and status is State.FAILED
    given = fields_of(asked) if asked is not None else {}
    made: dict[str, Any] = {
        **_echo(given, _ECHOED | _CHOSEN_BY_ENGINE),
        "id": f"{PREFIX}{request_id}",
        "object": "response",
        "created_at": facts.admitted_ms // 1000,
        "status": "in_progress" if state is State.RUNNING else status,
        "background": facts.detached,
        "store": facts.stored,
        "model": facts.model,
        "error": {"code": error["code"], "message": error["message"]} if failed and error else None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    return msgspec.json.encode(made)


def completed(facts: RequestFacts, asked: bytes | None, fields: Fields) -> bytes:
    """A response with its answer, in which nothing has changed that its client gave.

    Args:
        asked: the body of its request; None if it is not kept (any more).
        fields: as the engine's server has written them.
    """
    if asked is not None:
        chosen = {name: fields.get(name, default) for name, default in _CHOSEN_BY_ENGINE.items()}
        fields = fields | _echo(fields_of(asked), chosen | _ECHOED)
    return msgspec.json.encode({**fields, "background": facts.detached, "store": facts.stored})


def _echo(given: Fields, defaults: Fields) -> Fields:
    """What a response repeats of the fields that its client gave, as they were given."""
    return {
        name: default if bytes(given.get(name, _NULL)) == _NULL else given[name]
        for name, default in defaults.items()
    }
