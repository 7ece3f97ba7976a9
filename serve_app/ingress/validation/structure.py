"""Parses a body's bytes into values at bounded cost, whatever the bytes are. Pure.

A list of nulls needs more memory than its text, and one call of a decoder blocks the whole process.
Values are therefore counted in the bytes before any is created. Long texts are checked piece by
piece, and only their beginning is kept. Finally depth is checked everywhere.

JSON has one type of number: what has no fractional part is read as an integer, however it is
written (`64.0`, `6.4e1`), as vLLM does.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from serve_app.contract import Reason
from serve_app.errors import RequestRefused, invalid
from serve_app.settings.limits import RequestLimits

PIECE_BYTES = 1 << 20
"""Bytes checked in one step, which takes a few milliseconds. Of no larger body a text is cut."""
_BEGINNING_BYTES = 1 << 20
"""How much of a longer text is kept; more characters than any limit on the length of a text."""
_LARGE_DEPTH = 16
"""Allowed depth of values larger than a piece, because each level is scanned again."""

_decode = msgspec.json.Decoder().decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode

_QUOTE = re.compile(b'"')
_NO_MARKS = bytes(set(range(256)) - set(b",[{"))
_NO_MARKS_OR_QUOTES = bytes(set(range(256)) - set(b'",[{'))
_SURROGATE_HIGH, _SURROGATE_LOW = rb"[dD][89abAB][0-9a-fA-F]{2}", rb"[dD][c-fC-F][0-9a-fA-F]{2}"
_TEXT = re.compile(
    rb"(?:[^\"\\\x00-\x1f]{1,65536}+|\\[\"\\/bfnrt]|\\u%s\\u%s"
    rb"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}){1,16384}+" % (_SURROGATE_HIGH, _SURROGATE_LOW)
)
"""Matches a part of a JSON text between its quotes, without lone surrogates and without
backtracking.
"""
_LONE_SURROGATE = re.compile(
    rb"\\u(?:%s(?!\\u%s)|%s(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}))"
    % (_SURROGATE_HIGH, _SURROGATE_LOW, _SURROGATE_LOW)
)
"""Matches the escape of half a pair, if no backslash before it is escaped."""
_HALF_A_PAIR = (
    "A text of the request contains half of a surrogate pair (an escape such as \\ud83d without "
    "the other half), which is no character."
)
_LOOKED_INTO = {float, dict, list}


def read(body: bytes, limits: RequestLimits) -> Any:
    """Parse a body. Of texts longer than a megabyte, only the beginning is kept. Refuses what is no
    JSON (`malformed_json`), what exceeds the limits, and numbers and texts that cannot be
    represented.
    """
    _count(body, limits)
    text = body.strip()
    if not text:
        raise _not_json("it is empty")
    if b"\0" in text[:4]:
        raise _not_json("it is not encoded in UTF-8")
    try:
        value = _load(text, _LARGE_DEPTH)
    except UnicodeDecodeError as error:
        raise _not_json(f"a text in it is not encoded in UTF-8 ({error.reason})") from None
    except msgspec.ValidationError:
        raise invalid(
            "The request contains a number that cannot be represented: it is beyond 1.8e308 or "
            "has more than 4300 digits."
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        if any(_LONE_SURROGATE.search(piece) for piece in _unescaped(body)):
            raise invalid(_HALF_A_PAIR) from None  # msgspec has no word of its own for it
        raise _not_json(str(error).removeprefix("JSON is malformed: ")) from None
    if type(value) in (dict, list):
        _normalise(value, limits)
    return value


def _not_json(why: str) -> RequestRefused:
    return RequestRefused(Reason.MALFORMED_JSON, f"The body is not valid JSON: {why}.")


def _count(body: bytes, limits: RequestLimits) -> None:
    """Refuse too many values before any of them is created."""
    texts = body.count(b'"') // 2
    marks = (piece.translate(None, _NO_MARKS) for piece in _pieces(body))
    if _excess(marks, texts, limits) is None:
        return  # the usual case: this count even includes the content of texts
    texts, outside = 0, []
    for piece in _unescaped(body):
        parts = piece.translate(None, _NO_MARKS_OR_QUOTES)
        quotes = parts.count(b'"')
        if texts + quotes > 2 * limits.max_texts:
            raise too_many("texts", limits.max_texts)
        outside.append(b"".join(parts.split(b'"')[texts % 2 :: 2]))
        texts += quotes
    if problem := _excess(outside, texts // 2, limits):
        raise too_many(*problem)


def _excess(marks: Iterable[bytes], texts: int, limits: RequestLimits) -> tuple[str, int] | None:
    """What there may be too much of: marks bound the numbers of values, and of lists and
    objects.
    """
    values = containers = 0
    for piece in marks:
        values += len(piece)
        containers += len(piece) - piece.count(b",")
    if values > limits.max_values:
        return "values", limits.max_values
    if containers > limits.max_containers:
        return "lists and objects", limits.max_containers
    return ("texts", limits.max_texts) if texts > limits.max_texts else None


def too_many(what: str, limit: int, param: str | None = None) -> RequestRefused:
    """The refusal of a request with too many, too long or too deep values."""
    place = f"'{param}'" if param else "The request"
    return invalid(f"{place} contains more than {limit} {what}.", param)


def _pieces(body: bytes) -> Iterator[bytes]:
    return (body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))


def _unescaped(body: bytes) -> Iterator[bytes]:
    """The body without escaped backslashes and quotes: every remaining quote begins or ends a
    text.
    """
    rest = b""
    for piece in _pieces(body):
        piece = rest + piece
        odd = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        rest = piece[len(piece) - odd :]
        yield piece[: len(piece) - odd].replace(b"\\\\", b"").replace(b'\\"', b"")
    yield rest


def _load(raw: bytes | msgspec.Raw, depth: int) -> Any:
    """Like `msgspec.json.decode`, except that long texts are shortened and each step is short."""
    if len(raw) <= PIECE_BYTES:
        return _decode(raw)
    if depth < 0:
        raise RecursionError("it is nested too deeply")
    view = memoryview(raw)
    kind = view[0]
    if kind == ord("{"):
        return {name: _load(value, depth - 1) for name, value in _decode_fields(view).items()}
    if kind == ord("[") and _QUOTE.search(view):
        return [_load(value, depth - 1) for value in _decode_items(view)]
    return _long_text(view) if kind == ord('"') else _decode(view)


def _long_text(quoted: memoryview) -> str:
    """The beginning of a text, after all of it was checked."""
    whole = bytes(quoted)
    if whole.isascii() and b"\\" not in whole:  # as in media: quick to check in one step, and small
        return str(_decode(whole))[:_BEGINNING_BYTES]
    position, end = 1, len(quoted) - 1
    kept = b""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    while position < end:
        part = _TEXT.match(quoted, position, min(end, position + PIECE_BYTES // 2))
        if part is None:
            if _LONE_SURROGATE.match(quoted, position):
                raise invalid(_HALF_A_PAIR)
            raise _not_json(f"a string contains an invalid character (near byte {position} of it)")
        utf8.decode(part.group())
        position = part.end()
        if len(kept) < _BEGINNING_BYTES:
            kept += part.group()
    utf8.decode(b"", True)
    text: str = _decode('"' + kept.decode("utf-8", "ignore") + '"')
    return text


def _normalise(value: Any, limits: RequestLimits, level: int = 1) -> None:
    """Make integers of all numbers without a fractional part, and refuse values that are nested too
    deeply, anywhere.
    """
    if level > limits.max_depth:
        raise too_many("levels of nested lists and objects", limits.max_depth)
    if type(value) is list and not _LOOKED_INTO & set(map(type, value)):
        return  # token ids, perhaps very many
    for place, item in value.items() if type(value) is dict else enumerate(value):
        kind = type(item)
        if kind is float:
            if item.is_integer():
                value[place] = int(item)
        elif kind in _LOOKED_INTO:
            _normalise(item, limits, level + 1)
