"""Checks a value by a JSON Schema whose bounds may be settings: the one walker over the table of
fields. Pure.

It knows what `fields` uses of JSON Schema; `type` is a list. A bound that is a text is the name of
a setting in `limits`, and `of` says in a refusal what there is too much of.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from serve_app.errors import RequestRefused, invalid, written
from serve_app.ingress.validation.fields import Schema
from serve_app.ingress.validation.structure import too_many
from serve_app.settings.limits import RequestLimits

_WORDS = {
    "string": "a string",
    "array": "an array",
    "object": "an object",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
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

Place = tuple[str | int, ...]


class Problem(NamedTuple):
    """What is wrong at a place of a request."""

    place: Place
    what: str
    whole: str = ""
    """The sentence, with the place as `{}`, if it is not about an invalid value."""

    def refusal(self) -> RequestRefused:
        place = written(self.place)[:_MAX_PLACE_CHARS] or None
        if place is None:
            return invalid(f"Invalid request: {self.what}.")
        sentence = self.whole or f"Invalid value for {{}}: {self.what}."
        return invalid(sentence.replace("{}", f"'{place}'", 1), place)


class Walker:
    """One walk over a request; `problems` is what was found.

    A value that is too long for a setting is refused at once, before anything in it is looked at.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.problems: list[Problem] = []

    def worst(self, schema: Schema) -> Problem | None:
        """The one deepest in the request, which says the most; of several, the first of the
        table.
        """
        fields = list(schema["properties"])
        return min(
            self.problems,
            key=lambda one: (-len(one.place), one.place and fields.index(one.place[0])),
            default=None,
        )

    def check(self, value: Any, schema: Schema, place: Place = ()) -> None:
        """Check a value by a schema that `compiled` returned."""
        further = schema["further"].get(type(value), _WRONG)
        if further is not None:
            further(self, value, schema, place)

    def _wrong_type(self, _: Any, schema: Schema, place: Place) -> None:
        self._wrong(place, _must_be(schema))

    def _check_number(self, value: float, schema: Schema, place: Place) -> None:
        for name, (holds, words) in _BOUNDS.items():
            bound = schema.get(name)
            limit = self._bound(bound)
            if limit is not None and not holds(value, limit):
                self._wrong(place, f"it should be {words} {limit}")
                if limit is not bound:
                    raise self.problems[-1].refusal()
                return

    def _wrong(self, place: Place, what: str, whole: str = "") -> None:
        self.problems.append(Problem(place, what, whole))

    def _bound(self, bound: Any) -> Any:
        return getattr(self._limits, bound) if isinstance(bound, str) else bound

    def _check_text(self, text: str, schema: Schema, place: Place) -> None:
        most = schema.get("maxLength")
        if isinstance(most, str):
            self._check_length(text, schema, place)
        elif most is not None and len(text) > most:
            self._wrong(place, f"it should have at most {most} characters")
        if "enum" in schema and text not in schema["enum"]:
            self._wrong(place, _must_be(schema))
        if "pattern" in schema and not re.fullmatch(schema["pattern"], text):
            self._wrong(place, f"it should match the pattern {schema['pattern']}")

    def _check_length(self, text: str, schema: Schema, place: Place) -> None:
        most: int = self._bound(schema["maxLength"])
        if len(text) > most:
            name = written(place)
            raise invalid(f"A text in '{name}' is longer than {most} characters.", name)
        if "maxRepeats" in schema:
            check_repeats(text, written(place), self._bound(schema["maxRepeats"]))

    def _check_array(self, value: list[Any], schema: Schema, place: Place) -> None:
        if "maxItems" in schema and len(value) > (most := self._bound(schema["maxItems"])):
            raise too_many(schema["of"], most, written(place))
        if "maxLength" in schema:
            for text in value:
                if isinstance(text, str):
                    self._check_length(text, schema, place)
        if len(value) < schema.get("minItems", 0):
            expected = "Expected an array with at least one element."
            self._wrong(place, "", f"Invalid {{}}: empty array. {expected}")
        if (items := schema.get("items")) is not None:
            before = len(self.problems)
            known = items["further"]
            for index, item in enumerate(value):
                further = known.get(type(item), _WRONG)
                if further is not None:
                    further(self, item, items, (*place, index))
                    if len(self.problems) > before:
                        break  # of very many, one is enough

    def _check_object(self, value: Mapping[str, Any], schema: Schema, place: Place) -> None:
        if "maxItems" in schema and len(value) > (most := self._bound(schema["maxItems"])):
            raise too_many(schema["of"], most, written(place))
        if "oneOf" in schema:
            chosen = self._branch(value, schema["oneOf"], place)
            if chosen is None:
                return
            schema = chosen
        properties = schema.get("properties", {})
        kinds = properties.get("type", {}).get("enum")
        if kinds and "type" in value and value["type"] not in kinds:
            self._wrong((*place, "type"), f"it must be {_one_of(kinds)}")
            return
        for name in schema.get("required", ()):
            if name not in value:
                self._wrong((*place, name), "", "Missing required parameter: {}.")
        few, many = (value, properties) if len(value) < len(properties) else (properties, value)
        for name in few:
            if name in many:
                item, rule = value[name], properties[name]
                further = rule["further"].get(type(item), _WRONG)
                if further is not None:
                    further(self, item, rule, (*place, name))
        if "additionalProperties" in schema:
            self._check_entries(value, schema, place)

    def _branch(
        self, value: Mapping[str, Any], branches: Sequence[Schema], place: Place
    ) -> Schema | None:
        """The branch of a union whose `type` the value has, or that needs none."""

        def fits(branch: Schema) -> bool:
            if "type" in value:
                return value["type"] in branch["properties"]["type"]["enum"]
            return "type" not in branch["required"]

        chosen = next(filter(fits, branches), None)
        if chosen is None:
            kinds = [kind for one in branches for kind in one["properties"]["type"]["enum"]]
            missing = "" if "type" in value else "Missing required parameter: {}."
            self._wrong((*place, "type"), f"it must be {_one_of(kinds)}", missing)
        return chosen

    def _check_entries(self, value: Mapping[str, Any], schema: Schema, place: Place) -> None:
        """Check an object whose names are the client's own."""
        most = schema.get("maxProperties")
        if most is not None and len(value) > most:
            expected = f"Expected at most {most} entries, but got {len(value)} instead."
            self._wrong(place, "", f"Invalid {{}}: too many entries. {expected}")
        for name, item in value.items():
            self.check(name, schema["propertyNames"], (*place, name))
            self.check(item, schema["additionalProperties"], (*place, name))


_WRONG = Walker._wrong_type
_FURTHER: Mapping[str, tuple[tuple[type, ...], Callable[..., None], Set[str]]] = {
    "object": (
        (dict,),
        Walker._check_object,
        {"maxItems", "oneOf", "properties", "required", "additionalProperties"},
    ),
    "array": ((list,), Walker._check_array, {"maxItems", "maxLength", "minItems", "items"}),
    "string": ((str,), Walker._check_text, {"maxLength", "enum", "pattern"}),
    "integer": ((int,), Walker._check_number, _BOUNDS.keys()),
    "number": ((int, float), Walker._check_number, _BOUNDS.keys()),
    "boolean": ((bool,), Walker._check_number, set()),
    "null": ((type(None),), Walker._check_number, set()),
}
"""By type: how it is in Python, and what checks its keywords."""


def compiled(schema: Schema) -> Schema:
    """The schema, and in `further`, by Python's types, what is left to check of a value."""
    further = {
        python: check if keywords & schema.keys() else None
        for kind in schema["type"]
        for types, check, keywords in (_FURTHER[kind],)
        for python in types
    }
    inner: dict[str, Any] = {
        key: compiled(schema[key]) for key in ("items", "additionalProperties") if key in schema
    }
    if "properties" in schema:
        inner["properties"] = {name: compiled(one) for name, one in schema["properties"].items()}
    if "oneOf" in schema:
        inner["oneOf"] = [compiled(one) for one in schema["oneOf"]]
    names = {"type": ["string"], **schema.get("propertyNames", {})}
    inner["propertyNames"] = {**names, "further": {str: Walker._check_text}}
    return {**schema, **inner, "further": further}


def check(value: Any, schema: Schema, limits: RequestLimits) -> None:
    """Refuse a value that is not as a schema that `compiled` returned."""
    walker = Walker(limits)
    walker.check(value, schema)
    if (problem := walker.worst(schema)) is not None:
        raise problem.refusal()


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
