"""Takes a form with one file apart while it arrives (`multipart/form-data`, RFC 7578). Only its
other fields stay in memory, and they are bounded.
"""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve_app.contract import Reason
from serve_app.errors import RequestRefused, invalid

_FILE = "file"
_MAX_PARTS = 32
_MAX_NAME_CHARS = 256
_MAX_FIELD_BYTES = 4096
_MAX_BOUNDARY_BYTES = 200
_MAX_HEADERS = 8
_MAX_HEADER_BYTES = 4096
FRAME_BYTES = 256 * 1024
"""More than all that a form may have beside the content of its file."""


class Form:
    """One form. `fields`: all but the file; `filename`: None as long as no file has begun.

    Raises, like its methods:
        RequestRefused: `unsupported_media_type`; `invalid_request` for what is malformed or beyond
            a bound; `body_too_large`.
    """

    def __init__(self, content_type: str, most_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data":
            name = kind.decode("latin-1")[:80] or "missing"
            raise RequestRefused(
                Reason.UNSUPPORTED_MEDIA_TYPE,
                f"The Content-Type is {name}; send a file as multipart/form-data.",
            )
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= _MAX_BOUNDARY_BYTES:
            raise invalid("The Content-Type has no boundary of 1 to 200 bytes.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self.most_bytes = most_bytes
        self._parts = 0
        self._header = b"", b""
        self._disposition = b""
        self._name = ""
        """Of the part that is being read; empty for the file."""
        self._value = b""
        self._content: list[bytes] = []
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._add_header(data[start:end], b""),
                "on_header_value": lambda data, start, end: self._add_header(b"", data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_content,
                "on_part_data": lambda data, start, end: self._add(data[start:end]),
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )

    def feed(self, piece: bytes) -> list[bytes]:
        """Read on. Returns what the file has of this piece."""
        self._content = []
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _malformed(str(error)) from None
        return self._content

    def finish(self) -> None:
        """The body has ended."""
        if not self._ended:
            raise _malformed("it ends before its last boundary")
        if self.filename is None:
            raise invalid(f"Missing required parameter: '{_FILE}', with a file.", _FILE)

    # -- what the parser finds ---------------------------------------------------------------------

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _malformed(f"it has more than {_MAX_PARTS} parts")
        self._disposition = b""
        self._value = b""

    def _add_header(self, name: bytes, value: bytes) -> None:
        self._header = self._header[0] + name, self._header[1] + value

    def _end_header(self) -> None:
        name, value = self._header
        self._header = b"", b""
        if name.lower() == b"content-disposition":
            self._disposition = value

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        name = _text(options.get(b"name", b""))
        if not 0 < len(name) <= _MAX_NAME_CHARS:
            raise _malformed(f"a part has no name of 1 to {_MAX_NAME_CHARS} characters")
        filename = options.get(b"filename")
        self._name = name
        if filename is None:
            return
        if name != _FILE or self.filename is not None:
            raise invalid(f"Send one file, as '{_FILE}'.", name)
        self.filename = _text(filename)
        if len(self.filename) > _MAX_NAME_CHARS:
            raise invalid(f"The name of a file has at most {_MAX_NAME_CHARS} characters.", _FILE)
        self._name = ""

    def _add(self, data: bytes) -> None:
        if not self._name:
            self.size += len(data)
            if self.size > self.most_bytes:
                raise too_large(self.most_bytes)
            self._content.append(data)
            return
        self._value += data
        if len(self._value) > _MAX_FIELD_BYTES:
            raise invalid(f"'{self._name}' is longer than {_MAX_FIELD_BYTES} bytes.", self._name)

    def _end_part(self) -> None:
        if self._name:
            self.fields[self._name] = _text(self._value)

    def _end(self) -> None:
        self._ended = True


def too_large(most_bytes: int) -> RequestRefused:
    message = f"The file is longer than {most_bytes} bytes."
    return RequestRefused(Reason.BODY_TOO_LARGE, message)


def _malformed(why: str) -> RequestRefused:
    return invalid(f"The form is malformed: {why[:200]}.")


def _text(data: bytes) -> str:
    """Without characters that would break a line of a log or a header."""
    return "".join(char for char in data.decode(errors="replace") if char.isprintable())
