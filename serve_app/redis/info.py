"""What Redis tells about itself (`INFO`), and what is wrong with it. Pure.

A Redis that refuses `INFO`, or leaves out a field, costs what needs the field and is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.redis.memory import Memory

_MEMORY = "no request is refused because Redis is full"
FIELDS = {
    "used_memory": _MEMORY,
    "maxmemory": _MEMORY,
    "mem_not_counted_for_evict": "it counts as full a little early",
    "maxmemory_policy": "it is unknown whether Redis deletes requests to make room",
    "aof_enabled": "it is unknown whether a restart loses every request",
}
"""The fields that the service reads, and what follows if one is missing."""


def parse_info(reply: bytes) -> dict[str, str]:
    """The fields of a reply to `INFO`."""
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def warnings(info: Mapping[str, Any] | None) -> list[str]:
    """What Redis's operator should know, each as a sentence; None: Redis refuses `INFO`."""
    if info is None:
        return [f"it refuses INFO to this user, so {_MEMORY}"]
    wrong = [
        f"INFO does not tell {name}, so {then}" for name, then in FIELDS.items() if name not in info
    ]
    if str(info.get("aof_enabled")) == "0":
        wrong.append("appendonly is no, so a restart loses every request: set it to yes")
    memory = Memory.from_info(info)
    return wrong if memory is None else [*wrong, *memory.wrong_settings()]
