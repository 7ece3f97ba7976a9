"""What is wrong with Redis's configuration, each as a sentence for its operator. Pure.

What `INFO` does not tell, the bounds on the size of a value, `check.py` finds by trying.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.redis.replies import Memory

_MEMORY = "no request is refused because Redis is full"
FIELDS = {
    "used_memory": _MEMORY,
    "maxmemory": _MEMORY,
    "mem_not_counted_for_evict": "it counts as full a little early",
    "maxmemory_policy": "it is unknown whether Redis deletes requests to make room",
    "aof_enabled": "it is unknown whether a restart loses every request",
}
"""The fields of `INFO` that the service reads, and what follows if one is missing."""


def warnings(info: Mapping[str, Any] | None) -> list[str]:
    """What `INFO` tells; None: Redis refuses it."""
    if info is None:
        return [f"it refuses INFO to this user, so {_MEMORY}"]
    wrong = [
        f"INFO does not tell {name}, so {then}" for name, then in FIELDS.items() if name not in info
    ]
    if str(info.get("aof_enabled")) == "0":
        wrong.append("appendonly is no, so a restart loses every request: set it to yes")
    memory = Memory.from_info(info)
    return wrong if memory is None else [*wrong, *_of_memory(memory)]


def _of_memory(memory: Memory) -> list[str]:
    wrong = []
    if memory.policy not in ("", "noeviction"):
        wrong.append(
            f"maxmemory-policy is {memory.policy}, so Redis will delete requests: set it to "
            "noeviction"
        )
    if not memory.limit_bytes:
        wrong.append("maxmemory is 0, so Redis may use all of the machine's memory: set a limit")
    return wrong


def warnings_of_size(memory: Memory, room_bytes: float, max_body_bytes: int) -> list[str]:
    """Whether `maxmemory` is too small. `room_bytes`: what requests may use of it."""
    needed_bytes = 4 * max_body_bytes
    if not memory.limit_bytes or needed_bytes <= room_bytes:
        return []
    return [
        f"maxmemory is {memory.limit_bytes:,} bytes, of which requests may use {room_bytes:,.0f}, "
        f"too few for four bodies of ingress.max_body_bytes ({needed_bytes:,}): raise it"
    ]
