"""The storage schema of a journal: encodes and decodes its entries, and the wake-ups that carry
them. Pure.

One Redis Stream per request, `{ns}:j:<request_id>`. The ids of its entries, `<epoch>-<seq>`,
are the fencing tokens:

    0-1            the client's request
    k-0            attempt k is opened by a worker (k = 1, 2, ...)
    k-1, k-2, ...  output of attempt k
    max-max        the terminal entry: nothing can follow it

Fields (one letter each, since they are stored with every entry), and the entries that have them;
k-i stands for k-1, k-2, ...:

    n  nonce of the writer                            k-0, k-i, max-max
    r  request line and headers                       0-1
       JSON {method, path, query, headers}
    m  facts, JSON                                    0-1 (`RequestFacts`), k-0 (`AttemptFacts`),
                                                      max-max (`Summary`)
    i  id of the request's queue entry                0-1
    h  head of the response, JSON {status, headers}   k-i: the first that has one; max-max beside
                                                      `z`
    o  engine outputs, JSON                           k-i
       [[index, text, token ids, finish reason, stop reason, cached tokens or null], ...];
       what few requests have follows (`Output` in workers/replay.py)
    b  response bytes that came of the outputs up to  k-i
       here: server-sent events with their `id:`
       lines. Of a response that is no stream, parts
       that count only with its end
    e  number of the last event so far; 0 where       k-i, max-max
       the response is no stream
    u  what the request has used so far (`Usage`)     k-i, max-max
    k  state in which the request ended               max-max
    w  reason of the end                              max-max
    p  id of the entry before                         max-max
    f  id of the last output of older epochs that     k-i of k > 1: up to the first bytes
       still counts
    q  why the attempt was given up; the request      k-i: the last of such an attempt
       goes on
    z  the transcript: all response bytes, zlib,      max-max
       if they fit into an entry; the entries before
       are trimmed
    s  bytes of the journal, if the entries before    max-max
       remain

Earlier versions gave the last output of an attempt that ended its request the id k-max, and `m`,
`k`, `w` and `p` as in max-max, which they wrote with it; and entries a `c`, which nobody reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgspec

from serve_app import timings
from serve_app.contract import Cause, Reason, State
from serve_app.errors import Unreadable, decoding
from serve_app.policy.tenant_limits import Reserved

MAX_ID_PART = 18_446_744_073_709_551_615


class EntryId(NamedTuple):
    """A stream id: epoch and sequence number. Compares as Redis does."""

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"

    @classmethod
    def parse(cls, text: str | bytes) -> EntryId:
        """Parse Redis's `<ms>-<seq>` form."""
        epoch, _, seq = (text.decode() if isinstance(text, bytes) else text).partition("-")
        return cls(int(epoch), int(seq))

    @property
    def opens(self) -> bool:
        """Whether this is the id of an attempt's opening."""
        return self.seq == 0 and self.epoch > 0

    def is_next_to(self, before: EntryId) -> bool:
        """Whether the same attempt wrote `before` directly before this entry."""
        return self.epoch == before.epoch and self.seq == before.seq + 1


BEGINNING = EntryId(0, 0)
REQUEST_ID = EntryId(0, 1)
TERMINAL_ID = EntryId(MAX_ID_PART, MAX_ID_PART)


def following(position: EntryId) -> str:
    """The start of a stream range behind a position. Behind the terminal entry Redis knows none."""
    return str(position) if position == TERMINAL_ID else f"({position}"


def opening_id(epoch: int) -> EntryId:
    """The id of the entry with which a worker opens an attempt: before all other entries of its
    epoch.
    """
    return EntryId(epoch, 0)


FIRST_OPENING_ID = opening_id(1)


# -- the JSON in entries -------------------------------------------------------------------------


class RequestLine(msgspec.Struct, frozen=True):
    """The HTTP request without its body, with only the headers that the engine's server needs."""

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]


class RequestFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was decided about a request when it was admitted. Times are Unix milliseconds."""

    request_class: str
    tenant: str
    session: str
    model: str
    streamed: bool
    admitted_ms: int
    deadline_ms: int
    wake_channel: str = msgspec.field(name="wake")
    client_request_id: str = ""
    idempotency: str = ""
    """Digest of path and body, if the client sent an `Idempotency-Key`."""
    idempotency_value: str = ""
    """The same of what the body means, however it is written."""
    trace: str = ""
    """The `traceparent` of the HTTP request, if it is traced."""
    key: str = ""
    """The name of the API key that it came with; empty if none is required."""
    detached: bool = False
    """Whether it goes on without a reader."""
    retention_s: float = 0.0
    """How long its answer is kept for whoever comes later; 0 if it is not."""
    body_bytes: int = 0
    """Size of its body, if that is kept as long as the answer; otherwise 0."""
    alias: str = ""
    """What the client calls the model, if that is not its name."""
    twins: str = ""
    """Digest of what equal requests have in common; empty if a retry cannot join it."""
    reserved: Reserved | None = None
    """What it has taken of its tenant's limits, if that has any."""
    tells: str = ""
    """What ends for receivers of webhooks: `response` or `request`; empty if nobody is told."""
    webhook: str = ""
    """The URL that the client wants to be told at, if it has named one."""
    batch: str = ""
    """The id of the batch of which it is a line."""

    @property
    def called(self) -> str:
        """What an answer calls the model."""
        return self.alias or self.model

    @property
    def stored(self) -> bool:
        """Whether its body is kept as long as the answer."""
        return self.body_bytes > 0

    @property
    def kept(self) -> bool:
        """Whether its answer is kept for whoever comes later."""
        return self.retention_s > 0


class AttemptFacts(msgspec.Struct, frozen=True):
    """Which worker works on the request, and since when."""

    replica: str
    engine: str
    opened_ms: int
    cause: str = ""
    """The `Cause` for which the dispatcher gave up the previous attempt; empty for the first. A
    newer version may write a word that this version does not know.
    """
    fingerprint: str = ""
    """Of model, weights and engine; only an equal one can continue the response."""


class Summary(msgspec.Struct, frozen=True):
    """What is known of a request whose entries are trimmed. Times are Unix milliseconds."""

    request: RequestFacts | None
    attempt: AttemptFacts | None
    attempts: int
    ended_ms: int
    first_output_ms: int | None = None
    output_tokens: int = 0
    """What version 0.2 has counted; later ones write `Usage` into the entry."""
    began_ms: int = 0
    """When the first attempt was opened; 0 if none was."""
    why: str = ""
    """Why an answer could not be continued; completes a sentence that ends with "because"."""
    message: str = ""
    """What the caller is told of a failure; empty if that is what its reason says."""
    cut: bool = False
    """Whether the answer has met its `max_tokens`, or one of its answers has."""


class Head(msgspec.Struct, frozen=True):
    """Status and headers of the engine's response."""

    status: int
    headers: list[tuple[str, str]]

    @property
    def streamed(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(
            k == "content-type" and v.startswith("text/event-stream") for k, v in self.headers
        )


_json = msgspec.json.Encoder()
_entry_id = decoding(EntryId.parse)
_FOR_READERS = frozenset((b"h", b"b", b"e", b"f", b"k", b"w", b"p", b"m"))
PLAIN = (b"n", b"o", b"b", b"e", b"u")
"""The fields of nearly every output, in the order in which they are written."""


class Entry(NamedTuple):
    """One journal entry: to be appended, or as read from Redis or from a wake-up."""

    id: EntryId
    fields: Mapping[bytes, bytes]

    # -- writing ----------------------------------------------------------------------------------

    @classmethod
    def request(cls, line: RequestLine, facts: RequestFacts) -> Entry:
        """The first entry. The request's body is stored under a Redis key of its own."""
        return cls(REQUEST_ID, {b"r": _json.encode(line), b"m": _json.encode(facts)})

    @classmethod
    def opening(cls, epoch: int, nonce: bytes, facts: AttemptFacts) -> Entry:
        """The entry with which a worker opens attempt `epoch`."""
        return cls(opening_id(epoch), {b"n": nonce, b"m": _json.encode(facts)})

    @classmethod
    def void(cls, entry_id: EntryId, nonce: bytes, cause: Cause) -> Entry:
        """An entry that says that no worker works on the attempt, or shall not any longer."""
        return cls(entry_id, {b"n": nonce, b"q": cause.value.encode()})

    @classmethod
    def output(
        cls,
        entry_id: EntryId,
        nonce: bytes,
        head: Head | None,
        outputs: bytes,
        body: bytes | None,
        events: int,
        resumed_from: EntryId | None,
        given_up: Cause | None,
        used: bytes = b"",
    ) -> Entry:
        """What an attempt has produced since its last entry (the hot path)."""
        fields = {b"n": nonce}
        if head is not None:
            fields[b"h"] = _json.encode(head)
        if outputs:
            fields[b"o"] = outputs
        if body is not None:
            fields[b"b"] = body
        fields[b"e"] = b"%d" % events
        if used:
            fields[b"u"] = used
        if resumed_from is not None:
            fields[b"f"] = str(resumed_from).encode()
        if given_up is not None:
            fields[b"q"] = given_up.value.encode()
        return cls(entry_id, fields)

    def terminal_behind(
        self,
        state: State,
        reason: Reason | None,
        summary: Summary,
        packed: bytes | None,
        head: Head | None,
    ) -> Entry:
        """The terminal entry after this last output; with a transcript it replaces all others."""
        fields = {name: self.fields[name] for name in (b"n", b"e", b"u") if name in self.fields}
        fields |= _ending(state, reason, summary)
        if packed is not None:
            fields[b"z"] = packed
            if head is not None:
                fields[b"h"] = _json.encode(head)
        return Entry(TERMINAL_ID, {**fields, b"p": str(self.id).encode()})

    def counting(self, journal_bytes: int) -> Entry:
        """This terminal entry of a journal whose entries remain, with their size."""
        return self._replace(fields={**self.fields, b"s": b"%d" % journal_bytes})

    def after_output(self, last: Entry) -> Entry:
        """This terminal entry with what the last output has for readers: one wake-up tells both."""
        return self._replace(fields={**last.fields, **self.fields})

    @classmethod
    def terminal_from_outside(
        cls, nonce: bytes, state: State, reason: Reason | None, summary: Summary
    ) -> Entry:
        """That of a request that ends without its worker. It does not name its predecessor, because
        a worker may have appended until now; followers must read the stream.
        """
        return cls(TERMINAL_ID, {b"n": nonce, **_ending(state, reason, summary)})

    def for_readers(self, after: str | None) -> dict[bytes, bytes]:
        """The fields that a reader needs; a large entry it reads itself. `after`: the id of the
        predecessor, if it is known.
        """
        if len(self.body) > timings.LARGE_BYTES:
            return {b"p": b""}
        fields = self.fields
        if tuple(fields) == PLAIN:  # hot path
            kept = {b"b": fields[b"b"], b"e": fields[b"e"]}
        else:
            kept = {name: value for name, value in fields.items() if name in _FOR_READERS}
        if after is not None:
            kept[b"p"] = after.encode()
        return kept

    # -- reading ----------------------------------------------------------------------------------

    @property
    def nonce(self) -> bytes:
        return self.fields.get(b"n", b"")

    @property
    def body(self) -> bytes:
        """In 0-1 the body of the request (`with_body` in store.py), otherwise response bytes."""
        return self.fields.get(b"b", b"")

    @property
    def outputs(self) -> bytes | None:
        """Engine outputs as JSON, if there are any."""
        return self.fields.get(b"o")

    @property
    def queue_entry(self) -> bytes:
        """In 0-1."""
        return self.fields.get(b"i", b"")

    @property
    def produced(self) -> bool:
        """Whether an attempt produced something with this entry."""
        fields = self.fields
        return b"o" in fields or b"b" in fields or b"h" in fields

    @property
    def events(self) -> int:
        """Number of the last event in the response so far."""
        try:  # for every entry: a decorator would double its time
            return int(self.fields.get(b"e", b"0"))
        except ValueError as error:
            raise Unreadable(f"events: {error!r}") from error

    @property
    def used(self) -> bytes:
        """`Usage`, encoded; empty if the entry does not say."""
        return self.fields.get(b"u", b"")

    @property
    def counts(self) -> bool:
        """Whether the entry says how many events there are; an end from outside does not."""
        return b"e" in self.fields

    @property
    def terminal(self) -> bool:
        """Whether this is the terminal entry, which nothing can follow."""
        return self.id == TERMINAL_ID

    @property
    def ends(self) -> bool:
        """Whether the request ended with this entry."""
        return b"k" in self.fields

    @property
    def needed_by_readers(self) -> bool:
        """Whether the entry changes what a client sees, as engine outputs alone do not."""
        fields = self.fields
        return self.id.seq == 0 or b"k" in fields or b"b" in fields or b"h" in fields

    @property
    def resumed_from(self) -> EntryId | None:
        """The last output of older epochs that counts, if this is a later one's first."""
        raw = self.fields.get(b"f")
        return None if raw is None else _entry_id(raw)

    @property
    @decoding
    def quit(self) -> str:
        """The `Cause` for which the writer gave up the attempt; empty if it did not."""
        return self.fields.get(b"q", b"").decode()

    @property
    @decoding
    def state(self) -> State | None:
        """The final state, if the request ended with this entry."""
        raw = self.fields.get(b"k")
        return None if raw is None else State(raw.decode())

    @property
    @decoding
    def reason(self) -> Reason | None:
        """Why the request ended; None if it was completed."""
        raw = self.fields.get(b"w")
        return Reason(raw.decode()) if raw else None

    @property
    @decoding
    def summary(self) -> Summary | None:
        """The summary of the request, if it ended with this entry."""
        return decode_facts(self, Summary) if self.ends and b"m" in self.fields else None

    @property
    @decoding
    def head(self) -> Head | None:
        """Status and headers of the response, if this entry has them."""
        raw = self.fields.get(b"h")
        return None if raw is None else msgspec.json.decode(raw, type=Head)

    @property
    def packed(self) -> bytes | None:
        """The packed transcript, if this entry replaces all earlier ones."""
        return self.fields.get(b"z")


def _ending(state: State, reason: Reason | None, summary: Summary) -> dict[bytes, bytes]:
    why = reason.value if reason else ""
    return {b"k": state.value.encode(), b"w": why.encode(), b"m": _json.encode(summary)}


Facts = TypeVar("Facts", RequestFacts, AttemptFacts, Summary)


@decoding
def decode_facts(entry: Entry, kind: type[Facts]) -> Facts:
    """The `m` field of an entry as one of the facts structs."""
    return msgspec.json.decode(entry.fields[b"m"], type=kind)


@decoding
def decode_line(entry: Entry) -> RequestLine:
    """The request line of entry 0-1."""
    return msgspec.json.decode(entry.fields[b"r"], type=RequestLine)


@decoding
def entry_from_redis(raw: Any) -> Entry:
    """Decode an element of an `XRANGE` reply: `[id, [field, value, ...]]` (RESP2), or as a dict."""
    entry_id, fields = raw
    if not isinstance(fields, dict):
        fields = dict(zip(fields[::2], fields[1::2], strict=True))
    return Entry(EntryId.parse(entry_id), fields)


def flatten(entry: Entry) -> list[bytes]:
    """Fields in the form that `XADD` takes."""
    return [*chain.from_iterable(entry.fields.items())]


def encode_outputs(outputs: list[Any]) -> bytes:
    """Engine outputs as in the field `o`."""
    return _json.encode(outputs)


def encode_used(used: tuple[int, ...]) -> bytes:
    """As in the field `u`; empty if there are none."""
    return b"%d %d %d %d %d" % used if used else b""


def compress(body: Iterable[bytes], level: int) -> bytes | None:
    """The transcript field for all response bytes; None if it would be too large for an entry."""
    deflate = zlib.compressobj(level)
    packed, size = [], 0
    for piece in chain(body, (None,)):
        packed.append(deflate.flush() if piece is None else deflate.compress(piece))
        size += len(packed[-1])
        if size > timings.ENTRY_BYTES:
            return None
    return b"".join(packed)


class Wake(msgspec.Struct, array_like=True):
    """An accepted entry on its way to the ingress that holds the connection.

    A message on the channel `{ns}:w:<ingress id>` is a MessagePack array of wake-ups, each an array
    of these fields; a newer version may add some. Any may be lost, because the journal has all.
    """

    request_id: str
    epoch: int
    seq: int
    fields: dict[bytes, bytes]


_message_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(list[Wake])


def wake_of(request_id: str, entry: Entry, after: str | None = None) -> Wake:
    """The wake-up for an entry. `after`: the entry announced before, with nothing in between that a
    reader needs; empty if the writer does not know it, and then the reader reads the stream.
    """
    return Wake(request_id, entry.id.epoch, entry.id.seq, entry.for_readers(after))


def encode_wakes(wakes: list[Wake]) -> bytes:
    return _message_encoder.encode(wakes)


@decoding
def decode_wakes(payload: bytes) -> list[tuple[str, Entry]]:
    """`(request id, entry)` pairs of a message."""
    return [
        (wake.request_id, Entry(EntryId(wake.epoch, wake.seq), wake.fields))
        for wake in _message_decoder.decode(payload)
    ]
