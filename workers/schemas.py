"""Which JSON schemas xgrammar obeys, and how they are handed to it. Pure.

xgrammar leaves out what it does not know, and vLLM's own check finds a part of that: the answer
would then break its schema under a status 200. So a schema may only consist of what was tried
(`tests/engine/test_schemas_obeyed.py`); anything else is named.

Source: xgrammar 0.2.8, `json_schema_converter.cc`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import Any, NoReturn

_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""One of these alone decides about a value: xgrammar ignores what stands beside it."""
_BRANCHES = ("anyOf", "oneOf", "allOf")
_LENGTHS = ("minLength", "maxLength")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "boolean": (bool,),
    "null": (type(None),),
}
_NEVER = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies contains minContains "
    "maxContains uniqueItems multipleOf unevaluatedItems unevaluatedProperties $dynamicRef "
    "$recursiveRef".split()
)
_OF_A_TYPE = frozenset(
    "pattern format items prefixItems minItems maxItems properties required additionalProperties "
    "minProperties maxProperties patternProperties propertyNames".split()
)
_ASSERTIONS = _NEVER | _OF_A_TYPE | {"type", *_FORMS, *_LENGTHS, *_NUMBERS}
"""The keywords that say something about a value. All others describe."""
_FORMATS = frozenset(
    "email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference "
    "uri-template".split()
)
"""In its other formats xgrammar does not escape quotes."""
_NEGATED_CLASS = re.compile(r"\[\^(?:\\.|[^\]\\])*+\]?", re.DOTALL)
"""Also one that is not closed: to search on behind it would take time in the square of its length.
"""
_ESCAPED_IN_JSON = re.compile(
    r"[\x00-\x1f\"]|\\(?:[\\\"ntrfv0c]|(?:x|u00)(?:[01][0-9a-fA-F]|22|5[cC]))"
)
"""Characters of a pattern that JSON writes with a backslash, and xgrammar as they are."""
_ASSERTING_GROUP = re.compile(r"(?<!\\)\(\?(?!:)")
_MOST_REPEATS = 128
"""xgrammar compiles no pattern with more. Longer texts have its own rule for lengths."""
_PLAIN = r'[^"\\\x00-\x1f]'
"""A character that JSON writes as it is."""
_DECIMALS, _NARROW = 6, 1e-5
"""xgrammar rounds the limits of numbers to so many decimals; between two that are then one it
writes nothing.
"""
_MOST_CHAINED = 100
"""References and branches in a row, for one value."""
_MOST_COMPARED = 100_000
"""Steps to tell the branches of `oneOf` apart; all of them take about a tenth of a second, in which
no other request of the engine's moves.
"""
_Nodes = dict[str, dict[str, Any]]


class NotObeyed(Exception):
    """The answers would not obey the schema; the message names the keyword and its place."""

    schema: Any = None
    """The whole schema, as the request has it; None of a grammar or a regular expression."""


def prepared(schema: Any) -> Any:
    """The schema as xgrammar is given it: a copy in which the lengths of short texts are patterns,
    because by its own rule for lengths xgrammar lets control characters into a text. What is no
    schema is returned as it is: xgrammar refuses it.

    Raises:
        NotObeyed: xgrammar would not obey it.
    """
    made = copy.deepcopy(schema)
    nodes = dict(_nodes(made, "#"))
    alternatives = _Alternatives(nodes)
    for place, node in nodes.items():
        _check(node, place, alternatives)
    _check_references(nodes)
    for node in nodes.values():
        _write_lengths_as_pattern(node)
    return made


def prepared_in_tag(tag: Any, prepare: Callable[[Any], Any] = prepared) -> Any:
    """A structural tag, by which vLLM forces tool calls, with its schemas prepared."""
    if isinstance(tag, list):
        return [prepared_in_tag(one, prepare) for one in tag]
    if not isinstance(tag, dict):
        return tag
    holder = "json_schema" if tag.get("type") == "json_schema" else "schema" * ("begin" in tag)
    return {k: prepare(v) if k == holder else prepared_in_tag(v, prepare) for k, v in tag.items()}


def _nodes(node: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, by its JSON pointer."""
    if isinstance(node, dict):
        yield place, node
        for word, name, child in _children(node):
            yield from _nodes(child, f"{place}/{word}{name}")


def _children(node: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The schemas in a schema, each with its keyword and the rest of its place."""
    for word in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(inner := node.get(word), dict):
            yield from ((word, f"/{name}", child) for name, child in inner.items())
    for word in (*_BRANCHES, "prefixItems"):
        if isinstance(inner := node.get(word), list):
            yield from ((word, f"/{number}", child) for number, child in enumerate(inner))
    for word in ("items", "additionalProperties", "propertyNames"):
        if word in node:
            yield word, "", node[word]


def _refuse(what: str, place: str) -> NoReturn:
    raise NotObeyed(f"{what} in the JSON schema (at {place}) is not supported here.")


def _check(node: Mapping[str, Any], place: str, alternatives: _Alternatives) -> None:
    asserted = [word for word in node if word in _ASSERTIONS]
    for word in asserted:
        if word in _NEVER:
            _refuse(f"'{word}'", place)
    for word, name, child in _children(node):
        if word in _ASSERTIONS and not isinstance(child, dict | bool):
            _refuse(f"'{word}' with what is no schema{name and ' at '}{name[1:100]}", place)
    form = next((word for word in _FORMS if word in asserted), None)
    if form is None:
        _check_typed(node, place, asserted)
        return
    for word in asserted:
        if word != form and not (word == "type" and _are_of_type(node, form)):
            _refuse(f"'{word}' beside '{form}'", place)
    branches = node[form]
    if form in _BRANCHES and isinstance(branches, list):
        if not branches or (form == "allOf" and len(branches) > 1):
            _refuse(f"'{form}' of {'several' if branches else 'no'} schemas", place)
        if form == "oneOf" and not alternatives.exclude_each_other(branches, place):
            _refuse("'oneOf' of schemas that do not exclude each other by type or constant", place)


def _check_typed(node: Mapping[str, Any], place: str, asserted: Sequence[str]) -> None:
    types = _types(node)
    words = [word for word in asserted if word != "type"]
    if node.get("type") == []:
        _refuse("An empty 'type'", place)
    if not types and words:
        _refuse(f"'{words[0]}' without 'type'", place)
    if "string" in types:
        _check_text(node, place)
    if "number" in types or "integer" in types:
        _check_number(node, place)
    if "object" in types:
        _check_object(node, place)


def _types(node: Mapping[str, Any]) -> list[str]:
    """The types that xgrammar takes a schema for; without `type`, by its other keywords."""
    if (named := node.get("type")) is not None:
        named = named if isinstance(named, list) else [named]
        return [one for one in named if isinstance(one, str) and one in _TYPES]
    if "properties" in node:
        return ["object"]
    return ["array"] if "items" in node or "prefixItems" in node else []


def _check_number(node: Mapping[str, Any], place: str) -> None:
    limits = {word: node[word] for word in _NUMBERS if word in node}
    for word, limit in limits.items():
        if type(limit) not in (int, float) or (type(limit) is int and abs(limit) >= 2**63):
            _refuse(f"A '{word}' that is no number of 64 bits", place)
        if round(limit, _DECIMALS) != limit:
            _refuse(f"'{word}' with more than {_DECIMALS} decimals", place)
    lower = [limit for word, limit in limits.items() if "inimum" in word]
    upper = [limit for word, limit in limits.items() if "aximum" in word]
    if lower and upper and 0 < min(upper) - max(lower) < _NARROW:
        _refuse(f"'{next(iter(limits))}' less than {_NARROW} from the other limit", place)


def _check_text(node: Mapping[str, Any], place: str) -> None:
    limits = [word for word in ("pattern", "format", *_LENGTHS) if word in node]
    if len(limits) > 1 and limits != [*_LENGTHS]:
        _refuse(f"'{limits[1]}' beside '{limits[0]}'", place)
    for word in limits:
        if isinstance(node[word], int) and node[word] < 0:
            _refuse(f"A negative '{word}'", place)
    if str(node.get("format", "date")) not in _FORMATS:
        _refuse(f"The 'format' {str(node['format'])[:100]}", place)
    if "pattern" in node:
        _check_pattern(node["pattern"], place)


def _check_pattern(pattern: Any, place: str) -> None:
    if not isinstance(pattern, str):
        _refuse("A 'pattern' that is no text", place)
    if _ASSERTING_GROUP.search(pattern):
        _refuse("A 'pattern' with a group '(?', but for '(?:',", place)
    if _ESCAPED_IN_JSON.search(_NEGATED_CLASS.sub("", pattern)):
        _refuse("A 'pattern' with quotes, backslashes or control characters", place)


def _check_object(node: Mapping[str, Any], place: str) -> None:
    properties, required = node.get("properties"), node.get("required")
    known = properties if isinstance(properties, dict) else {}
    for name in required if isinstance(required, list) else ():
        if not isinstance(name, str):
            _refuse("'required' of what is no name", place)
        if name not in known:
            _refuse(f"'required' of '{name[:100]}', which 'properties' do not have,", place)
    patterns, names = node.get("patternProperties"), node.get("propertyNames")
    if isinstance(patterns, dict):
        if properties or node.get("additionalProperties") or names or len(patterns) != 1:
            _refuse("'patternProperties' of several patterns or beside other properties", place)
        _check_pattern(next(iter(patterns)), place)
    more = names.keys() - {"type", "pattern", "enum"} if isinstance(names, dict) else ()
    if more or (properties and names not in (None, {}, {"type": "string"})):
        _refuse("'propertyNames' beside 'properties' or with more than a pattern", place)


def _are_of_type(node: Mapping[str, Any], form: str) -> bool:
    """Whether a constant, or all of several, are of the schema's type."""
    if form not in ("const", "enum"):
        return False
    kinds = [kind for name in _types(node) for kind in _TYPES[name]]
    return all(type(one) in kinds for one in _values(node) or ())


def _values(node: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema allows, if it lists them."""
    values = [node["const"]] if "const" in node else node.get("enum")
    return values if isinstance(values, list) else None


class _Alternatives:
    """Tells the branches of a schema's `oneOf`s apart, in a bounded number of steps."""

    def __init__(self, nodes: _Nodes) -> None:
        self._nodes = nodes
        self._left = _MOST_COMPARED

    def exclude_each_other(self, branches: Sequence[Any], place: str) -> bool:
        """Whether no value can obey two of them; refused if to find out would take too long."""
        found = [self._resolved(one, place) for one in branches]
        return all(self._exclude(one, other, place) for one, other in combinations(found, 2))

    def _exclude(self, one: Mapping[str, Any], other: Mapping[str, Any], place: str) -> bool:
        """By types, by constants, or by a property that both require and that has other constants
        in each.
        """
        self._step(1, place)
        if _values(one) is not None and _values(other) is not None:
            return self._differ(one, other, place)
        ours, theirs = (
            {"number" if name == "integer" else name for name in _types(x)} for x in (one, other)
        )
        if ours and theirs and not ours & theirs:
            return True
        if not ours == theirs == {"object"}:
            return False
        required = [x.get("required") or () for x in (one, other)]
        self._step(sum(map(len, required)), place)
        return any(
            self._differ(one["properties"][name], other["properties"][name], place)
            for name in sorted(set(required[0]) & set(required[1]))
        )

    def _differ(self, one: Mapping[str, Any], other: Mapping[str, Any], place: str) -> bool:
        """Whether both list their values, and have none in common."""
        if (ours := _values(one)) is None or (theirs := _values(other)) is None:
            return False
        self._step(len(ours) * len(theirs), place)
        return not any(value in theirs for value in ours)

    def _resolved(self, node: Any, place: str) -> Mapping[str, Any]:
        for _ in self._nodes:
            self._step(1, place)
            if not isinstance(node, dict) or "$ref" not in node:
                break
            node = self._nodes.get(str(node["$ref"]))
        return node if isinstance(node, dict) else {}

    def _step(self, steps: int, place: str) -> None:
        self._left -= steps
        if self._left < 0:
            _refuse("'oneOf' of so many alternatives", place)


def _check_references(nodes: _Nodes) -> None:
    """Refuse references to nowhere, and those that come back before anything is written."""
    leads: dict[str, list[str]] = {}
    for place, node in nodes.items():
        if "$ref" in node and str(node["$ref"]) not in nodes:
            _refuse(f"The '$ref' {str(node['$ref'])[:100]}, which is no place in it,", place)
        leads[place] = [str(node["$ref"])] if "$ref" in node else []
        for word, name, child in _children(node):
            if word in _BRANCHES and isinstance(child, dict):
                leads[place].append(f"{place}/{word}{name}")
    try:
        order = list(TopologicalSorter(leads).static_order())
    except CycleError as error:
        _refuse("A '$ref' to itself", error.args[1][0])
    chained: dict[str, int] = {}
    for place in order:
        chained[place] = max((chained[one] + 1 for one in leads[place]), default=0)
        if chained[place] > _MOST_CHAINED:
            _refuse(f"A chain of more than {_MOST_CHAINED} references", place)


def _write_lengths_as_pattern(node: dict[str, Any]) -> None:
    if "string" not in _types(node) or not node.keys() & {*_LENGTHS}:
        return
    least, most = node.get("minLength", 0), node.get("maxLength", "")
    if not all(type(one) is int and one <= _MOST_REPEATS for one in (least, most or 0)):
        return
    if most == "" or most >= least:
        node.pop("minLength", None), node.pop("maxLength", None)
        node["pattern"] = f"^{_PLAIN}{{{least},{most}}}$"
