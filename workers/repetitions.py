"""How large a regular expression or grammar becomes for xgrammar. Pure.

xgrammar unrolls what is repeated, and follows every way to read what is written so far. Where one
repetition may end and the next begin with the same character (`(.{0,8}){0,8}`), the ways multiply,
and a step of the engine takes seconds, for all of its requests. Both are counted here in states,
before an engine is asked: what is repeated counts as often as it may appear, and a run of ambiguous
repetitions counts as the square of its length.

Measured with xgrammar 0.2.8, a vocabulary of 128,000 tokens and one thread: 100 states compile in
one or two seconds. A token of `(.{0,4}){0,4}` takes less than half a second, of `(.{0,8}){0,8}` two
and more, and of `(\\w{1,20} ){1,20}`, which is not ambiguous, a hundredth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

MOST_STATES = 2_048
_WEIGHT, _MOST_PER_PIECE = 8, 4
"""Of the square of an ambiguous run's length, in pieces of at most so many states each: what is
longer takes no longer per token.
"""
SHARED = 256
"""Times beyond which xgrammar counts by its own rule, but in the patterns of a JSON schema."""
_MOST_NESTED = 100
_MANY = 10**9
"""States beyond which counting stops to matter."""

_ANY = (1 << 129) - 1
"""A set of characters: a bit for each of ASCII, and one for all others."""
_ASCII = [chr(code) for code in range(128)]


def _set(chars: Iterable[str]) -> int:
    found = 0
    for char in chars:
        found |= 1 << min(ord(char), 128)
    return found


_DIGITS, _SPACES = _set("0123456789"), _set(" \t\n\r\f\v")
_WORD = _set(char for char in _ASCII if char.isalnum() or char == "_")
_CLASSES = {
    "d": _DIGITS,
    "D": _ANY & ~_DIGITS,
    "s": _SPACES | 1 << 128,
    "S": _ANY & ~_SPACES,
    "w": _WORD,
    "W": _ANY & ~_WORD,
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


class TooManyStates(Exception):
    """It would become larger than `MOST_STATES`, or is nested too deeply; the message says so."""


class _Part(NamedTuple):
    """A part of an expression."""

    chars: int
    begin: int
    """The characters with which it may begin."""
    least: int
    most: int
    """Its length in characters; at most `_MANY`."""
    states: int
    pieces: int = 0
    """Repetitions that may end at several places; 0 if its own characters show where it ends."""
    ways: int = 0
    """How many places xgrammar tells apart; 0 for loops."""


class _Run(NamedTuple):
    """Parts of no fixed length in a row, with nothing between that shows where one ends."""

    chars: int = 0
    pieces: int = 0
    ways: int = 0
    ambiguous: bool = False
    closed: int = 0
    """Runs before it."""

    def then(self, part: _Part) -> _Run:
        run = self
        if part.least and run.chars and not part.begin & run.chars:
            run = _Run(closed=run.closed + 1)
        if not part.pieces:
            return run
        return _Run(
            run.chars | part.chars,
            run.pieces + part.pieces,
            run.ways + part.ways,
            run.ambiguous or bool(part.begin & run.chars),
            run.closed,
        )

    @property
    def states(self) -> int:
        return _ambiguous(self.pieces, self.ways) if self.ambiguous else 0


def _ambiguous(pieces: int, ways: int) -> int:
    return min(_WEIGHT * min(ways, _MOST_PER_PIECE * pieces) ** 2, _MANY)


def _atom(chars: int) -> _Part:
    return _Part(chars, chars, 1, 1, 1)


def _sequence(parts: Sequence[_Part]) -> _Part:
    run, states, chars, begin, least = _Run(), 0, 0, 0, 0
    for part in parts:
        after = run.then(part)
        states += part.states + (run.states if after.closed > run.closed else 0)
        begin |= 0 if least else part.begin
        run, chars, least = after, chars | part.chars, least + part.least
    most = sum(part.most for part in parts)
    return _made(_Part(chars, begin, least, most, states + run.states), parts)


def _choice(branches: Sequence[Sequence[_Part]]) -> _Part:
    parts = [_sequence(branch) for branch in branches]
    if len(parts) == 1:
        return parts[0]
    chars = begin = 0
    for part in parts:
        chars, begin = chars | part.chars, begin | part.begin
    least, most = min(part.least for part in parts), max(part.most for part in parts)
    told = sum(part.begin.bit_count() for part in parts) == begin.bit_count()
    other = [] if told or least == most else [_Part(0, 0, 0, 0, 0, 1, 1)]
    states = sum(part.states for part in parts)
    return _made(_Part(chars, begin, least, most, states), [*parts, *other])


def _made(made: _Part, parts: Sequence[_Part]) -> _Part:
    """A part with the pieces and ways of those of which it is made."""
    pieces, ways = sum(part.pieces for part in parts), sum(part.ways for part in parts)
    least, most, *counts = (min(one, _MANY) for one in (*made[2:5], pieces, ways))
    return _Part(made.chars, made.begin, least, most, *counts)


def _repeated(
    branches: Sequence[Sequence[_Part]], least: int, most: int | None, unrolled: bool
) -> _Part:
    """What stands between brackets, so many times; `most`: None for without end."""
    body = _choice(branches)
    times = max(1, least if most is None else most)
    pieces, ways, states = (
        1,
        0 if most is None and least <= 1 else times,
        body.states * (times if unrolled else min(times, SHARED)),
    )
    if body.pieces and (most is None or most > 1):
        items = branches[0] if len(branches) == 1 else [body]
        run = _Run()
        for part in items:
            run = run.then(part)
        closed = run.closed
        for part in items:
            run = run.then(part)
        pieces = times
        if run.closed == closed:  # nothing shows where the next one begins
            pieces, ways = times * body.pieces, times * max(body.pieces, body.ways)
            states += _ambiguous(pieces, ways) if pieces > 1 else 0
    longest = _MANY if most is None else most
    made = _Part(body.chars, body.begin, body.least * least, body.most * longest, states)
    if not body.pieces and least == most:
        pieces = ways = 0
    return _made(made, [made._replace(pieces=pieces, ways=ways)])


_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*|//[^\n]*)|(?P<space>\s+)|(?P<head>[?!]?[A-Za-z_][\w.-]*\s*:(?::=)?)
    |(?P<text>"(?:\\.|[^"\\])*")|(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)|(?P<name>[A-Za-z_][\w.-]*)""",
    re.VERBOSE | re.DOTALL,
)
"""What a grammar has, and a regular expression has not."""
_BESIDE_NAMES = re.compile(
    r"""\#[^\n]*|//[^\n]*|""|[()?*+]|\{[^{}]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?""", re.ASCII
)
"""Of a rule that is nothing but a reference: comments, brackets and counts."""
_CLASS = re.compile(r"\[(\^?)((?:\\.|[^\]\\])*+)\]?", re.DOTALL)
_CHAR = re.compile(
    r"\\(?:u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|.)|.", re.DOTALL
)
_COUNT = re.compile(r"\{\s*+(\d*+)\s*+(,?)\s*+(\d*+)\s*+\}|~\s*+(\d++)\s*+(?:\.\.\s*+(\d++))?")


def _chars(char: str) -> int:
    """Of one character of an expression, escaped or not."""
    if char[0] != "\\" or len(char) == 1:
        return _set(char)
    kind, code = char[1], char[2:].strip("{}")
    if kind in "ux" and code:
        return 1 << min(int(code, 16), 128)
    return _CLASSES.get(kind) or (_ANY if kind in "pP" else _set(_CONTROLS.get(kind, kind)))


def _class(negated: str, inside: str) -> int:
    found, chars = 0, _CHAR.findall(inside)
    for number, char in enumerate(chars):
        if char == "-" and 0 < number < len(chars) - 1:
            first, last = _chars(chars[number - 1]), _chars(chars[number + 1])
            found |= (last << 1) - 1 & ~(first - 1)  # all bits between
        found |= _chars(char)
    return _ANY & ~found if negated else found


class _Counter:
    """Reads one expression, or the rules of a grammar."""

    def __init__(self, rules: dict[str, str] | None = None, unrolled: bool = False) -> None:
        self._rules = rules
        self._unrolled = unrolled
        self._known: dict[str, _Part] = {}
        self._through: list[str] = []

    def whole(self, text: str) -> _Part:
        """The part that a text describes."""
        branches: list[list[_Part]] = [[]]
        stack: list[list[list[_Part]]] = []
        place = 0
        while place < len(text):
            last: list[list[_Part]]
            char = text[place]
            if self._rules is not None and (token := _TOKEN.match(text, place)):
                place = token.end()
                if (part := self._of(token)) is None:
                    continue
                last = [[part]]
            elif char in "(|)^$":
                place += 1
                if char == "(":
                    if len(stack) == _MOST_NESTED:
                        raise TooManyStates(f"more than {_MOST_NESTED} groups in each other")
                    stack.append(branches)
                    branches = [[]]
                    place += 2 * text.startswith("?:", place)
                elif char == "|":
                    branches.append([])
                if char != ")" or not stack:
                    continue
                last, branches = branches, stack.pop()
            elif char == "[" and (found := _CLASS.match(text, place)):
                place, last = found.end(), [[_atom(_class(*found.groups()))]]
            else:
                found = _CHAR.match(text, place)
                assert found is not None
                place = found.end()
                any_ = char == "." and self._rules is None
                last = [[_atom(_ANY if any_ else _chars(found.group()))]]
            place, part = self._quantified(last, text, place)
            branches[-1].append(part)
        while stack:  # a bracket that nothing closes: xgrammar says so
            inner, branches = _choice(branches), stack.pop()
            branches[-1].append(inner)
        return _choice(branches)

    def _quantified(self, last: list[list[_Part]], text: str, place: int) -> tuple[int, _Part]:
        """What was read, with the counts behind it."""
        part: _Part | None = None
        while place < len(text):
            counts = _COUNT.match(text, place)
            if text[place] in "*+?":
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[text[place]]
                place += 1
            elif counts:
                first, comma, end, times, up_to = counts.groups()
                least = _number(first or times)
                most = _number(up_to or times) if times else _number(end) if end else None
                most = least if not times and not comma else most
                place = counts.end()
            else:
                break
            if part is not None and (least, most) == (0, 1):
                continue  # a lazy repetition
            part = _repeated(last if part is None else [[part]], least, most, self._unrolled)
        return place, part or _choice(last)

    def _of(self, token: re.Match[str]) -> _Part | None:
        kind, text = token.lastgroup, token.group()
        if kind == "text":
            return _sequence([_atom(_chars(char)) for char in _CHAR.findall(text[1:-1])])
        if kind == "regex":
            return _Counter().whole(text[1 : text.rindex("/")])
        if kind != "name":
            return None
        return self.rule(text)._replace(states=1)

    def rule(self, name: str) -> _Part:
        """The part that a rule of the grammar describes; what is recursive is unknown."""
        assert self._rules is not None
        if name in self._through or name not in self._rules:
            return _Part(_ANY, _ANY, 0, _MANY, 1)
        if name not in self._known:
            if len(self._through) == _MOST_NESTED:
                raise TooManyStates(f"more than {_MOST_NESTED} rules in each other")
            self._through.append(name)
            self._known[name] = self.whole(self._rules[name])
            self._through.pop()
        return self._known[name]


def _number(digits: str) -> int:
    return int(digits[-9:] if len(digits) < 10 else _MANY) if digits else 0


def states_of_regex(text: str, unrolled: bool = False) -> int:
    """How many states a regular expression becomes.

    Args:
        unrolled: as the patterns of a JSON schema.

    Raises:
        TooManyStates: it is nested too deeply to tell.
    """
    return _Counter(unrolled=unrolled).whole(text).states


def states_of_grammar(text: str) -> int:
    """How many states a grammar becomes, in EBNF or Lark's syntax.

    Raises:
        TooManyStates: its rules lead to each other too deeply to tell.
    """
    heads = [token for token in _tokens(text) if token.lastgroup == "head"]
    ends = [*(token.start() for token in heads[1:]), len(text)]
    rules: dict[str, str] = {}
    for token, end in zip(heads, ends, strict=False):
        name = token.group().rstrip(":= \t\r\n").lstrip("?!")
        rules[name] = text[token.end() : end]
    _check_ends(rules)
    counter = _Counter(rules)
    return min(sum(counter.rule(name).states for name in rules), _MANY)


def _check_ends(rules: Mapping[str, str]) -> None:
    """Refuse rules that are nothing but repetitions of each other: on these xgrammar crashes.

    Raises:
        TooManyStates: there are some.
    """
    bare = {name: _BESIDE_NAMES.sub(" ", text).split() for name, text in rules.items()}
    same = {name: words[0] for name, words in bare.items() if len(words) == 1}
    for name in same:
        seen = {name}
        while (name := same.get(name, "")) not in seen and name:
            seen.add(name)
        if name:
            raise TooManyStates(f"the rule '{name[:80]}' never ends, as it is nothing but itself")


def _tokens(text: str) -> Iterable[re.Match[str]]:
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place) or _CLASS.match(text, place)
        if found is not None:
            yield found
        place = found.end() if found else place + 1


def check(states: int) -> None:
    """Refuse what becomes too large.

    Raises:
        TooManyStates: so it is.
    """
    if states > MOST_STATES:
        raise TooManyStates(
            f"its repetitions expand to more than {MOST_STATES} states. Repeat less often, or put "
            "a fixed character between repetitions"
        )
