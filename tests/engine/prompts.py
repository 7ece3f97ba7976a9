"""Prompts that the tiny model can answer."""

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key in keys},
                "required": list(keys),
            },
        },
    }
    for name, about, kind, keys in (
        ("get_weather", "Get the weather of a city", "string", ("city",)),
        ("search", "Search the web", "string", ("query",)),
        ("add", "Add two numbers", "number", ("a", "b")),
    )
]
