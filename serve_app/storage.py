"""How full Redis is, and whether a request still fits: above a share of its memory only endings do. Pure.

Redis itself refuses every append once it is full, also those that would make room. So requests stop before that: large
ones at `redis.max_memory_share`, small ones halfway between that and the end, so that who sends large ones does not
shut the door for everybody.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.errors import Reason, RequestRefused
from serve_app.settings import Settings

log = logging.getLogger("hermes.ingress")

_SMALL_BYTES = 16 * 1024
_ENTRIES_BYTES = 4_000
"""What a waiting request takes beside its body, and the first of its answer."""
_ALLOCATED = 1.25
"""Of a body: what Redis's allocator takes for it, at most."""
_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Redis's memory, as `INFO memory` shows it. `limit_bytes`: its `maxmemory`, 0 where there is none."""

    used_bytes: int
    limit_bytes: int
    policy: str

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Memory:
        """`used_bytes` is what Redis compares with its limit: without the buffers of its file and its replicas."""
        used_bytes = int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0))
        return cls(used_bytes, int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "")))


class Storage:
    """Redis's memory as this ingress sees it: the last look, and what was admitted here since."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ingresses = 1
        self._taken_bytes = 0
        """By what was let in, ever."""
        self._on_their_way_bytes = 0
        self._seen_bytes = 0
        self.memory: Memory | None = None
        self.warnings: tuple[str, ...] = ()
        """What is wrong with how Redis is set up, for its operator."""
        self._refused = False

    @property
    def room_bytes(self) -> float:
        """What requests may take of Redis's memory in all; infinite where it has no limit."""
        limit_bytes = self.memory.limit_bytes if self.memory is not None else 0
        return self._settings.redis.max_memory_share * limit_bytes if limit_bytes else math.inf

    def looking(self) -> None:
        """Redis is about to be asked: its answer will hold all that it has acknowledged until now."""
        self._seen_bytes = self._taken_bytes - self._on_their_way_bytes

    def told(self, memory: Memory | None, ingresses: int) -> None:
        """Redis has answered (None: it refuses `INFO`, so there is no bound); the room is divided among `ingresses`."""
        self.memory = memory
        self._ingresses = max(1, ingresses)
        if memory is None and not self._refused:
            log.warning("Redis refuses INFO to this user: how full it is is not known, and nothing is refused for it")
        self._refused = memory is None
        warnings = tuple(self._what_is_wrong(memory)) if memory is not None else self.warnings
        for warning in warnings:
            if warning not in self.warnings:
                log.warning("Redis: %s", warning)
        self.warnings = warnings

    def take(self, body_bytes: int) -> int:
        """A request with such a body is about to be admitted. Returns what `answered` is to be told.

        Raises:
            RequestRefused: `storage_full`.
        """
        cost_bytes = int(body_bytes * _ALLOCATED) + _ENTRIES_BYTES
        memory, share = self.memory, self._settings.redis.max_memory_share
        if memory is not None and memory.limit_bytes:
            if body_bytes <= _SMALL_BYTES:
                share = (1 + share) / 2
            room_bytes = (share * memory.limit_bytes - memory.used_bytes) / self._ingresses
            # What is on its way stands in Redis twice, for a moment: as it came, and as it is kept.
            if self._taken_bytes - self._seen_bytes + self._on_their_way_bytes + cost_bytes > room_bytes:
                raise RequestRefused(
                    Reason.STORAGE_FULL,
                    "The service's storage is nearly full; please try again later, or send a shorter request.",
                    retry_after_s=_RETRY_AFTER_S,
                )
        self._taken_bytes += cost_bytes
        self._on_their_way_bytes += cost_bytes
        return cost_bytes

    def answered(self, cost_bytes: int) -> None:
        """Redis has the request, or refused it."""
        self._on_their_way_bytes -= cost_bytes

    def _what_is_wrong(self, memory: Memory) -> list[str]:
        wrong = []
        if memory.policy not in ("", "noeviction"):
            wrong.append(f"maxmemory-policy is {memory.policy}: it will delete requests; set it to noeviction")
        if not memory.limit_bytes:
            wrong.append("maxmemory is 0: it may take all of the machine's memory; set it")
        elif (needed_bytes := 4 * self._settings.ingress.max_body_bytes) > (room := self.room_bytes):
            wrong.append(
                f"maxmemory is {memory.limit_bytes:,} bytes, of which requests may take {room:,.0f}: too few for four "
                f"bodies of ingress.max_body_bytes ({needed_bytes:,}); set it to more"
            )
        return wrong
