"""How full Redis is, and whether a request still fits. Above a share of Redis's memory, only
endings may be written. Pure.

A full Redis rejects every append, including those that would free memory, so requests are refused
earlier: large ones at `redis.max_memory_share`, small ones halfway between that and the end. A
client that sends large requests therefore does not block everybody else.

What accepted requests will write is reserved: the answers that the engines can write at a time with
all their tokens, the others as they are once they have ended.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Sequence

from serve_app import timings
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.redis.replies import Memory
from serve_app.settings import Settings

log = logging.getLogger("hermes.ingress")

_SMALL_BYTES = 16 * 1024
_ENTRIES_BYTES = 4_000
"""Memory for a waiting request besides its body, and for the first entry of its answer."""
_PACKED = 30
"""An answer that has ended takes this part of what it took while it was written."""
_ALLOCATED = 1.25
"""Factor on a body: the most that Redis's allocator uses for it."""


class MemoryLimit:
    """Redis's memory as this ingress knows it: the last reading, and what it has admitted since."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ingresses = 1
        self._taken_bytes = 0
        """Bytes that were ever admitted."""
        self._on_their_way_bytes = 0
        self._seen_bytes = 0
        self._reserved_bytes = 0
        self._places = 0
        """Answers that the engines could write besides those that are reserved with all tokens."""
        self.workers = 0
        """How many run here."""
        self.seen: Memory | None = None
        """The last reading; None before the first one, and if Redis does not report its memory."""
        self.warnings: tuple[str, ...] = ()
        """What is wrong with `maxmemory`, for Redis's operator."""

    @property
    def room_bytes(self) -> float:
        """What requests may use of Redis's memory in total; infinite if Redis has no limit."""
        limit_bytes = self.seen.limit_bytes if self.seen is not None else 0
        return self._settings.redis.max_memory_share * limit_bytes if limit_bytes else math.inf

    def looking(self) -> None:
        """Redis is about to be asked. Its answer will include everything that it has acknowledged
        so far.
        """
        self._seen_bytes = self._taken_bytes - self._on_their_way_bytes

    def told(
        self, memory: Memory | None, ingresses: int, outputs_bytes: Sequence[int] = ()
    ) -> None:
        """Redis has answered (None: it does not tell its memory, so there is no limit). The
        capacity is divided among `ingresses`. `outputs_bytes`: what the answers take that this
        ingress waits for, or has started.
        """
        self.seen = memory
        self._ingresses = max(1, ingresses)
        slots = self.workers * self._settings.workers.max_running_requests
        places = math.ceil(slots / self._ingresses)
        written = sum(heapq.nlargest(places, outputs_bytes))
        self._reserved_bytes = written + (sum(outputs_bytes) - written) // _PACKED
        self._places = places - len(outputs_bytes)
        warnings = () if memory is None else self._what_is_wrong(memory)
        for warning in warnings:
            if warning not in self.warnings:
                log.warning("Redis: %s", warning)
        self.warnings = warnings

    def most_of_one(self, output_bytes: int) -> int:
        """What is reserved for an answer: no more than it may have, nor than a few can have."""
        return int(min(output_bytes, self._settings.journal.max_answer_bytes, self.room_bytes / 4))

    def take(self, body_bytes: int, output_bytes: int = 0) -> int:
        """Count a request that is about to be admitted, or refuse it (`storage_full`). Pass the
        result to `answered`. `output_bytes`: see `most_of_one`.
        """
        cost_bytes = int(body_bytes * _ALLOCATED) + _ENTRIES_BYTES
        memory, share = self.seen, self._settings.redis.max_memory_share
        reserved_bytes = output_bytes if self._places > 0 else output_bytes // _PACKED
        reserved_bytes += self._reserved_bytes
        if memory is not None and memory.limit_bytes:
            if body_bytes <= _SMALL_BYTES:
                share = (1 + share) / 2
            room_bytes = (share * memory.limit_bytes - memory.used_bytes) / self._ingresses
            # Redis briefly holds a body twice: as received, and as stored.
            unseen_bytes = self._taken_bytes - self._seen_bytes + self._on_their_way_bytes
            if unseen_bytes + cost_bytes > room_bytes - reserved_bytes:
                raise RequestRefused(
                    Reason.STORAGE_FULL,
                    "The service's storage is nearly full; please try again later, or send a "
                    "shorter request, or ask for a shorter answer (max_tokens).",
                    retry_after_s=timings.FULL_STORAGE_RETRY_AFTER_S,
                )
        self._reserved_bytes = reserved_bytes
        self._places -= 1
        self._taken_bytes += cost_bytes
        self._on_their_way_bytes += cost_bytes
        return cost_bytes

    def answered(self, cost_bytes: int) -> None:
        self._on_their_way_bytes -= cost_bytes

    def _what_is_wrong(self, memory: Memory) -> tuple[str, ...]:
        needed_bytes, room = 4 * self._settings.ingress.max_body_bytes, self.room_bytes
        if not memory.limit_bytes or needed_bytes <= room:
            return ()
        return (
            f"maxmemory is {memory.limit_bytes:,} bytes, of which requests may use {room:,.0f}, "
            f"too few for four bodies of ingress.max_body_bytes ({needed_bytes:,}): raise it",
        )
