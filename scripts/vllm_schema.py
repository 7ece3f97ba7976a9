"""Writes serve_app/settings/vllm.json: what vLLM's own server takes (the arguments of its parser,
the fields of its requests), and the fields that OpenAI's SDK documents and vLLM does not know.
`tests/engine/test_names_of_vllm.py` fails if an installed vLLM has others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, get_args

from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import response_create_params as responses
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_compact_params import ResponseCompactParams
from pydantic import TypeAdapter
from vllm import __version__
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.contract import CHATS, COMPACT, INPUT_TOKENS, RESPONSES
from serve_app.ingress.validation.fields import PATHS
from serve_app.settings.vllm_names import DATA

OPENAIS: dict[str, type[Any]] = {
    CHATS: chat.CompletionCreateParamsBase,
    "/v1/completions": completions.CompletionCreateParamsBase,
    RESPONSES: responses.ResponseCreateParamsBase,
    INPUT_TOKENS: InputTokenCountParams,
    COMPACT: ResponseCompactParams,
    "/v1/embeddings": EmbeddingCreateParams,
}


def dumped() -> dict[str, Any]:
    """What the file holds, for the installed vLLM and OpenAI's SDK."""
    parser = make_arg_parser(FlexibleArgumentParser())
    requests: dict[str, dict[str, Any]] = {}
    for tasks in (("generate",), ("embed",)):
        model: Any = SimpleNamespace(get_pooling_task=lambda tasks: tasks[0])
        for route in build_app(parser.parse_args([]), tasks, model).routes:
            if (path := getattr(route, "path", "")) in PATHS:
                (body,) = route.dependant.body_params
                requests[path] = _fields(body.field_info.annotation)
    ours = dict.fromkeys((INPUT_TOKENS, COMPACT), requests[RESPONSES])  # in no app of vLLM's
    requests |= ours
    without_effect = {
        path: sorted({"stream", *kind.__annotations__} - {*requests[path], *PATHS[path]["ours"]})
        for path, kind in OPENAIS.items()
    }
    return {
        "vllm": __version__.split("+")[0],
        "arguments": sorted(action.dest for action in parser._actions),
        "requests": {path: requests[path] for path in PATHS if path not in ours},
        "without_effect": without_effect,
    }


def _fields(kind: Any) -> dict[str, Any]:
    """The schema of each field of a model, or of any member of a union."""
    found: dict[str, Any] = {}
    for member in get_args(kind):
        for name, schema in _fields(member).items():
            found[name] = _merged([found[name], schema]) if name in found else schema
    if hasattr(kind, "model_fields"):
        whole = TypeAdapter(kind).json_schema()
        for name, field in kind.model_fields.items():
            for called in {name, field.alias or name, str(field.validation_alias or name)}:
                schema = whole["properties"].get(called) or whole["properties"][field.alias or name]
                found[called] = _plain(schema, whole.get("$defs", {}))
    return dict(sorted(found.items()))


_KEPT = ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "maxItems", "description")


def _plain(schema: Mapping[str, Any], defs: Mapping[str, Any], inside: bool = False) -> Any:
    """A schema with all its types at the top, and nothing below the items of an array."""
    if "$ref" in schema:
        schema = {**defs[schema["$ref"].rsplit("/", 1)[-1]], **schema}
    plain = {name: schema[name] for name in _KEPT if name in schema}
    if "const" in schema:
        plain["enum"] = [schema["const"]]
    if inside:
        plain.pop("description", None)
    elif "items" in schema:
        plain["items"] = _plain(schema["items"], defs, inside=True)
    parts = [_plain(one, defs, inside) for one in schema.get("anyOf", schema.get("oneOf", ()))]
    return _merged([plain, *parts])


def _merged(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    kinds: set[str] = set()
    values: list[Any] | None = []
    for schema in schemas:
        its = schema.get("type", [])
        kinds |= {its} if isinstance(its, str) else {*its}
        if its not in ([], "null"):
            values = None if values is None or "enum" not in schema else values + schema["enum"]
        items = [one["items"] for one in (whole, schema) if one.get("items")]
        whole = {**schema, **whole, **({"items": _merged(items)} if items else {})}
    whole.pop("enum", None)
    if kinds:
        whole["type"] = sorted(kinds) if len(kinds) > 1 else kinds.pop()
    return whole | ({"enum": list(dict.fromkeys(values))} if values else {})


def written(document: Mapping[str, Any]) -> str:
    """As JSON in which each field has a line, so that an upgrade of vLLM shows in a diff."""
    parts = []
    for name, value in document.items():
        if name == "requests":
            paths = []
            for path, fields in value.items():
                rows = (f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in fields.items())
                paths.append(f"  {json.dumps(path)}: {{\n" + ",\n".join(rows) + "\n  }")
            parts.append(f' "{name}": {{\n' + ",\n".join(paths) + "\n }")
        else:
            parts.append(f' "{name}": ' + json.dumps(value, indent=1).replace("\n", "\n "))
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    DATA.write_text(written(dumped()))
