"""Fifty JSON schemas: an answer whose engine dies in the middle of the object is valid, and a
greedy one is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import jsonschema
import pytest

pytest.importorskip("vllm")

from tests.engine.resume_helpers import EngineThread, Written, attempts, request
from tests.engine.test_resume import CHAT, chat
from tests.tables import Failures

_TEXT = {"type": "string", "maxLength": 12}
_LEAVES: list[dict[str, Any]] = [
    _TEXT,
    {"type": "string", "enum": ["red", "green", "a longer one"]},
    {"type": "string", "pattern": "^[a-z]{3}-[0-9]{4}$"},
    {"type": "integer", "minimum": -50, "maximum": 50},
    {"type": "boolean"},
    {"type": "null"},
    {"const": "always é"},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"const": "none"}]},
    {"type": ["boolean", "null"]},
]


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _schemas() -> Iterator[dict[str, Any]]:
    """Leaves in objects, in arrays, nested, and by reference."""
    array = {"type": "array", "minItems": 1, "maxItems": 2}
    for leaf in _LEAVES:
        yield _object(name=_TEXT, value=leaf)
        yield {**array, "minItems": 2, "items": _object(value=leaf)}
        yield _object(outer=_object(inner=leaf, other=_TEXT), last={"type": "boolean"})
        yield {
            **_object(first={"$ref": "#/$defs/one"}, second={"$ref": "#/$defs/one"}),
            "$defs": {"one": _object(value=leaf)},
        }
    for one, other in product(_LEAVES, _LEAVES):
        yield _object(list={**array, "items": one}, pair=_object(a=one, b=other), end=_TEXT)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_schema_is_obeyed_across_the_death_of_its_engine(
    world: EngineThread, temperature: float
) -> None:
    schemas = list(islice(_schemas(), 50))
    whole = world.run(attempts(world, [[request(CHAT, _asks(s, temperature))] for s in schemas]))
    left = [one.entries[: 2 + (len(one.entries) - 2) // 2] for one in whole]
    resumed = world.run(attempts(world, left))
    with Failures() as failures:
        for schema, before, journal, after in zip(schemas, whole, left, resumed, strict=True):
            with failures.of(schema):
                assert not after.attempt.lost
                # One that is sampled may end later than the first time.
                fewer = after.generated_tokens < before.generated_tokens
                assert temperature or fewer, "a re-run, not a resume"
                assert after.body.startswith(b"".join(entry.body for entry in journal[1:]))
                jsonschema.validate(json.loads(_text(after)), schema)
                assert temperature or _text(after) == _text(before)


def _asks(schema: dict[str, Any], temperature: float) -> dict[str, Any]:
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    body = chat("Answer with JSON.", response_format=shape, max_tokens=400)
    # JSON allows white space without end between its parts, and the tiny model likes it.
    return {**body, "temperature": temperature, "logit_bias": {"9": -99, "10": -99, "32": -99}}


def _text(written: Written) -> str:
    found = ""
    for line in written.body.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found += choice["delta"].get("content") or ""
    return found
