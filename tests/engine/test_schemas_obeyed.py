"""Every answer that a schema's grammar allows obeys the schema, or the schema is refused by the
keyword that would not be obeyed. xgrammar alone, without a model.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import jsonschema
import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar
from xgrammar import Grammar

from tests.engine.grammars import answers
from tests.tables import Failures, each
from workers.grammars import check_grammar, check_parts, check_regex
from workers.schemas import NotObeyed, prepared, prepared_in_tag

WALKS = 6
OBJ, STR, INT, NUM = ({"type": name} for name in ("object", "string", "integer", "number"))
ARR = {"type": "array"}
CLOSED = {**OBJ, "additionalProperties": False}


def kind(name: str) -> dict[str, Any]:
    """An object that its `kind` tells from others."""
    properties = {"kind": {"const": name}, "v": {**STR, "maxLength": 2}}
    return {**CLOSED, "properties": properties, "required": ["kind"]}


OBEYED: list[dict[str, Any]] = [
    {},
    {"title": "t", "description": "d", "default": 1, "examples": [1], "x-own": {}, **INT},
    {"const": {"a": [None, '\n"\\']}},
    {"enum": [1, "a", None, [], {"b": 1}]},
    {**INT, "enum": [1, 2]},
    {"type": ["integer", "null"], "enum": [1, None]},
    {**INT, "minimum": -3, "maximum": 12},
    {**INT, "exclusiveMinimum": 0, "exclusiveMaximum": 5},
    {**INT, "minimum": 1e3, "maximum": 2e3},
    {**NUM, "minimum": 0.5, "maximum": 1.25},
    {**NUM, "exclusiveMinimum": -0.5, "maximum": 0},
    {**NUM, "minimum": -1e300},
    {**STR, "minLength": 2, "maxLength": 3},
    {**STR, "minLength": 1},
    {**STR, "maxLength": 0},
    {**STR, "pattern": "^a[0-9]{2}b?$"},
    {**STR, "pattern": "x|y"},
    {**STR, "pattern": '^[^"]{1,3}$'},
    {**STR, "pattern": "^[\\u4e00-\\u9fa5]$"},
    *({**STR, "format": name} for name in ("date", "email", "uuid", "ipv4", "date-time")),
    {"type": ["string", "null"], "maxLength": 2},
    {"type": ["integer", "string"], "minimum": 3, "maxLength": 1},
    {**ARR, "items": INT},
    {**ARR, "items": {**STR, "maxLength": 1}, "minItems": 2, "maxItems": 3},
    {**ARR, "prefixItems": [STR, INT], "items": False, "minItems": 2},
    {**ARR, "items": False},
    {**OBJ, "properties": {"a": INT, "b": STR}, "required": ["b"]},
    {"properties": {"a": INT}, "required": ["a"]},
    {**CLOSED, "properties": {"": INT, 'a"b': {"type": "null"}, "é": INT}, "required": ["", "é"]},
    {**OBJ, "properties": {"a": INT}, "additionalProperties": {"type": "boolean"}},
    {**OBJ, "additionalProperties": INT, "propertyNames": STR},
    {**OBJ, "patternProperties": {"^x[0-9]$": INT}},
    {
        **CLOSED,
        "properties": {"a": INT, "b": INT, "c": INT},
        "minProperties": 1,
        "maxProperties": 2,
    },
    {"anyOf": [INT, {"type": "null"}]},
    {"oneOf": [{"const": 1}, {"enum": ["a", 2]}]},
    {"oneOf": [kind("x"), kind("y")], "discriminator": {"propertyName": "kind"}},
    {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": kind("x"), "y": INT}},
    {"allOf": [{"$ref": "#/definitions/a"}], "description": "d", "definitions": {"a": INT}},
    {**CLOSED, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    {**CLOSED, "properties": {"a": {"$ref": "#/properties/b"}, "b": INT}, "required": ["a"]},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"minimum": 3}, "minimum"),
    ({"type": "array", "items": [1]}, "items"),
    ({"maxLength": 2}, "maxLength"),
    ({"required": ["a"]}, "required"),
    ({**OBJ, "properties": {"a": INT}, "required": ["b"]}, "required"),
    ({**STR, "const": 1}, "type"),
    ({**INT, "enum": [1, "a"]}, "type"),
    ({"enum": ["abc"], "maxLength": 2}, "maxLength"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INT}}, "minimum"),
    ({"anyOf": [{"required": ["a"]}], **OBJ}, "anyOf"),
    ({"anyOf": []}, "anyOf"),
    ({"allOf": [INT, {"minimum": 3}]}, "allOf"),
    ({"oneOf": [INT, NUM]}, "oneOf"),
    ({"oneOf": [kind("x"), kind("x")]}, "oneOf"),
    *(
        ({"type": ["integer", "array", "object"], word: value}, word)
        for word, value in {
            **{"not": {}, "if": {}, "multipleOf": -1, "uniqueItems": True, "contains": {}},
            **{"dependentRequired": {}, "unevaluatedProperties": False, "$dynamicRef": "#"},
        }.items()
    ),
    ({"$ref": "#"}, "$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "$ref"),
    ({"$ref": "http://example.com"}, "$ref"),
    ({**INT, "minimum": 0, "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({**INT, "maximum": 2**64 - 1}, "maximum"),
    ({**NUM, "minimum": "1"}, "minimum"),
    ({**NUM, "minimum": 1e-7}, "minimum"),
    ({**NUM, "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.100001}, "exclusiveMinimum"),
    ({**STR, "minLength": -1}, "minLength"),
    ({**STR, "minLength": 1, "pattern": "a"}, "pattern"),
    ({**STR, "pattern": '^"$'}, "pattern"),
    ({**STR, "pattern": "^\\n$"}, "pattern"),
    ({**STR, "pattern": "^(?!a)"}, "pattern"),
    ({**STR, "format": "json-pointer"}, "format"),
    ({**STR, "format": "wat"}, "format"),
    ({"type": []}, "type"),
    ({**OBJ, "properties": {"a": INT}, "patternProperties": {"b": STR}}, "patternProperties"),
    ({**OBJ, "propertyNames": {"maxLength": 2}}, "propertyNames"),
]


def nested(schema: dict[str, Any]) -> dict[str, Any]:
    """The same inside of others; what it refers to stays where it is."""
    definitions: dict[str, Any] = {
        name: schema[name] for name in ("$defs", "definitions") if name in schema
    }
    inner = {k: v for k, v in schema.items() if k not in definitions}
    items = {**ARR, "items": {"anyOf": [inner, {"type": "null"}]}, "maxItems": 2}
    return {**definitions, **CLOSED, "properties": {"list": items}, "required": ["list"]}


def check_obeyed(schema: dict[str, Any]) -> None:
    taken = prepared(schema)
    validate_xgrammar_grammar(
        SamplingParams(structured_outputs=StructuredOutputsParams(json=taken))
    )
    validator, seen = jsonschema.Draft202012Validator(schema), 0
    for text in answers(taken, WALKS):
        validator.validate(json.loads(text))
        seen += 1
    assert seen, "no walk came to its end"


def refers_to_its_root(schema: dict[str, Any]) -> bool:
    return '"#"' in json.dumps(schema) or '"#/properties' in json.dumps(schema)


def test_every_answer_obeys_its_schema() -> None:
    with Failures() as failures:
        for schema, inside in product(OBEYED, (False, True)):
            if inside and refers_to_its_root(schema):
                continue
            with failures.of(schema, inside):
                check_obeyed(nested(schema) if inside else schema)


@each("schema, keyword", REFUSED)
def test_what_would_not_be_obeyed_is_refused_by_its_keyword(
    schema: dict[str, Any], keyword: str
) -> None:
    for whole in (schema, schema if refers_to_its_root(schema) else nested(schema)):
        with pytest.raises(NotObeyed) as caught:
            prepared(whole)
        assert f"'{keyword}'" in str(caught.value)
    tool = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(NotObeyed):
        prepared_in_tag({"format": {"elements": [tool]}})
    with pytest.raises(NotObeyed):
        prepared_in_tag({"structures": [{"begin": "<", "schema": schema, "end": ">"}]})


@each("schema", [True, None, 3, {"type": "wat"}, {"properties": []}])
def test_what_is_no_schema_is_left_to_xgrammar(schema: Any) -> None:
    assert prepared(schema) == schema


@each(
    "text",
    [
        "root ::= root",
        "root ::= (root){0,20}",
        "root ::= # c\r (root){0,20}\n",
        'root ::= (root){0,20} (="x")',
        'root ::= "" ((root){2}){3,} # root',
        'root ::= "a" x\nx ::= (y){0,4}\ny ::= (x){1}',
        "root ::= a{3}\na ::= b{3}\nb ::= c{3}\nc ::= a",
        "start: start~2..20 -> x\n",
        "start: [start]~2..20\n",
        'start: start~2..20\n%ignore " "\n',
        "start: [a]\na: start~0..20\n",
    ],
)
def test_a_grammar_that_would_end_the_engine_is_refused(text: str) -> None:
    with pytest.raises(NotObeyed, match="only itself"):
        check_grammar(text)
    with pytest.raises(NotObeyed, match="only itself"):
        check_parts({"format": [{"grammar": text}]})


@each(
    "text",
    [
        "(.{0,8}){0,8}",
        "(x{0,20}){0,50}",
        "((.{0,4}){0,4}){0,4}",
        "a(b|(.{0,50}){0,20})c",
        "(.*){0,50}",
        "((((a|b){1,9}){1,9}){1,9}){1,9}",
        "^([a-z]{0,20}){0,50}$",
        "(.{0,8})*",
        "(.{1,8})+",
        "(.{0,8}){2,}",
        "((.{0,2})*){0,3}",
    ],
)
def test_repetitions_of_repetitions_that_hold_up_an_engine_are_refused(text: str) -> None:
    with pytest.raises(NotObeyed, match="more than 12"):
        check_regex(text)
    nodes: list[Any] = [{"pattern": text}, {"patternProperties": {text: {}}}]
    for node in nodes:
        with pytest.raises(NotObeyed, match="more than 12"):
            check_parts({"properties": {"pattern": {"anyOf": [node]}}})


def test_so_are_those_of_a_grammar() -> None:
    for text in (
        'root ::= (("x"{0,20}){0,50})',
        "root ::= ([a-z] {0,50}) # \r {0,20}",
        "root ::= a{100}\na ::= b{100}\nb ::= [a-z]{0,100}",
        "\n".join(["root ::= a0{2}", *(f"a{n} ::= a{n + 1}" for n in range(49)), 'a49 ::= "x"']),
    ):
        with pytest.raises(NotObeyed, match="more than 12"):
            check_grammar(text)


def test_so_are_those_of_a_tag() -> None:
    given: dict[str, Any] = {"type": "regex", "pattern": ".{0,8}"}
    for repeat in ({"type": "repeat", "min": 0, "max": 8}, {"type": "star"}, {"type": "plus"}):
        tag = {"type": "structural_tag", "format": {**repeat, "content": given}}
        with pytest.raises(NotObeyed, match=r"structural tag .* more than 12"):
            check_parts(tag)
    once = {"type": "repeat", "min": 0, "max": 8, "content": {**given, "pattern": "a.{8}"}}
    check_parts({"type": "structural_tag", "format": once})


def test_what_is_used_is_left_to_the_engine() -> None:
    for text in (
        'root ::= "(" root{0,3} ")"',
        'root ::= a "b"\na ::= (root)? "x" | a',
        'root ::= expr\nexpr ::= expr "+" expr | [0-9]+',
        "start: one\none: two~2\ntwo: /a/~1..3\n",
        str(Grammar.builtin_json_grammar()),
        "root ::= (",
        "\0",
    ):
        check_grammar(text)
    for text in (
        r"^[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}\.[A-Za-z]{2,10}$",
        r"(25[0-5]|2[0-4]\d|[01]?\d\d?)(\.(25[0-5]|2[0-4]\d|[01]?\d\d?)){3}",
        r"([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
        r"^\w{1,50}( \w{1,50}){0,4}$",
        r"^(\w+\s?){1,10}$",
        r"^(\w+ ){0,19}\w+$",
        r"^([a-z]{1,20},){0,4}[a-z]{1,20}$",
        r"(- .{1,80}\n){1,10}",
        r"(\d{4}-\d{2}-\d{2}(, )?){1,10}",
        r"(yes|no|maybe){1,100}",
        r"(.{10}){100}",
        r"(a?){9}",
        r"(\d{1,3})+",
        r"(.{10})*",
        r"([a-z]+)*",
        r"(\w{1,20} )*",
        r".{0,10000}",
        r"(",
    ):
        check_regex(text)
