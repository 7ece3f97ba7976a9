"""Refuses what would be taken and have no effect: a choice of tools that cannot be obeyed, and a
format or schema where nothing reads it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from serve_app.contract import CHATS, INPUT_TOKENS, RESPONSES, called
from serve_app.errors import invalid
from serve_app.ingress.validation.structure import too_many
from serve_app.settings.limits import RequestLimits

_NAME_CHARS = 200
_CALLED = ("function", "custom")
"""Types of tools that the model can call here. vLLM shows it no others."""
_OBJECTS = {"text": "", "json_object": "schema", "structural_tag": "format"}
"""By the type of a format, its field that is an object; that of `json_schema` depends on the path.
"""
_OF_A_SCHEMA = {"type", "properties"}


def check_effects(path: str, request: Mapping[str, Any], limits: RequestLimits) -> None:
    """Refuse what would not be obeyed without a word.

    Args:
        request: has passed the walker.

    Raises:
        RequestRefused: `invalid_request`; the message names the field.
    """
    if path in (CHATS, RESPONSES, INPUT_TOKENS):
        tools = request.get("tools")
        tools = tools if isinstance(tools, list) else []
        _check_functions(tools)
        _check_choice(request.get("tool_choice"), tools, limits, within=path == CHATS)
    if path in (RESPONSES, INPUT_TOKENS):
        _check_items(request["input"])
    if isinstance(text := request.get("text"), dict):
        _check_objects(text, "text", "format")
        _check_format(text.get("format"), "text.format", "schema")
    _check_format(request.get("response_format"), "response_format", "json_schema")


def _check_choice(choice: Any, tools: Sequence[Any], limits: RequestLimits, within: bool) -> None:
    """Check that what may or must be called is there.

    Args:
        within: whether a choice has an object of its own for its fields, as in chats.
    """
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        place = "tool_choice.allowed_tools.tools" if within else "tool_choice.tools"
        allowed = choice["allowed_tools"] if within else choice
        if len(allowed["tools"]) > limits.max_tools:
            raise too_many("tools", limits.max_tools, place)
        there = {called(tool): tool for tool in tools}
        for number, one in enumerate(allowed["tools"]):
            if called(one) not in there:
                _refuse_missing(f"{place}[{number}]", " ".join(filter(None, called(one))))
        choice, tools = allowed["mode"], [there[called(one)] for one in allowed["tools"]]
    elif isinstance(choice, dict):
        name = (choice["function"] if within else choice)["name"]
        if name not in _names(tools):
            _refuse_missing(f"tool_choice{'.function' * within}.name", name)
    if choice == "required" and tools and not any(_names(tools)):
        raise invalid(
            "Invalid value for 'tool_choice': a call is required, and the model can call none of "
            "the 'tools' here.",
            "tool_choice",
        )


def _refuse_missing(place: str, name: str) -> NoReturn:
    raise invalid(
        f"Invalid value for '{place}': '{name[:_NAME_CHARS]}' is not among the 'tools'.", place
    )


def _names(tools: Sequence[Any]) -> Iterator[str]:
    """What the model can call, by each of its names."""
    for tool in tools:
        kind, name, _ = called(tool)
        if kind in _CALLED:
            yield name
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            for inner in _names(tool["tools"]):
                yield from (inner, f"{name}__{inner}")


def _check_functions(tools: Sequence[Any]) -> None:
    """Check that the schema of each function is where a function has it."""
    for number, tool in enumerate(tools):
        if called(tool)[0] != "function":
            continue
        place, function = f"tools[{number}]", tool
        if isinstance(tool.get("function"), dict):
            place, function = f"{place}.function", tool["function"]
        if function.get("parameters") is not None:
            continue
        for name, value in function.items():
            if isinstance(value, dict) and value.keys() & _OF_A_SCHEMA and "output" not in name:
                _refuse_unknown(f"{place}.{name[:_NAME_CHARS]}", "parameters")


def _check_items(items: Any) -> None:
    for number, item in enumerate(items if isinstance(items, list) else ()):
        if item.get("type") == "additional_tools":
            place = f"input[{number}].type"
            raise invalid(
                f"Invalid value for '{place}': tools are only read in 'tools' here.", place
            )


def _check_format(wanted: Any, place: str, of_schema: str) -> None:
    """Check that nothing in an answer's format is left out.

    Args:
        of_schema: the field that a `json_schema` has its schema in, or around it.
    """
    kind = str(wanted.get("type")) if isinstance(wanted, dict) else ""
    field = {**_OBJECTS, "json_schema": of_schema}.get(kind)
    if field is None:
        return
    _check_objects(wanted, place, field)
    schema = wanted.get(field)
    if kind == "json_object" and schema is not None and not isinstance(schema, dict):
        raise invalid(
            f"Invalid value for '{place}.schema': it must be an object.", f"{place}.schema"
        )
    if kind == of_schema and isinstance(schema, dict) and schema.get("schema") is None:
        place = f"{place}.{of_schema}.schema"
        raise invalid(f"Missing required parameter: '{place}'.", place)


def _check_objects(holder: Mapping[str, Any], place: str, known: str) -> None:
    """Refuse an object in a field other than the one that is read."""
    for name, value in holder.items():
        if isinstance(value, dict) and name != known:
            _refuse_unknown(f"{place}.{name[:_NAME_CHARS]}", known)


def _refuse_unknown(place: str, known: str) -> NoReturn:
    instead = f" Use '{known}' instead." if known else ""
    raise invalid(f"Unknown parameter: '{place}'.{instead}", place)
