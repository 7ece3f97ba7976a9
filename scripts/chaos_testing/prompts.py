"""What the clients ask. Each prompt has one text, so a mix-up shows."""

from __future__ import annotations

from typing import Any

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "bread"]}, "maxItems": 4},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
_SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string", "maxLength": 60}},
    "required": ["query"],
}
_FORCED = {"type": "function", "function": {"name": "search"}}

MIXES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"plain": {"ignore_eos": True}},
    "real": {
        "plain": {"ignore_eos": True},
        "schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": _PERSON},
            }
        },
        "tool": {
            "tools": [{"type": "function", "function": {"name": "search", "parameters": _SEARCH}}],
            "tool_choice": _FORCED,
        },
        "logprobs": {"logprobs": True, "top_logprobs": 2, "ignore_eos": True},
        "penalties": {
            "frequency_penalty": 0.3,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
        },
        "n": {"n": 2, "seed": 11, "temperature": 1.0, "ignore_eos": True},
        "seed": {"seed": 7, "temperature": 1.0, "ignore_eos": True},
    },
}
"""By mix and kind: what a request has beside its prompt, so that its text is determined."""

PROMPTS = [
    "Tell me a story about a lighthouse.",
    "Count to ten.",
    "Explain fencing to a child.",
    "Write a poem about the sea.",
    "Say hello in three languages.",
    "Why is the sky blue?",
    "How do I bake bread?",
    "Describe your week.",
]
