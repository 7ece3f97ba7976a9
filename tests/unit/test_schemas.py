"""Schemas that are small to send and large to check: each is decided in steps that its size bounds.
A check that takes the square or more of these would not end within a test's time.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.tables import each
from workers.schemas import NotObeyed, prepared


def doubled(levels: int) -> dict[str, Any]:
    """References of which every one leads to two others: 2 ** levels ways through."""
    names = [f"a{level}" for level in range(levels)]
    twice = {name: {"anyOf": [{"$ref": f"#/$defs/{name}b"}] * 2} for name in names}
    once = {f"{name}b": {"$ref": f"#/$defs/a{level + 1}"} for level, name in enumerate(names)}
    ends = {f"a{levels}": {"type": "string"}}
    return {"$defs": {**twice, **once, **ends}, "$ref": "#/$defs/a0"}


def chained(references: int) -> dict[str, Any]:
    links = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(references)}
    return {"$defs": {**links, f"a{references}": {"type": "null"}}, "$ref": "#/$defs/a0"}


def variants(number: int) -> list[dict[str, Any]]:
    return [
        {"type": "object", "properties": {"kind": {"const": n}}, "required": ["kind"]}
        for n in range(number)
    ]


TAKEN = {
    "ways through references": doubled(30),
    "alternatives": {"oneOf": variants(64)},
    "classes that nothing closes": {"type": "string", "pattern": "[^" * 100_000},
}
REFUSED = {
    "chain": chained(200),
    "circle": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "alternatives": {"oneOf": variants(2_000)},
    "constants": {"oneOf": [{"enum": list(range(n, n + 20_000))} for n in (0, 20_000)]},
    "alternatives in many places": {
        "$defs": {"a": {"enum": list(range(999))}, "b": {"enum": list(range(-999, 0))}},
        "anyOf": [{"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}] * 2_000,
    },
}


@each("name", list(TAKEN))
def test_what_is_told_apart_in_few_steps_is_taken(name: str) -> None:
    assert prepared(TAKEN[name]) == TAKEN[name]


@each("name", list(REFUSED))
def test_what_would_take_many_is_refused(name: str) -> None:
    with pytest.raises(NotObeyed, match=r"in the JSON schema \(at #"):
        prepared(REFUSED[name])
