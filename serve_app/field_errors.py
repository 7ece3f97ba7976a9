"""What is wrong with a field of a request, in one sentence: from the errors of pydantic, with which
vLLM checks requests, and whose words and places are Python's. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from serve_app.errors import RequestRefused, invalid

_MAX_PLACE_CHARS = 200
_KINDS = ("type", "role")
"""Fields that tell the branches of a union from each other."""
_MUST_BE = {
    kind: words
    for words, kinds in {
        "an object": "dict_type model_type model_attributes_type dataclass_type",
        "an array": "list_type iterable_type tuple_type set_type",
        "a string": "string_type",
        "an integer": "int_type int_parsing int_from_float",
        "a number": "float_type float_parsing",
        "true or false": "bool_type bool_parsing",
    }.items()
    for kind in kinds.split()
}
"""By the type of pydantic's error. Of other errors its own sentence is taken."""

Error = Mapping[str, Any]


def refusal_of(errors: Sequence[Error], body: Any, root: str | None = None) -> RequestRefused:
    """The refusal of a request. Of a union's branches those count whose type or role is that of the
    request, and of their errors the deepest.

    Args:
        body: the request, to tell its fields from the names of pydantic's branches.
        root: the field in which the errors are; None if their places begin at the request.
    """
    placed = [(error, _place(error["loc"], body, error["type"] == "missing")) for error in errors]
    others = [error for error in errors if _is_of_another_branch(error)]
    branches = {tuple(error["loc"][:-1]) for error in others}
    fitting = [one for one in placed if not _is_within(one[0], branches)]
    wrong = [one for one in placed if one[0] in others]
    depth = max((len(place) for _, place in fitting), default=0)
    if not fitting or any(len(place) > depth for _, place in wrong):
        fitting = wrong
    deepest = max((place for _, place in fitting), key=len)
    here = [error for error, place in fitting if place == deepest]
    place = written(deepest)[:_MAX_PLACE_CHARS] or root
    return invalid(_sentence(here, place), place)


def _is_of_another_branch(error: Error) -> bool:
    """Whether it only says that a branch of a union is for another type or role."""
    *branch, name = error["loc"] or ("",)
    # pydantic's wrappers have one name in all branches.
    named = bool(branch) and not str(branch[-1]).startswith("function-")
    return error["type"] == "literal_error" and name in _KINDS and named


def _is_within(error: Error, branches: Set[tuple[Any, ...]]) -> bool:
    loc = tuple(error["loc"])
    return any(loc[:end] in branches for end in range(len(loc) + 1))


def _place(loc: Sequence[Any], body: Any, missing: bool) -> list[str | int]:
    """The fields of the request in pydantic's location; the last of it may be missing there."""
    place: list[str | int] = []
    for number, part in enumerate(loc):
        inside = isinstance(part, int) and isinstance(body, list) and part < len(body)
        if inside or (isinstance(body, dict) and isinstance(part, str) and part in body):
            place.append(part)
            body = body[part]
        elif missing and number == len(loc) - 1:
            place.append(part)
    return place


def written(place: Sequence[str | int]) -> str:
    """A place as `messages[0].content`."""
    text = ""
    for part in place:
        if isinstance(part, str) and not part.isidentifier():
            break  # the client's own name, such as a token of `logit_bias`
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _sentence(errors: Sequence[Error], place: str | None) -> str:
    errors = [error for error in errors if not _is_of_type(error)] or errors
    found = list(dict.fromkeys(_what_is_wrong(error) for error in errors))
    if errors[0]["type"] == "missing" and place:
        return f"Missing required parameter: '{place}'."
    if errors[0]["type"] == "too_short" and place:
        return f"Invalid '{place}': empty array. Expected an array with at least one element."
    if errors[0]["type"] == "too_long" and place:
        most, length = errors[0]["ctx"]["max_length"], errors[0]["ctx"]["actual_length"]
        return (
            f"Invalid '{place}': array too long. Expected an array with maximum length {most}, but "
            f"got an array with length {length} instead."
        )
    must_be = [text for text in found if text.startswith("it must be ")]
    if must_be == found:
        found = ["it must be " + " or ".join(text.removeprefix("it must be ") for text in found)]
    what = found[0] if len(found) == 1 else "it has none of the forms that are allowed here"
    return f"Invalid value for '{place}': {what}." if place else f"Invalid request: {what}."


def _is_of_type(error: Error) -> bool:
    """Whether a branch is for another kind of value; then the other branches' errors say more."""
    return error["type"] in _MUST_BE or error["type"] == "literal_error"


def _what_is_wrong(error: Error) -> str:
    kind = error["type"]
    if kind in _MUST_BE:
        return f"it must be {_MUST_BE[kind]}"
    if kind == "literal_error":
        return f"it must be {error['ctx']['expected']}"
    if kind == "too_long":
        return f"it may have at most {error['ctx']['max_length']} items"
    text: str = error["msg"]
    return text.removeprefix("Value error, ").replace("Input should", "it should", 1).rstrip(".")
