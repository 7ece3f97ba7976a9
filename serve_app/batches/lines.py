"""The lines of a batch: what is wrong with each, the order of work, the index of a file that was
checked, and the lines of the output files. Pure.

The index has rows of `_ROW`, behind which stand the refusals of the bad lines, in the same order:

    row 0      the tokens of all lines, their number, the version, where the refusals begin
    row n      of the n-th line in the order of work: where it begins in the input file, its bytes,
               its number in the file, where its refusal ends
    refusals   of each bad line its reason, message and field, as JSON

Therefore any lines are found by one read, and their refusals, if there are any, by another.
Source of what a client reads: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import codecs
import hashlib
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import msgspec

from serve_app.contract import Reason
from serve_app.errors import RequestRefused

MAX_LINES = 50_000
"""Of one batch, as at OpenAI."""
MAX_ERRORS = 100
"""That are told of a file."""
_ID_CHARS = 512
_HEAD_CHARS = 64
"""About a block of an engine's cache of prompts, the least that two of them can share."""
_SHARED_ROLES = ("system", "developer")
_ROW = struct.Struct("<QIIQ")
_VERSION = 1
_REFUSAL_CHARS = 300
_UNFINISHED = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, because the batch was cancelled.",
}
"""By what has become of a batch, what it says of its lines without a result."""


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with an input file, or with one of its lines, the first of which is 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Row(NamedTuple):
    """Where the input file has a line."""

    line: int
    """Its number, the first is 1."""
    offset: int
    """Bytes before it."""
    length: int
    """Bytes."""
    refused: bytes = b""
    """Why its request is refused, if that is known, as in the index."""

    @property
    def bad(self) -> bool:
        return bool(self.refused)

    @property
    def refusal(self) -> RequestRefused:
        reason, message, param = msgspec.json.decode(self.refused)
        return RequestRefused(Reason(reason), message, param)


class Asked(NamedTuple):
    """What a good line asks."""

    custom_id: str
    body: bytes


class _Line(msgspec.Struct):
    """Of other fields nothing is kept, however many there are."""

    custom_id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


_line = msgspec.json.Decoder(_Line)
Check = Callable[[bytes], tuple[Mapping[str, Any], int]]
"""The fields and the tokens of a body; raises `RequestRefused`."""


class Checker:
    """Checks a file that comes in pieces, and holds no more of it than a line and a piece.

    Args:
        endpoint: of the batch, and so of each line.
        most_bytes: of a line.
        check: of a body.
        only: the lines that are wanted, as `ids_in` has them; None: all.
    """

    def __init__(
        self, endpoint: str, most_bytes: int, check: Check, only: Set[bytes] | None = None
    ) -> None:
        self._endpoint, self._most_bytes, self._check = endpoint, most_bytes, check
        self._only = only
        self.errors: list[LineError] = []
        """Why the batch fails."""
        self.stopped = False
        """Whether enough is wrong, so that the rest need not be looked at."""
        self.lines = self.tokens = 0
        self._kept = bytearray()
        """The beginning of a line that has not ended."""
        self._offset = self._number = 0
        """Bytes and lines before it."""
        self._ids = set[bytes]()
        self._groups = defaultdict[bytes, bytearray](bytearray)
        """By the heads of their prompts, in the order in which these come first, rows of `_ROW`
        that end with the size of their refusals. Python's collector does not look at bytes, and
        would stop the process for tenths of a second to look at objects.
        """
        self._refusals = bytearray()
        """Of the bad lines, which are one group."""

    def feed(self, piece: bytes) -> None:
        """Check the lines that end in a piece, unless enough is wrong."""
        if self.stopped:
            return
        *ended, rest = piece.split(b"\n")
        for end in ended:
            self._kept += end
            self._take()
            self._offset += 1
        self._kept += rest
        self._check_size()

    def end(self) -> None:
        """Check the last line, and the whole."""
        self._take()
        if not self.lines and not self.errors:
            self.errors.append(LineError("empty_file", "The input file has no requests."))

    def index(self) -> bytes:
        """Of a file without errors."""
        rows = b"".join(self._groups.values())
        at = len(rows) + _ROW.size
        made = [_ROW.pack(self.tokens, self.lines, _VERSION, at)]
        for offset, length, line, refusal_bytes in _ROW.iter_unpack(rows):
            at += refusal_bytes
            made.append(_ROW.pack(offset, length, line, at))
        return b"".join([*made, self._refusals])

    def _take(self) -> None:
        """Check the line that is kept."""
        self._check_size()
        line, offset = bytes(self._kept), self._offset
        self._kept.clear()
        self._offset += len(line)
        self._number += 1
        if self._number > 2 * MAX_LINES:  # most of them are blank
            self._too_many()
        if self._number == 1 and line.startswith(codecs.BOM_UTF8):
            line, offset = line[len(codecs.BOM_UTF8) :], offset + len(codecs.BOM_UTF8)
        if self.stopped or not line.strip():
            return
        found = self._read(line)
        if found is None:
            return
        self.lines += 1
        if self.lines > MAX_LINES:
            self._too_many()
        if not self.errors:
            head, refused = self._checked(found)
            self._groups[head] += _ROW.pack(offset, len(line), self._number, len(refused))
            self._refusals += refused

    def _too_many(self) -> None:
        if not self.stopped:
            self._wrong("too_many_lines", f"A batch has at most {MAX_LINES:,} requests.")
            self.stopped = True

    def _check_size(self) -> None:
        if len(self._kept) > self._most_bytes and not self.stopped:
            self._number += 1
            self._wrong("line_too_large", f"A line has at most {self._most_bytes:,} bytes.")
            self.stopped = True

    def _read(self, line: bytes) -> _Line | None:
        """A line, if it is wanted and everything around its body is as it must be."""
        try:
            found = _line.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._wrong("invalid_json_line", "This line is not a valid JSON object.")
            return None
        for name in ("custom_id", "method", "url"):
            if not len(getattr(found, name)):
                self._wrong("missing_required_parameter", f"'{name}' is missing.", name)
                return None
        custom_id = _text(found.custom_id)
        if not 0 < len(custom_id) <= _ID_CHARS:
            what = f"'custom_id' must be a text of 1 to {_ID_CHARS} characters."
            self._wrong("invalid_custom_id", what, "custom_id")
        elif (digest := _digest(custom_id.encode())) in self._ids:
            what = "Another line of the file has the same 'custom_id'."
            self._wrong("duplicate_custom_id", what, "custom_id")
        elif _text(found.method) != "POST":
            self._wrong("invalid_method", "'method' must be 'POST'.", "method")
        elif _text(found.url) != self._endpoint:
            what = f"'url' must be the endpoint of the batch, '{self._endpoint}'."
            self._wrong("invalid_url", what, "url")
        else:
            self._ids.add(digest)
            return found if self._only is None or digest in self._only else None
        return None

    def _checked(self, line: _Line) -> tuple[bytes, bytes]:
        """The head of its prompt, and why its body is refused, if it is."""
        try:
            request, tokens = self._check(bytes(line.body))
        except RequestRefused as refusal:
            message = refusal.message[:_REFUSAL_CHARS]
            return b"", msgspec.json.encode((refusal.reason, message, refusal.param))
        self.tokens += tokens
        return _digest(msgspec.json.encode(_head(request))), b""

    def _wrong(self, code: str, message: str, param: str | None = None) -> None:
        self.errors.append(LineError(code, message, self._number, param))
        self.stopped = self.stopped or len(self.errors) >= MAX_ERRORS


def _text(raw: msgspec.Raw) -> str:
    """A short text; empty if it is none."""
    if len(raw) > 6 * _ID_CHARS + 2:  # the longest with every character as an escape
        return ""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _head(request: Mapping[str, Any]) -> list[Any]:
    """What the prompts of several lines may begin with: tools and instructions; without these the
    first characters of the prompt.
    """
    prompt = request.get("messages", request.get("input", request.get("prompt")))
    head = [request.get(name) for name in ("tools", "instructions", "system")]
    if isinstance(prompt, list):
        for message in prompt:
            if not isinstance(message, dict) or message.get("role") not in _SHARED_ROLES:
                break
            head.append(message.get("content"))
    return head if any(head) else [_beginning(prompt)]


def _beginning(prompt: Any) -> Any:
    while isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
        if isinstance(prompt, dict):
            prompt = prompt.get("content", prompt.get("text"))
    return prompt[:_HEAD_CHARS] if isinstance(prompt, str | list) else None


# -- the index ------------------------------------------------------------------------------------


def header_span() -> tuple[int, int]:
    """The bytes of the index from which `totals` reads."""
    return 0, _ROW.size


def totals(header: bytes) -> tuple[int, int]:
    """Lines and tokens of the batch."""
    tokens, lines, _, _ = _ROW.unpack(header)
    return lines, tokens


def rows_span(first: int, many: int) -> tuple[int, int]:
    """The bytes of the index with the rows of so many lines of the order of work, the first of
    which is 0.
    """
    return first * _ROW.size, (first + many + 1) * _ROW.size


def refusals_span(rows: bytes) -> tuple[int, int]:
    """The bytes of the index with the refusals of the lines of these rows."""
    return _ROW.unpack_from(rows)[3], _ROW.unpack_from(rows, len(rows) - _ROW.size)[3]


def rows_of(rows: bytes, refusals: bytes) -> list[Row]:
    """The lines whose rows and refusals were read."""
    (_, _, _, first), *others = _ROW.iter_unpack(rows)
    made, begin = [], first
    for offset, length, line, end in others:
        made.append(Row(line, offset, length, refusals[begin - first : end - first]))
        begin = end
    return made


# -- what goes in and comes out -------------------------------------------------------------------


def asked_by(line: bytes) -> Asked:
    """What a line asks that was checked; its body is empty if it has none."""
    found = _line.decode(line)
    return Asked(_text(found.custom_id), bytes(found.body))


def ids_in(output: Iterable[bytes]) -> set[bytes]:
    """Digests of the ids of these lines of an output or error file."""
    return {_digest(asked_by(line).custom_id.encode()) for line in output}


def answered_line(
    batch_id: str, request_id: str, custom_id: str, status: int, body: bytes
) -> bytes:
    """The line of the output file, or with an HTTP status above 299 of the error file. The id of
    the request is empty if it was refused.
    """
    response = {"status_code": status, "request_id": request_id, "body": _as_json(body)}
    its = request_id or _unaccepted_id(batch_id, custom_id)
    return _output(its, custom_id, response, None)


def unanswered_line(batch_id: str, custom_id: str, outcome: str) -> bytes:
    """The line of the error file for one that has no result when its batch is over; `outcome`:
    `expired` or `cancelled`.
    """
    error = {"code": f"batch_{outcome}", "message": _UNFINISHED[outcome]}
    return _output(_unaccepted_id(batch_id, custom_id), custom_id, None, error)


def _unaccepted_id(batch_id: str, custom_id: str) -> str:
    """For the id of a request that was not accepted; no other line of any batch has it."""
    return f"req_{_digest(f'{batch_id} {custom_id}'.encode()).hex()}"


def _output(request_id: str, custom_id: str, response: object, error: object) -> bytes:
    line = {
        "id": f"batch_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"


def _as_json(body: bytes) -> msgspec.Raw:
    """An answer on one line; what is no JSON as a text."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.MsgspecError:
        body = msgspec.json.encode(body.decode(errors="replace"))
    return msgspec.Raw(body.replace(b"\n", b" ").replace(b"\r", b" "))
