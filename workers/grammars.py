"""What a small grammar or regular expression can do to an engine: end its process, or make each of
its steps take seconds. Both are found in the form in which xgrammar writes what it has read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from vllm.v1.structured_output.utils import grammar_is_likely_lark
from xgrammar import Grammar

from workers.schemas import NotObeyed, prepared

_TERM = r"([\w.-]+)(?:\{(\d+), (-?\d+)\})?"
"""Another rule, or its repetition."""
_SAME = re.compile(rf"\(\({_TERM}\)\)(?: \(=.*)?")
"""The body of a rule that is nothing but that."""
_AGAIN = re.compile(rf"\((?:\"\" \| )?\({_TERM} ([\w.-]+)\)(?: \| \(\1(?:\{{\2, \3\}})?\))?\)")
"""The same without end: its last part is the rule's own name."""
_LOOP = re.compile(r"\(\(\[.*\]\*\)\)")
_REPEATED = re.compile(r"([\w.-]+)\{\d+, (-?\d+)\}")
_MOST_TIMES = 12
"""How often a repetition may be repeated with nothing between. xgrammar (0.2.8) follows all ways to
divide what is written among them: a step of `(.{0,4}){0,3}` takes 0.1 s with a vocabulary of
128,000 tokens, of `(.{0,4}){0,5}` 0.8 s, of `(.{0,8}){0,8}` 1.8 s and more with each token.
"""
_ENDLESS = 3
"""For how many times one without end counts: `(.{0,4})*` takes about as long as `(.{0,4}){0,3}`."""
_MOST_NESTED = 48
"""Rules in a row that are nothing but the next."""
_KEPT, _KEPT_CHARS = 512, 4_096
"""How many schemas are remembered, and up to which length."""
_REPEATS = ("repeat", "plus", "star")
"""The formats of structural tags that repeat others."""


class _Same(NamedTuple):
    """A rule that is nothing but another one, so many times."""

    rule: str
    varies: bool
    most: int


def check_grammar(text: str) -> None:
    """See `_check`. A text that xgrammar cannot read is left to vLLM, which reads it, too.

    Args:
        text: in EBNF or in Lark's syntax.

    Raises:
        NotObeyed: an engine would not survive it, or would be held up.
    """
    lark = grammar_is_likely_lark(text)
    _check("grammar", Grammar.from_lark if lark else Grammar.from_ebnf, text)


def check_regex(text: str) -> None:
    """The same of a regular expression."""
    _check("regex", Grammar.from_regex, text)


def obeyed(schema: Any) -> Any:
    """A JSON schema as xgrammar is given it (`schemas.prepared`), which can compile it.

    Raises:
        NotObeyed: it cannot, its answers would not obey it, or an engine would not survive it.
    """
    text = json.dumps(schema, ensure_ascii=False)
    try:
        return (_made_before if len(text) <= _KEPT_CHARS else _made)(text)
    except NotObeyed as error:
        error.schema = schema
        raise


@lru_cache(maxsize=_KEPT)
def _made_before(text: str) -> Any:
    """An agent sends the schemas of its tools with every turn."""
    return _made(text)


def _made(text: str) -> Any:
    made = prepared(json.loads(text))
    check_parts(made)
    _check_readable(made)
    return made


def _check_readable(schema: Any) -> None:
    try:
        Grammar.from_json_schema(json.dumps(schema))
    except Exception as error:  # of whatever type
        for keyword, text in _parts(schema):
            try:
                Grammar.from_regex(text)
            except Exception as wrong:
                raise NotObeyed(f"Invalid '{keyword}' in the JSON schema: {wrong}") from None
        raise NotObeyed(f"Invalid JSON schema: {error}") from None


def check_parts(shape: Any) -> None:
    """The same of all expressions and grammars in a JSON schema or a structural tag."""
    for keyword, text in _parts(shape):
        if keyword == "tag":
            _check("structural tag", Grammar.from_structural_tag, text)
        elif keyword == "grammar":
            check_grammar(text)
        else:
            _check(keyword, Grammar.from_regex, text)


def _parts(shape: Any) -> Iterator[tuple[str, str]]:
    if isinstance(shape, Mapping):
        if shape.get("type") in _REPEATS:
            yield "tag", json.dumps({"type": "structural_tag", "format": shape})
        if isinstance(patterns := shape.get("patternProperties"), Mapping):
            yield from (("pattern", text) for text in patterns)
        for key, value in shape.items():
            if key in ("pattern", "grammar") and isinstance(value, str):
                yield key, value
            yield from _parts(value)
    elif isinstance(shape, list):
        for one in shape:
            yield from _parts(one)


def _check(what: str, read: Any, text: str) -> None:
    try:
        rules = [rule.partition(" ::= ")[::2] for rule in str(read(text)).split("\n")]
    except Exception:  # of whatever type
        return
    same: dict[str, _Same] = {}
    repeated: list[tuple[int, _Same]] = []
    for name, body in rules:
        repeated += [(_times(most), _Same(of, False, 1)) for of, most in _REPEATED.findall(body)]
        again = _AGAIN.fullmatch(body)
        if again and again[4] == name:
            term = _term(*again.group(1, 2, 3))
            repeated.append((_ENDLESS, term))
            same[name] = _Same(term.rule, True, _ENDLESS * term.most)
        elif found := _SAME.fullmatch(body):
            same[name] = _term(*found.groups())
        elif _LOOP.fullmatch(body):
            same[name] = _Same("", True, 1)
    _check_ends(same)
    for times, (of, varies, most) in repeated:
        depth = 0
        while of in same and depth < _MOST_NESTED and not (varies and times * most > _MOST_TIMES):
            of, one_varies, most_of_one = same[of]
            varies, most, depth = varies or one_varies, most * most_of_one, depth + 1
        if depth == _MOST_NESTED or (varies and times > 1 and times * most > _MOST_TIMES):
            raise NotObeyed(
                f"The {what} repeats what is nothing but a repetition more than {_MOST_TIMES} "
                "times. Put a fixed character between, or repeat once."
            )


def _term(rule: str, least: str | None, most: str | None) -> _Same:
    return _Same(rule, least != most, _times(most or "1"))


def _times(most: str) -> int:
    return _ENDLESS if most == "-1" else max(1, int(most))


def _check_ends(same: Mapping[str, _Same]) -> None:
    """Refuse a rule that is nothing but itself, or repetitions of itself, such as
    `root ::= (root){0,20}`: xgrammar crashes while it compiles it.
    """
    known: set[str] = set()
    for name in same:
        through: set[str] = set()
        while name in same and name not in known:
            known.add(name)
            through.add(name)
            name = same[name].rule
        if name in through:
            raise NotObeyed(f"The rule '{name[:80]}' of the grammar never ends: it is only itself.")
