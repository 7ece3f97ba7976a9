"""A queue entry: what `claim` gives back, and how it is read. Pure.

It comes from Redis, where anybody may have written: what the schema does not allow is an error here, and nowhere later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_LONGEST_NAME = 256
_LONGEST_NUMBER = 18


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A claimed entry. `entry_id` says when it was enqueued, by Redis's clock."""

    stream: str
    entry_id: str
    request_class: str
    request_id: str
    tenant: str
    session: str
    deadline_ms: int
    cost_tokens: int
    trace: str = ""
    taken_over: bool = False
    """Whether another ingress had claimed it before: somebody may be working on it."""

    @property
    def enqueued_ms(self) -> int:
        """Unix milliseconds."""
        return int(self.entry_id.partition("-")[0])


def decode_entry(stream: str, request_class: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> QueueEntry:
    """An item of a class's line.

    Raises:
        LookupError, ValueError: it is none of ours.
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
