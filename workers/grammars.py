"""What a small grammar or regular expression can do to an engine: end its process, or make each of
its steps take seconds. Both are found in the form in which xgrammar writes what it has read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vllm.v1.structured_output.utils import grammar_is_likely_lark
from xgrammar import Grammar

from workers.schemas import NotObeyed

_SAME = re.compile(r"\(\(([\w.-]+)(?:\{(\d+), (-?\d+)\})?\)\)(?: \(=.*)?")
"""The body of a rule that is nothing but another rule, or its repetition."""
_LOOP = re.compile(r"\(\(\[.*\]\*\)\)")
_REPEATED = re.compile(r"([\w.-]+)\{\d+, (\d+)\}")
_MOST_TIMES = 12
"""How often a repetition may be repeated with nothing between. xgrammar (0.2.8) follows all ways to
divide what is written among them: a step of `(.{0,4}){0,3}` takes 0.1 s with a vocabulary of
128,000 tokens, of `(.{0,4}){0,5}` 0.8 s, of `(.{0,8}){0,8}` 1.8 s and more with each token.
"""


class _Same(NamedTuple):
    """A rule that repeats another one so often; `most` is 1 for without end."""

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


def check_parts(shape: Any) -> None:
    """The same of all expressions and grammars in a JSON schema or a structural tag."""
    for keyword, text in _parts(shape):
        (check_grammar if keyword == "grammar" else check_regex)(text)


def _parts(shape: Any) -> Iterator[tuple[str, str]]:
    if isinstance(shape, Mapping):
        yield from (("pattern", text) for text in shape.get("patternProperties") or ())
        for key, value in shape.items():
            if key in ("pattern", "grammar") and isinstance(value, str):
                yield key, value
            yield from _parts(value)
    elif isinstance(shape, list):
        for one in shape:
            yield from _parts(one)


def _check(what: str, read: Any, text: str) -> None:
    try:
        rules = [rule.partition(" ::= ")[::2] for rule in str(read(text)).splitlines()]
    except Exception:  # of whatever type
        return
    same = {name: found for name, body in rules if (found := _same(body))}
    _check_ends(same)
    for _, body in rules:
        for name, most in _REPEATED.findall(body):
            times, varies = int(most), False
            while name in same and not (varies and times > _MOST_TIMES):
                name, one_varies, most_of_one = same[name]
                times, varies = times * most_of_one, varies or one_varies
            if varies and times > _MOST_TIMES and int(most) > 1:
                raise NotObeyed(
                    f"The {what} repeats what is nothing but a repetition, up to {times} times; at "
                    f"most {_MOST_TIMES} are taken. Put a fixed character between, or repeat once."
                )


def _same(body: str) -> _Same | None:
    if _LOOP.fullmatch(body):
        return _Same("", True, 1)
    found = _SAME.fullmatch(body)
    if not found:
        return None
    rule, least, most = found.groups("1")
    return _Same(rule, least != most, max(1, int(most)))


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
