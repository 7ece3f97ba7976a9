"""What stands in a journal: the storage schema, encoded and decoded. Pure.

One Redis Stream per request, `{ns}:j:<request_id>`. Entry ids `<epoch>-<seq>` are fencing tokens:

    0-1            the client's request
    k-0            attempt k is opened by a worker (k = 1, 2, ...)
    k-1, k-2, ...  output of attempt k
    k-max          attempt k has ended the request: its seal, which a newer epoch still fences
    max-max        the terminal entry: nothing can follow it

Fields (one letter each, since they are stored with every entry):

    n  nonce of the writer            every entry but 0-1
    r  request line and headers       JSON {method, path, query, headers}              0-1
    m  facts                          JSON; `RequestFacts`, `AttemptFacts`, `Summary`  0-1, k-0, k-max, max-max
    h  head of the response           JSON {status, headers}                           the first that has one
    o  engine outputs                 JSON [[index, text, token ids, finish, stop, cached tokens or null], ...]
    b  response bytes that came of `o` (SSE events with their `id:` lines); 0-1 of older versions: the request's body,
       which has a key of its own (`bodies`)
    e  number of the last event in the response so far (0 where the response is not a stream)
    k  state in which the request ended; w: reason; p: id of the entry before        k-max, max-max
    f  id of the last output of older epochs that still counts          the outputs of k > 1 up to the first bytes
    q  why the attempt was given up; the request goes on                the last entry of such an attempt
    z  the transcript: all response bytes, zlib; the entries before are trimmed      max-max
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

MAX_ID_PART = 18_446_744_073_709_551_615


class EntryId(NamedTuple):
    """A stream id: epoch and sequence number. Compares as Redis does."""

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"

    @classmethod
    def parse(cls, text: str | bytes) -> EntryId:
        """From Redis's `<ms>-<seq>` form."""
        epoch, _, seq = (text.decode() if isinstance(text, bytes) else text).partition("-")
        return cls(int(epoch), int(seq))


BEGINNING = EntryId(0, 0)
REQUEST_ID = EntryId(0, 1)
TERMINAL_ID = EntryId(MAX_ID_PART, MAX_ID_PART)


def following(position: EntryId) -> str:
    """The smallest id behind a position, as a stream range's start. Nothing is behind the terminal entry."""
    if position.seq < MAX_ID_PART:
        return f"{position.epoch}-{position.seq + 1}"
    return f"{position.epoch + 1}-0" if position.epoch < MAX_ID_PART else str(position)


def seal_id(epoch: int) -> EntryId:
    """The id of the entry with which an attempt ends the request: behind all of its own, before any newer epoch.

    The terminal entry alone would not do: its id is greater than every epoch's, so Redis would take it from a worker
    that slept while another went on (docs/adr/0008).
    """
    return EntryId(epoch, MAX_ID_PART)


class RequestLine(msgspec.Struct, frozen=True):
    """The HTTP request without its body; only headers that the engine's server needs."""

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]


class RequestFacts(msgspec.Struct, frozen=True):
    """What was decided about a request when it was admitted. Times are Unix milliseconds."""

    request_class: str
    tenant: str
    session: str
    model: str
    streamed: bool
    admitted_ms: int
    deadline_ms: int
    wake: str
    client_request_id: str = ""
    idempotency: str = ""
    """Digest of path and body, where the client sent an `Idempotency-Key`."""
    trace: str = ""
    """The `traceparent` of the HTTP request, where it is traced."""


class AttemptFacts(msgspec.Struct, frozen=True):
    """Who works on the request."""

    replica: str
    engine: str
    opened_ms: int
    cause: str = ""
    """Why the attempt before this one ended, by the dispatcher's account; empty for the first."""
    fingerprint: str = ""
    """Of model, weights and engine: only an equal one can go on where another stopped."""


class Summary(msgspec.Struct, frozen=True):
    """What is worth knowing of a finished request once its entries are trimmed. Times are Unix milliseconds."""

    request: RequestFacts | None
    attempt: AttemptFacts | None
    attempts: int
    ended_ms: int
    first_output_ms: int | None = None
    output_tokens: int = 0


class Head(msgspec.Struct, frozen=True):
    """Status and headers of the engine's response."""

    status: int
    headers: list[tuple[str, str]]

    @property
    def streamed(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(k == "content-type" and v.startswith("text/event-stream") for k, v in self.headers)


class Entry(NamedTuple):
    """One journal entry, as read from Redis or from a wake-up message."""

    id: EntryId
    fields: Mapping[bytes, bytes]

    @property
    def nonce(self) -> bytes:
        """Of the writer."""
        return self.fields.get(b"n", b"")

    @property
    def body(self) -> bytes:
        """The bytes: of the request in 0-1 (see `bodies`), else of the response."""
        return self.fields.get(b"b", b"")

    @property
    def events(self) -> int:
        """Number of the last event in the response so far."""
        return int(self.fields.get(b"e", b"0"))

    @property
    def terminal(self) -> bool:
        """Whether nothing can follow."""
        return self.id == TERMINAL_ID

    @property
    def ends(self) -> bool:
        """Whether the request ended with this entry; the first such entry of a journal counts."""
        return b"k" in self.fields

    @property
    def resumed_from(self) -> EntryId | None:
        """The last output of older epochs that counts, where this is one of a later attempt's first."""
        raw = self.fields.get(b"f")
        return None if raw is None else EntryId.parse(raw)

    @property
    def quit(self) -> str:
        """Why the attempt was given up by its own writer; empty where it was not."""
        return self.fields.get(b"q", b"").decode()

    @property
    def state(self) -> str:
        """In which the request ended."""
        return self.fields.get(b"k", b"").decode()

    @property
    def reason(self) -> str:
        """Of the end, where it was none of the engine's."""
        return self.fields.get(b"w", b"").decode()

    @property
    def head(self) -> Head | None:
        """Of the response, where this entry has it."""
        raw = self.fields.get(b"h")
        return None if raw is None else msgspec.json.decode(raw, type=Head)


Facts = TypeVar("Facts", RequestFacts, AttemptFacts, Summary)


def decode_facts(entry: Entry, kind: type[Facts]) -> Facts:
    """The `m` field of an entry as one of the facts structs."""
    return msgspec.json.decode(entry.fields[b"m"], type=kind)


def decode_line(entry: Entry) -> RequestLine:
    """The request line of entry 0-1."""
    return msgspec.json.decode(entry.fields[b"r"], type=RequestLine)


def entry_from_redis(raw: Any) -> Entry:
    """From one element of an `XRANGE` reply: `[id, [field, value, ...]]` (RESP2) or its dict form."""
    entry_id, fields = raw
    if not isinstance(fields, dict):
        fields = dict(zip(fields[::2], fields[1::2], strict=True))
    return Entry(EntryId.parse(entry_id), fields)


def flatten(entry: Entry) -> list[bytes]:
    """Fields as `XADD` takes them."""
    return [part for pair in entry.fields.items() for part in pair]


def has_ended(entries: Sequence[Entry]) -> bool:
    """Whether a journal, read from its beginning, is that of a request that has ended."""
    return any(entry.ends for entry in entries)


def compress(body: Sequence[bytes], level: int) -> bytes:
    """The transcript field of all response bytes."""
    return zlib.compress(b"".join(body), level)


def transcript(entry: Entry) -> bytes | None:
    """All response bytes, where the terminal entry holds them."""
    packed = entry.fields.get(b"z")
    return None if packed is None else zlib.decompress(packed)


class Wake(msgspec.Struct, array_like=True):
    """One accepted entry on its way to the ingress that holds the connection (less `n`, `o` and `z`)."""

    request_id: str
    epoch: int
    seq: int
    fields: dict[bytes, bytes]


_wake_encoder = msgspec.msgpack.Encoder()
_wake_decoder = msgspec.msgpack.Decoder(list[Wake])
_WAKE_FIELDS = (b"h", b"b", b"e", b"f", b"k", b"w", b"p", b"m")


def wake_of(request_id: str, entry: Entry, after: str | None = None) -> Wake:
    """The wake-up message's item for an entry.

    Args:
        after: id of the entry that was announced before it, where the writer knows; entries between the two hold
            nothing that a reader needs. Empty where it does not know: the reader then looks into the stream.
    """
    carried = {name: entry.fields[name] for name in _WAKE_FIELDS if name in entry.fields}
    if after is not None:
        carried[b"p"] = after.encode()
    return Wake(request_id, entry.id.epoch, entry.id.seq, carried)


def needed_by_readers(entry: Entry) -> bool:
    """Whether an entry changes what a client sees; engine outputs of a response that is not streamed do not."""
    return entry.id.seq == 0 or entry.ends or b"b" in entry.fields or b"h" in entry.fields


def encode_wakes(wakes: list[Wake]) -> bytes:
    """One message for one ingress."""
    return _wake_encoder.encode(wakes)


def decode_wakes(payload: bytes) -> list[tuple[str, Entry]]:
    """`(request id, entry)` pairs of a message."""
    return [(w.request_id, Entry(EntryId(w.epoch, w.seq), w.fields)) for w in _wake_decoder.decode(payload)]


def journal_key(namespace: str, request_id: str) -> str:
    """Redis key of a request's journal."""
    return f"{namespace}:j:{request_id}"


def wake_channel(namespace: str, ingress_id: str) -> str:
    """Pub/sub channel of one ingress process."""
    return f"{namespace}:w:{ingress_id}"
