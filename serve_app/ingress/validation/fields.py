"""The table of fields: what the body of a request may have, path by path, and the one walker that
checks a value by it. Pure.

A row is the field's JSON Schema: vLLM's own (settings/vllm.json, written from its request models),
and over it what fields.toml says. `bodies.parse` checks a body by it and `/docs` shows it. A field
that a new vLLM brings is in no list until settings/vllm.json is written again and somebody has
judged it: it stays, or belongs to `HARMFUL_FIELDS`.

Clients send fields of their own, which change nothing (`client_metadata`): these are left out of
the body. A field that would have an effect elsewhere is refused instead, because the client would
believe that it counts here.
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from serve_app.errors import RequestRefused, invalid, invalid_value, missing, written
from serve_app.ingress.validation.structure import too_many
from serve_app.settings.limits import HARMFUL_FIELDS, RequestLimits
from serve_app.settings.vllm_names import VLLM

Schema = Mapping[str, Any]

_RULES = tomllib.loads(Path(__file__).with_name("fields.toml").read_text())
PATHS: Mapping[str, Mapping[str, Any]] = {
    path: {**_RULES["paths"][own.get("of", path)], **own} for path, own in _RULES["paths"].items()
}
INFERENCE_PATHS = tuple(PATHS)
_SETTABLE = ("maximum", "maxItems", "maxLength", "maxProperties", "maxRepeats")
"""The keywords whose bound may be a setting."""


def _shaped(node: Any) -> Any:
    """A row with the shapes that it is like."""
    if isinstance(node, list):
        return [_shaped(one) for one in node]
    if not isinstance(node, dict):
        return node
    own = {key: _shaped(value) for key, value in node.items() if key != "like"}
    return {**_shaped(_RULES["shapes"][node["like"]]), **own} if "like" in node else own


def _rules(path: str) -> Mapping[str, Schema]:
    rules: dict[str, Schema] = _shaped(PATHS[path].get("fields", {}))
    if PATHS[path].get("writes"):
        rules = {**_shaped(_RULES["writing"]), **rules}
    return {**_shaped(_RULES["everywhere"]), **rules}


def _row(vllm: Schema, rule: Schema | None) -> Schema:
    if rule is None:
        return vllm
    taken = ("description",) if "type" in rule else ("type", "items", "description")
    row = {key: vllm[key] for key in taken if key in vllm}
    if "type" not in rule:
        row["type"] = sorted({*_types(row), "null"})
    if "items" in row:
        row["items"] = {**row["items"], "type": _types(row["items"])}
    return {**row, **rule}


def _types(schema: Schema) -> list[str]:
    kind = schema["type"]
    return [kind] if isinstance(kind, str) else kind


def _table(path: str) -> Schema:
    vllm = VLLM["requests"].get(PATHS[path].get("of", path), {})
    meaning = PATHS[path].get("meaning", {})
    vllms = vllm.keys() & PATHS[path].get("only", vllm)
    names = {*vllms, *PATHS[path]["ours"], *VLLM["without_effect"].get(path, ()), *meaning}
    rules = _rules(path)
    rows = {
        name: _row(vllm.get(meaning.get(name, name), {}), rules.get(name))
        for name in sorted(names.difference(HARMFUL_FIELDS))
    }
    return {"type": ["object"], "required": PATHS[path].get("required", []), "properties": rows}


TABLE: Mapping[str, Schema] = {path: _table(path) for path in INFERENCE_PATHS}
METADATA: Schema = _shaped({"like": "metadata"})


def documented(path: str) -> dict[str, Any]:
    """The JSON Schema of a path's bodies; a bound that is a setting is told in words."""
    table = _in_words(TABLE[path])
    return {**table, "required": list(dict.fromkeys(["model", *table["required"]]))}


def _in_words(schema: Schema) -> dict[str, Any]:
    settings = [key for key in _SETTABLE if isinstance(schema.get(key), str)]
    shown = {k: v for k, v in schema.items() if k not in ("of", "refused", *settings)}
    for key in ("items", "additionalProperties"):
        if key in schema:
            shown[key] = _in_words(schema[key])
    if "properties" in schema:
        shown["properties"] = {name: _in_words(one) for name, one in schema["properties"].items()}
    if "oneOf" in schema:
        shown["oneOf"] = [_in_words(one) for one in schema["oneOf"]]
    said = [schema[key] for key in ("description", "refused") if key in schema]
    if settings:
        said.append(f"see {', '.join(f'`limits.{schema[key]}`' for key in settings)}")
    return {**shown, "description": "; ".join(said)} if said else shown


_ANYWHERE = frozenset(_RULES["former"]["fields"]).union(
    *(table["properties"] for table in TABLE.values())
)
_NAME_CHARS, _MOST_UNKNOWN = 200, 100
"""Of one request: each name that nobody here knows is compared with all that are known."""
_LEAST_CHARS, _MOST_CHARS = 3, 64
"""Of a name that may be a misspelt one: every letter is one letter away from `n`."""


def unknown_fields(path: str, request: Mapping[str, Any], limits: RequestLimits) -> Sequence[str]:
    """The fields that nobody here knows, and that are left out. Refuses what must not be left
    out.
    """
    known = TABLE[path]["properties"]
    found = [name for name in request if name not in known and name not in limits.allowed_fields]
    if len(found) > _MOST_UNKNOWN:
        raise too_many("fields that are not known here", _MOST_UNKNOWN)
    left_out = PATHS[path].get("left_out", ())
    doubtful = [one for one in found if request[one] is not None and one not in left_out]
    for name in (name[:_NAME_CHARS] for name in doubtful):
        if (why := _why_refused(path, name, limits)) is not None:
            raise invalid(why, name)
    return found


def _why_refused(path: str, name: str, limits: RequestLimits) -> str | None:
    """Why a field that is not known for this path must not be left out, if so."""
    if name in HARMFUL_FIELDS:
        return f"The field '{name}' is not allowed here; remove it."
    unknown = f"Unknown parameter: '{name}'."
    if name.startswith("guided_"):
        return f"{unknown} Use 'structured_outputs' instead."
    if meant := _misspelt(path, name):
        return f"{unknown} Did you mean '{meant}'?"
    return unknown if name in _ANYWHERE or limits.refuse_unknown_fields else None


def _misspelt(path: str, name: str) -> str | None:
    """The field of this path from which a name differs by one letter at most: another one, one more
    or less, or two that changed places. Capitals, underscores and hyphens do not count.
    """
    if not _LEAST_CHARS <= len(name) <= _MOST_CHARS:
        return None
    known: str
    for known in TABLE[path]["properties"]:
        if len(known) >= _LEAST_CHARS and _is_near(_letters(name), _letters(known)):
            return known
    return None


def _letters(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _is_near(one: str, other: str) -> bool:
    begin = 0
    while one[begin : begin + 1] == other[begin : begin + 1] != "":
        begin += 1
    rest, other_rest = one[begin:], other[begin:]
    return (
        rest[1:] == other_rest[1:]
        or rest[1:] == other_rest
        or rest == other_rest[1:]
        or (rest[:2] == other_rest[1::-1] and rest[2:] == other_rest[2:])
    )


def rewritten(
    path: str, body: bytes, left_out: Collection[str], changed: Mapping[str, Any]
) -> bytes:
    """The body without some of its fields, with other values of some, and with every field under
    the name that vLLM knows.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    meaning = PATHS[path].get("meaning", {})
    for name, meant in meaning.items():
        if (value := fields.pop(name, None)) is not None and bytes(value) != b"null":
            fields[meant] = value
    kept = {k: v for k, v in fields.items() if k not in left_out}
    return msgspec.json.encode({**kept, **{meaning.get(k, k): v for k, v in changed.items()}})


_WORDS = {
    "string": "a string",
    "array": "an array",
    "object": "an object",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
}
_KINDS = {
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
}
_BOUNDS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (operator.ge, "greater than or equal to"),
    "exclusiveMinimum": (operator.gt, "greater than"),
    "maximum": (operator.le, "less than or equal to"),
}
_REPEATS = re.compile(r"\{\s*+([0-9]*+)\s*+(?:,\s*+([0-9]*+)\s*+)?+\}")
"""Matches `{n}` and `{n,m}`."""
_MOST_DIGITS = 6
_MAX_PLACE_CHARS = 200

FieldPath = tuple[str | int, ...]


def check(value: Any, schema: Schema, limits: RequestLimits, place: FieldPath = ()) -> None:
    """Refuse the first value that is wrong; one that exceeds a bound before anything in it is
    looked at. Of JSON Schema this knows what the table uses.
    """
    if _KINDS[type(value)].isdisjoint(schema["type"]):
        raise _wrong(place, _must_be(schema))
    if value and "refused" in schema:
        raise _wrong(place, schema["refused"])
    if isinstance(value, str):
        _check_text(value, schema, limits, place)
    elif isinstance(value, list):
        _check_array(value, schema, limits, place)
    elif isinstance(value, dict):
        _check_object(value, schema, limits, place)
    elif type(value) in (int, float):
        for keyword, (holds, words) in _BOUNDS.items():
            bound = _bound(schema, keyword, limits)
            if bound is not None and not holds(value, bound):
                raise _wrong(place, f"it should be {words} {bound}")


def _bound(schema: Schema, keyword: str, limits: RequestLimits) -> Any:
    bound = schema.get(keyword)
    return getattr(limits, bound) if isinstance(bound, str) else bound


def _check_text(text: str, schema: Schema, limits: RequestLimits, place: FieldPath) -> None:
    _check_length(text, schema, limits, place)
    if "enum" in schema and text not in schema["enum"]:
        raise _wrong(place, _must_be(schema))
    if "pattern" in schema and not re.fullmatch(schema["pattern"], text):
        raise _wrong(place, f"it should match the pattern {schema['pattern']}")


def _check_length(text: str, schema: Schema, limits: RequestLimits, place: FieldPath) -> None:
    most = _bound(schema, "maxLength", limits)
    if most is not None and len(text) > most:
        name = _name(place)
        raise invalid(f"A text in '{name}' is longer than {most} characters.", name)
    if "maxRepeats" in schema:
        check_repeats(text, _name(place), _bound(schema, "maxRepeats", limits))


def _check_array(value: list[Any], schema: Schema, limits: RequestLimits, place: FieldPath) -> None:
    most = _bound(schema, "maxItems", limits)
    if most is not None and len(value) > most:
        raise too_many(schema["of"], most, _name(place))
    if len(value) < schema.get("minItems", 0):
        name, expected = _name(place), "Expected an array with at least one element."
        raise invalid(f"Invalid '{name}': empty array. {expected}", name)
    if "maxLength" in schema:
        for text in value:
            if isinstance(text, str):
                _check_length(text, schema, limits, place)
    if "items" in schema:
        for index, item in enumerate(value):
            check(item, schema["items"], limits, (*place, index))


def _check_object(
    value: Mapping[str, Any], schema: Schema, limits: RequestLimits, place: FieldPath
) -> None:
    most = _bound(schema, "maxProperties", limits)
    if most is not None and len(value) > most:
        raise too_many("entries", most, _name(place))
    if "oneOf" in schema:
        schema = _branch(value, schema["oneOf"], place)
    properties = schema.get("properties", {})
    for name, item in value.items():
        if name in properties:
            check(item, properties[name], limits, (*place, name))
    for name in schema.get("required", ()):
        if name not in value:
            raise missing(_name((*place, name)))
    if "additionalProperties" in schema:  # the names are the client's own
        names = {"type": ["string"], **schema.get("propertyNames", {})}
        for name, item in value.items():
            check(name, names, limits, (*place, name))
            check(item, schema["additionalProperties"], limits, (*place, name))


def _branch(value: Mapping[str, Any], branches: Sequence[Schema], place: FieldPath) -> Schema:
    """The branch of a union whose `type` the value has, or that needs none."""
    kinds: list[str] = []
    for branch in branches:
        its = branch["properties"]["type"]["enum"]
        if value["type"] in its if "type" in value else "type" not in branch["required"]:
            return branch
        kinds += its
    if "type" not in value:
        raise missing(_name((*place, "type")))
    raise _wrong((*place, "type"), f"it must be {_one_of(kinds)}")


def _wrong(place: FieldPath, what: str) -> RequestRefused:
    return invalid_value(_name(place), what) if place else invalid(f"Invalid request: {what}.")


def _name(place: FieldPath) -> str:
    return written(place)[:_MAX_PLACE_CHARS]


def check_repeats(expression: str, place: str, most: int) -> None:
    """Refuse a regular expression or grammar that repeats something too often."""
    for counts in _REPEATS.findall(expression):
        for count in counts:
            digits = count.lstrip("0")
            if len(digits) > _MOST_DIGITS or int(digits or 0) > most:
                raise too_many("repeats in an expression", most, place)


def _must_be(schema: Schema) -> str:
    words = {**_WORDS, "string": _one_of(schema["enum"])} if "enum" in schema else _WORDS
    return "it must be " + " or ".join(w for kind, w in words.items() if kind in schema["type"])


def _one_of(values: Sequence[str]) -> str:
    *first, last = (f"'{value}'" for value in values)
    return f"{', '.join(first)} or {last}" if first else last


CHECKED: Mapping[str, Schema] = {
    path: {**table, "properties": {name: known[name] for name in _rules(path) if name in known}}
    for path, table in TABLE.items()
    for known in (table["properties"],)
}
"""The rows that are checked here; vLLM's own server checks the others."""
