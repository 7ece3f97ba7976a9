"""Expressions that are small to send and that would hold up an engine are refused, and those that
people use are not.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from tests.tables import each
from workers.repetitions import MOST_STATES, TooManyStates, states_of_grammar, states_of_regex
from workers.schemas import NotObeyed, Size, prepared, prepared_in_tag

USED = [
    "^[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}\\.[A-Za-z]{2,10}$",
    "(25[0-5]|2[0-4]\\d|[01]?\\d\\d?)(\\.(25[0-5]|2[0-4]\\d|[01]?\\d\\d?)){3}",
    "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "^[a-z0-9]+(?:-[a-z0-9]+)*$",
    "^\\w{1,50}( \\w{1,50}){0,4}$",
    "(\\w{1,20} ){1,20}",
    "(\\w+\\s+){0,100}",
    "([A-Z][a-z]+ ?){1,5}",
    "(\\d{4}-\\d{2}-\\d{2}(, )?){1,10}",
    "(yes|no|maybe){1,100}",
    "(.{10}){100}",
    "((.+)+)+",
    ".{0,10000}",
    "[\\u4e00-\\u9fa5]{1,200}",
]
HELD_UP = [
    "(x{0,20}){0,50}",
    "(.{0,8}){0,8}",
    "((.{0,4}){0,4}){0,4}",
    "(.{0,50}){0,20}",
    "(\\w+\\s?){0,12}",
    "(.*){0,50}",
    "(.{1,9}?a){1,20}",
    "([^,]{1,9}b){1,20}",
    "(a|ab|.){1,100}",
    "(?:x{0,20}|y){0,50}",
    ".{0,2}" * 20,
    "((a{9999}){9999}){9999}",
]
GRAMMARS_USED = [
    'root ::= "a" root | "b"',
    'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")" # a term',
    'root ::= "[" ws (value ("," ws value)*)? "]"\nvalue ::= root | [a-z]+ ws\nws ::= [ \\n\\t]*',
    'start: pair ("," pair)*\npair: NAME "=" /[0-9]{1,4}/\nNAME: /[a-z]+/\n',
]
GRAMMARS_HELD_UP = [
    'root ::= (("x"{0,20}){0,50})',
    "root ::= a{100}\na ::= b{100}\nb ::= [a-z]{0,100}",
    "start: word~1..20\nword: /[a-z]{0,20}/\n",
    "start: (/(.{0,8}){0,8}/)\n",
]


@each("text", USED)
def test_what_is_used_is_taken(text: str) -> None:
    assert states_of_regex(text) <= MOST_STATES


@each("text", HELD_UP)
def test_what_holds_up_the_engine_is_refused_wherever_it_stands(text: str) -> None:
    assert states_of_regex(text) > MOST_STATES
    schema = {"type": "string", "pattern": text}
    names: dict[str, Any] = {"type": "object", "patternProperties": {text: {"type": "null"}}}
    for whole, keyword in ((schema, "pattern"), (names, "patternProperties")):
        with pytest.raises(NotObeyed, match=rf"'{keyword}'.*#/items.*{MOST_STATES} states"):
            prepared({"type": "array", "items": whole})
    for tag in ({"type": "regex", "pattern": text}, {"type": "json_schema", "json_schema": schema}):
        with pytest.raises(NotObeyed):
            prepared_in_tag({"format": {"elements": [tag]}})


def test_so_are_grammars() -> None:
    for text in GRAMMARS_USED:
        assert states_of_grammar(text) <= MOST_STATES, text
    for text in GRAMMARS_HELD_UP:
        assert states_of_grammar(text) > MOST_STATES, text
        with pytest.raises(NotObeyed, match="'grammar'"):
            prepared_in_tag({"format": {"type": "grammar", "grammar": text}})


@each(
    "text",
    [
        "root ::= root",
        "root ::= (root){0,20}",
        'root ::= "" ((root){2}){3,} # root',
        'root ::= "a" x\nx ::= (y)*\ny ::= (x){1}',
        "root ::= a{3}\na ::= b{3}\nb ::= c{3}\nc ::= a",
        "start: one\none: two~2\ntwo: one~1..3",
    ],
)
def test_a_rule_that_is_nothing_but_itself_is_refused(text: str) -> None:
    """The engine's process would die of it."""
    with pytest.raises(TooManyStates, match="nothing but itself"):
        states_of_grammar(text)


def test_a_rule_that_leads_to_itself_is_taken() -> None:
    for text in ('root ::= "(" root{0,3} ")"', 'root ::= a "b"\na ::= (root)? "x" | a'):
        assert states_of_grammar(text)


def test_a_request_is_measured_as_a_whole_and_each_expression_once() -> None:
    def of(lengths: range) -> dict[str, Any]:
        texts = {str(n): {"type": "string", "maxLength": n} for n in lengths}
        return {"type": "object", "properties": {**texts, "again": {**texts[str(lengths[0])]}}}

    assert prepared(of(range(81, 101)))
    assert prepared({"anyOf": [{"type": "string", "maxLength": 9_000}] * 1_000})
    for many in (range(1, 129), range(5_000, 5_100)):
        with pytest.raises(NotObeyed, match=r"#/properties.*states"):
            prepared(of(many))
    tools = [{"type": "json_schema", "json_schema": of(range(n, n + 20))} for n in (60, 80, 100)]
    assert prepared_in_tag(tools[:1])
    with pytest.raises(NotObeyed):
        prepared_in_tag(tools)


@each(
    "text",
    [
        "(" * 101,
        "{" + " " * 2_000,
        "[" * 2_000,
        "(a|" * 90 + "b" * 1_000,
        "\\" * 2_047,
        "a" + "?" * 2_000,
        "~" * 2_000,
        '"' * 2_000,
        "root ::= " + "a " * 8_000,
        "\n".join(f"a{n} ::= a{n + 1} a{n + 1}" for n in range(200)),
    ],
)
def test_any_text_is_measured_in_steps_that_its_length_bounds(text: str) -> None:
    for measured in (states_of_regex, states_of_grammar):
        with suppress(TooManyStates):
            assert measured(text) >= 0


def test_a_size_says_what_is_too_large() -> None:
    with pytest.raises(NotObeyed, match=r"^'regex' is too large: its repetitions .*\.$"):
        Size().add("regex", HELD_UP[0], "")
