"""A queue entry: its fields, and how they are decoded. Pure.

    r  request id
    t  tenant
    s  session key
    d  deadline, Unix ms
    c  cost estimate, tokens, and its parts:
    i  prompt
    o  the most that it may write; 0: no limit was given
    k  kind (`Work`)
    n  sequences (`Work`), if there are several
    p  `traceparent`, if it is traced

Anybody may have written to Redis, so an entry that does not fit the schema raises an error here,
and nowhere later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.errors import decoding
from serve_app.policy.work import Work

_LONGEST_NAME = 256
_LONGEST_NUMBER = 18
_LONGEST_KIND = 64


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A claimed entry. `entry_id` contains the time of enqueueing, by Redis's clock."""

    stream: str
    entry_id: str
    request_class: str
    request_id: str
    tenant: str
    session: str
    deadline_ms: int
    cost_tokens: int
    trace: str = ""
    prompt_tokens: int = 0
    """An estimate."""
    max_output_tokens: int = 0
    """0 if the client gave no limit."""
    kind: str = ""
    sequences: int = 1
    taken_over: bool = False
    """Whether another ingress had claimed it earlier, and may be working on it."""

    @property
    def key(self) -> tuple[str, str]:
        """Unique over all queues: two streams may produce the same `entry_id`."""
        return self.stream, self.entry_id

    @property
    def accepted_ms(self) -> int:
        """Unix milliseconds."""
        return int(self.entry_id.partition("-")[0])


def encode_entry(
    request_id: str,
    tenant: str,
    session: str,
    deadline_ms: int,
    work: Work,
    trace: str = "",
) -> dict[str, Any]:
    """The fields of an entry, as `XADD` takes them."""
    fields = {"r": request_id, "t": tenant, "s": session, "d": deadline_ms, "c": work.cost_tokens}
    fields |= {"i": work.prompt_tokens, "o": work.max_output_tokens, "k": work.kind}
    if work.sequences > 1:
        fields["n"] = work.sequences
    return {**fields, "p": trace} if trace else fields


def with_fields(item: Any) -> tuple[bytes, dict[bytes, bytes]]:
    """The id and the fields of an entry, from `[id, [field, value, ...]]`."""
    entry_id, flat = item
    return entry_id, dict(zip(flat[::2], flat[1::2], strict=True))


def decode_deadline(fields: Mapping[bytes, bytes]) -> tuple[str, int] | None:
    """Request id and deadline (Unix milliseconds) alone; None of what is no entry of ours."""
    deadline_ms, request_id = fields.get(b"d", b""), fields.get(b"r", b"")
    if not (deadline_ms.isdigit() and request_id):
        return None
    return request_id.decode(errors="replace"), int(deadline_ms[:20])


@decoding
def decode_entry(
    stream: str, request_class: str, entry_id: bytes, fields: Mapping[bytes, bytes]
) -> QueueEntry:
    """Decode an item of a class's queue.

    Raises:
        Unreadable: it is not one of ours.
    """
    trace = fields.get(b"p", b"")
    return QueueEntry(
        stream=stream,
        entry_id=entry_id.decode(),
        request_class=request_class,
        request_id=_named(fields[b"r"]),
        tenant=fields[b"t"].decode(),
        session=fields[b"s"].decode(),
        deadline_ms=_number(fields[b"d"]),
        cost_tokens=_number(fields[b"c"]),
        trace=trace.decode() if len(trace) <= _LONGEST_NAME else "",
        prompt_tokens=_number(fields[b"i"]),
        max_output_tokens=_number(fields[b"o"]),
        kind=fields[b"k"][:_LONGEST_KIND].decode(errors="replace"),
        sequences=max(1, _number(fields.get(b"n", b"1"))),
    )


def _named(value: bytes) -> str:
    if not 0 < len(value) <= _LONGEST_NAME:
        raise ValueError(f"a name of {len(value)} bytes")
    return value.decode()


def _number(value: bytes) -> int:
    number = int(value[:_LONGEST_NUMBER])
    if len(value) > _LONGEST_NUMBER or number < 0:
        raise ValueError(f"no number of ours: {value[:40]!r}")
    return number
