"""The table of fields: what the body of a request may have, path by path, and how each is checked.

A row is the field's JSON Schema: vLLM's own (settings/vllm.json, written from its request models),
and over it the limits that hold here (`_RULES`). `bodies.parse` checks a body by it and `/docs`
shows it. A field that a new vLLM brings is in no list until that file is written again and somebody
has judged it: it stays, or belongs to `HARMFUL_FIELDS`. What vLLM's own server checks no less is
not checked twice: only fields in `_RULES`, for the paths of `_CHECKED`.

Clients send fields of their own, which change nothing (`client_metadata`): these are left out of
the body. A field that would have an effect elsewhere is refused instead, because the client would
believe that it counts here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from serve_app.contract import CHATS, COMPLETIONS, INPUT_TOKENS, RESPONSES, Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.validation.structure import too_many
from serve_app.settings.limits import HARMFUL_FIELDS, RequestLimits
from serve_app.settings.vllm_names import VLLM

Schema = Mapping[str, Any]

EMBEDDINGS, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"
INFERENCE_PATHS = (
    CHATS, COMPLETIONS, RESPONSES, EMBEDDINGS, TOKENIZE, DETOKENIZE, INPUT_TOKENS,
)  # fmt: skip

_OURS = ("model", "prompt_cache_key", "service_tier", "user")
READ_HERE = {path: (*_OURS, *("metadata", "store") * (path == CHATS)) for path in INFERENCE_PATHS}
"""By path: fields that the ingress reads itself, whether vLLM knows them or not."""
WITHOUT_EFFECT: Mapping[str, frozenset[str]] = {
    path: frozenset(names) for path, names in VLLM["without_effect"].items()
}
"""By path: what OpenAI documents and vLLM does not know. It is taken, because OpenAI's clients send
it.
"""
MEANING: Mapping[str, Mapping[str, str]] = {COMPLETIONS: {"max_completion_tokens": "max_tokens"}}
"""By path: fields under another endpoint's name, and the field that each means. As in vLLM's chats,
the other name counts if both are there.
"""

INT32 = 2**31 - 1
"""The range of the engine's tensors."""
_FINITE = sys.float_info.max
_BOUNDS = ("maximum", "maxItems", "maxLength", "maxRepeats")
"""The keywords whose bound may be a setting."""
ANY = ["null", "boolean", "integer", "number", "string", "array", "object"]
_COUNT = {"minimum": 0, "maximum": INT32}
_COUNT_OR_ALL = {"minimum": -1, "maximum": INT32}
_LIMIT = {"minimum": 1, "maximum": INT32}
_ANSWERS = {"type": ["integer", "null"], "minimum": 1, "maximum": 128}
_PENALTY = {"minimum": -2, "maximum": 2}
_LOGPROBS = {"minimum": 0, "maximum": "max_logprobs"}
_IDS = {"items": {"type": ["integer"], **_COUNT}, "of": "token ids"}
_FLAG = {"type": ["boolean", "null"]}
_TEXT = {"type": ["string", "null"]}
_SOME_TEXT = {"type": ["string"]}
_NAME = {"type": ["string", "null"], "maxLength": "max_name_chars"}
_ANY_NAME = {"type": ANY, "maxLength": "max_name_chars"}
_OBJECT = {"type": ["object"]}
_OBJECTS = {"type": ["array", "null"], "items": _OBJECT}
_MESSAGES = {"maxItems": "max_messages", "of": "messages"}
_TOOLS = {"maxItems": "max_tools", "of": "tools"}


def _object(required: str, **properties: Schema) -> dict[str, Any]:
    return {"type": ["object"], "required": required.split(), "properties": properties}


def _of(*values: str) -> Schema:
    return {"type": ["string"], "enum": [*values]}


_MESSAGE = _object(
    "role",
    role=_SOME_TEXT,
    content={"type": ["string", "array", "null"], "items": _OBJECT},
    tool_calls=_OBJECTS,
)
# vLLM supports no other type, but reads `function` of every tool before it checks the type.
_TOOL = _object("function", type=_of("function"), function=_object("name", name=_SOME_TEXT))
_ALLOWED = {
    "mode": _of("auto", "required"),
    "tools": {"type": ["array"], "items": _OBJECT, "minItems": 1},
}
_CHOICE = {"type": ["string", "object", "null"], "enum": ["none", "auto", "required"]}
_ALLOWED_IN_CHAT = _object(
    "type allowed_tools",
    type=_of("allowed_tools"),
    allowed_tools=_object("mode tools", **_ALLOWED),
)
METADATA: Schema = {
    "type": ["object", "null"],
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": ["string"], "maxLength": 512},
}
"""What a client notes about its request or a stored answer. OpenAI's bounds."""

_EVERYWHERE: Mapping[str, Schema] = {
    "model": _TEXT,
    "user": _NAME,
    "prompt_cache_key": _NAME,
    "truncate_prompt_tokens": _COUNT_OR_ALL,
    "cache_salt": {"maxLength": "max_name_chars"},
    "dimensions": _LIMIT,
}
_WRITING: Mapping[str, Schema] = {
    **_EVERYWHERE,
    "stream": {},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": _COUNT_OR_ALL,
    "min_p": {"minimum": 0, "maximum": 1},
    "max_tokens": _LIMIT,
    "max_completion_tokens": _LIMIT,
    "max_output_tokens": _LIMIT,
    "min_tokens": _COUNT,
    "n": _ANSWERS,
    "best_of": _ANSWERS,
    "use_beam_search": {},
    "length_penalty": {"minimum": -100, "maximum": 100},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "logprobs": {"type": ["boolean", "integer", "null"], **_LOGPROBS},
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "logprob_token_ids": {**_IDS, "maxItems": "max_stop_token_ids"},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": ["number"], "minimum": -_FINITE, "maximum": _FINITE},
        "maxItems": "max_logit_bias",
        "of": "entries",
    },
    "stop": {"maxItems": "max_stop", "of": "texts", "maxLength": "max_stop_chars"},
    "stop_token_ids": {**_IDS, "maxItems": "max_stop_token_ids"},
    "allowed_token_ids": {**_IDS, "maxItems": "max_allowed_token_ids"},
    "bad_words": {"maxItems": "max_bad_words", "of": "texts", "maxLength": "max_bad_word_chars"},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "priority": {},
    "thinking_token_budget": _COUNT_OR_ALL,
    "stream_interval": _LIMIT,
    "routed_experts_prompt_start": _COUNT,
    "service_tier": _TEXT,
    "stream_options": {"type": ["object", "null"]},
    "structured_outputs": {
        "properties": {
            "choice": {
                "type": ANY,
                "maxItems": "max_structured_choices",
                "of": "texts",
                "maxLength": "max_structured_choice_chars",
            },
            "regex": {"type": ANY, "maxLength": "max_regex_chars", "maxRepeats": "max_repeats"},
            "whitespace_pattern": {
                "type": ANY,
                "maxLength": "max_regex_chars",
                "maxRepeats": "max_repeats",
            },
            "grammar": {"type": ANY, "maxLength": "max_grammar_chars", "maxRepeats": "max_repeats"},
            "structural_tag": {"type": ANY, "maxLength": "max_grammar_chars"},
        }
    },
    "repetition_detection": {"additionalProperties": {"type": ["integer"], **_COUNT}},
    "session_id": _ANY_NAME,
    "safety_identifier": _ANY_NAME,
}
_RESPONSES: Mapping[str, Schema] = {
    **_WRITING,
    "input": {
        "type": ["string", "array"],
        "items": _object("", type=_TEXT, role=_TEXT),
        "maxItems": "max_messages",
        "of": "items",
    },
    "max_tool_calls": _COUNT,
    "metadata": METADATA,
    "tools": {"type": ANY, **_TOOLS},
    "tool_choice": {
        **_CHOICE,
        "oneOf": [
            _object("type name", type=_of("function", "custom"), name=_SOME_TEXT),
            _object("type mode tools", type=_of("allowed_tools"), **_ALLOWED),
        ],
    },
    "store": _FLAG,
    "background": _FLAG,
    "previous_response_id": {"maxLength": 200},
}
_RULES: Mapping[str, Mapping[str, Schema]] = {
    CHATS: {
        **_WRITING,
        "store": _FLAG,
        "metadata": METADATA,
        "messages": {"type": ["array"], "items": _MESSAGE, "minItems": 1, **_MESSAGES},
        "tools": {"type": ["array", "null"], "items": _TOOL, **_TOOLS},
        "tool_choice": {
            **_CHOICE,
            "oneOf": [
                _object("function", **_TOOL["properties"]),
                _ALLOWED_IN_CHAT,
            ],
        },
    },
    COMPLETIONS: {
        **_WRITING,
        # OpenAI: "defaults to <|endoftext|>"; vLLM and every peer want a prompt.
        "prompt": {"type": ANY},
        "max_tokens": _COUNT,
        "max_completion_tokens": _COUNT,
    },
    RESPONSES: _RESPONSES,
    INPUT_TOKENS: _RESPONSES,
    EMBEDDINGS: {**_EVERYWHERE, "messages": {"type": ANY, **_MESSAGES}},
    TOKENIZE: {
        **_EVERYWHERE,
        "messages": {"type": ANY, **_MESSAGES},
        "tools": {"type": ANY, **_TOOLS},
    },
    DETOKENIZE: {"model": _TEXT, "user": _ANY_NAME, "prompt_cache_key": _ANY_NAME},
}
"""By path: what is checked here. Of a row without a `type`, vLLM's own counts. A bound that is a
text is a setting in `limits`.
"""
_REQUIRED = {CHATS: "messages", COMPLETIONS: "prompt", RESPONSES: "input", INPUT_TOKENS: "input"}


def _table(path: str) -> dict[str, Any]:
    vllm = VLLM["requests"][RESPONSES if path == INPUT_TOKENS else path]
    meaning = MEANING.get(path, {})
    names = {*vllm, *READ_HERE[path], *WITHOUT_EFFECT.get(path, ()), *meaning}
    rows = {
        name: _row(vllm.get(meaning.get(name, name), {}), _RULES[path].get(name))
        for name in sorted(names.difference(HARMFUL_FIELDS))
    }
    required = [_REQUIRED[path]] if path in _REQUIRED else []
    return {"type": ["object"], "required": required, "properties": rows}


def _row(vllm: Schema, rule: Schema | None) -> Schema:
    if rule is None:
        return vllm
    row = {key: vllm[key] for key in ("type", "items", "description") if key in vllm}
    if "type" in rule:
        row.pop("items", None)
    else:
        row["type"] = sorted({*_listed(row), "null"})
    if "items" in row:
        row["items"] = {**row["items"], "type": _listed(row["items"])}
    return {**row, **rule}


def _listed(schema: Schema) -> list[str]:
    kind = schema.get("type", ANY)
    return [kind] if isinstance(kind, str) else kind


TABLE: Mapping[str, Schema] = {path: _table(path) for path in INFERENCE_PATHS}
CHECKED: Mapping[str, Schema] = {
    path: {
        **table,
        "properties": {
            name: table["properties"][name] for name in _RULES[path] if name in table["properties"]
        },
    }
    for path, table in TABLE.items()
}
"""The rows that are checked here."""


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


_FORMER = {
    *"activation additional_data early_stopping logits_processors normalize softmax".split(),
    "structural_tag",
}
"""What older versions of vLLM knew."""
_ANYWHERE = frozenset(_FORMER).union(*(table["properties"] for table in TABLE.values()))
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
            raise RequestRefused(Reason.INVALID_REQUEST, why, param=shown)
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
    for name, meant in MEANING.get(path, {}).items():
        if (value := fields.pop(name, None)) is not None and bytes(value) != b"null":
            fields[meant] = value
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in left_out})
