"""The table of fields: what the body of a request may have, path by path, and how each is checked.

A row is the field's JSON Schema: vLLM's own (settings/vllm.json, written from its request models),
and over it what fields.toml says. `bodies.parse` checks a body by it and `/docs` shows it. A field
that a new vLLM brings is in no list until settings/vllm.json is written again and somebody has
judged it: it stays, or belongs to `HARMFUL_FIELDS`.

Clients send fields of their own, which change nothing (`client_metadata`): these are left out of
the body. A field that would have an effect elsewhere is refused instead, because the client would
believe that it counts here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from serve_app.errors import invalid
from serve_app.ingress.validation.structure import too_many
from serve_app.settings.limits import HARMFUL_FIELDS, RequestLimits
from serve_app.settings.vllm_names import VLLM

Schema = Mapping[str, Any]

_RULES = tomllib.loads(Path(__file__).with_name("fields.toml").read_text())
PATHS: Mapping[str, Mapping[str, Any]] = {
    path: {**_RULES["paths"][own.get("of", path)], **own} for path, own in _RULES["paths"].items()
}
INFERENCE_PATHS = tuple(PATHS)
_BOUNDS = ("maximum", "maxItems", "maxLength", "maxRepeats")
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
    vllm = VLLM["requests"][PATHS[path].get("of", path)]
    meaning = PATHS[path].get("meaning", {})
    names = {*vllm, *PATHS[path]["ours"], *VLLM["without_effect"].get(path, ()), *meaning}
    rules = _rules(path)
    rows = {
        name: _row(vllm.get(meaning.get(name, name), {}), rules.get(name))
        for name in sorted(names.difference(HARMFUL_FIELDS))
    }
    return {"type": ["object"], "required": PATHS[path].get("required", []), "properties": rows}


TABLE: Mapping[str, Schema] = {path: _table(path) for path in INFERENCE_PATHS}
CHECKED: Mapping[str, Schema] = {
    path: {
        **table,
        "properties": {
            name: table["properties"][name] for name in _rules(path) if name in table["properties"]
        },
    }
    for path, table in TABLE.items()
}
"""The rows that are checked here; vLLM's own server checks the others."""
METADATA: Schema = _shaped({"like": "metadata"})


def documented(path: str) -> dict[str, Any]:
    """The JSON Schema of a path's bodies; a bound that is a setting is told in words."""
    table = _in_words(TABLE[path])
    return {**table, "required": list(dict.fromkeys(["model", *table["required"]]))}


def _in_words(schema: Schema) -> dict[str, Any]:
    settings = [f"`limits.{schema[key]}`" for key in _BOUNDS if isinstance(schema.get(key), str)]
    shown = {
        k: v for k, v in schema.items() if k != "of" and not (k in _BOUNDS and isinstance(v, str))
    }
    for key in ("items", "additionalProperties"):
        if key in schema:
            shown[key] = _in_words(schema[key])
    if "properties" in schema:
        shown["properties"] = {name: _in_words(one) for name, one in schema["properties"].items()}
    if settings:
        said = [schema["description"]] if "description" in schema else []
        shown["description"] = "; ".join([*said, f"see {', '.join(settings)}"])
    return shown


_ANYWHERE = frozenset(_RULES["former"]["fields"]).union(
    *(table["properties"] for table in TABLE.values())
)
_NAME_CHARS, _MOST_UNKNOWN = 200, 100
"""Of one request: each name that nobody here knows is compared with all that are known."""
_LEAST_CHARS, _MOST_CHARS = 3, 64
"""Of a name that may be a misspelt one: every letter is one letter away from `n`."""


def unknown_fields(path: str, request: Mapping[str, Any], limits: RequestLimits) -> Sequence[str]:
    """The fields that nobody here knows, and that are left out.

    Raises:
        RequestRefused: `invalid_request`, for one that must not be left out, or too many.
    """
    known = TABLE[path]["properties"]
    found = [name for name in request if name not in known and name not in limits.allowed_fields]
    if len(found) > _MOST_UNKNOWN:
        raise too_many("fields that are not known here", _MOST_UNKNOWN)
    for name in found:
        shown = name[:_NAME_CHARS]
        why = None if request[name] is None else _why_refused(path, shown)
        if why is None and limits.refuse_unknown_fields and request[name] is not None:
            why = f"Unknown parameter: '{shown}'."
        if why is not None:
            raise invalid(why, shown)
    return found


def _why_refused(path: str, name: str) -> str | None:
    """Why a field that is not known for this path must not be left out, if so."""
    if name in HARMFUL_FIELDS:
        return f"The field '{name}' is not allowed here; remove it."
    unknown = f"Unknown parameter: '{name}'."
    if name.startswith("guided_"):
        return f"{unknown} Use 'structured_outputs' instead."
    if meant := _misspelt(path, name):
        return f"{unknown} Did you mean '{meant}'?"
    return unknown if name in _ANYWHERE else None


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
    if abs(len(one) - len(other)) > 1:
        return False
    begin = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), None)  # noqa: B905
    if begin is None:
        return True
    rest, other_rest = one[begin:], other[begin:]
    return (
        rest[1:] == other_rest[1:]
        or rest[1:] == other_rest
        or rest == other_rest[1:]
        or (rest[:2] == other_rest[1::-1] and rest[2:] == other_rest[2:])
    )


def rewritten(path: str, body: bytes, left_out: Collection[str]) -> bytes:
    """The body without some of its fields, and with every other under the name that vLLM knows.

    Args:
        body: a JSON object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, meant in PATHS[path].get("meaning", {}).items():
        if (value := fields.pop(name, None)) is not None and bytes(value) != b"null":
            fields[meant] = value
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in left_out})
