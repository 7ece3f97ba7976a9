"""What Redis tells about itself (`INFO`): how much memory it uses, and what is wrong with it. Pure.

A Redis that refuses `INFO`, or leaves out a field, costs what needs the field and is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Memory:
    """Redis's memory, from `INFO memory`. `limit_bytes` is its `maxmemory`, 0 if there is none."""

    used_bytes: int
    limit_bytes: int
    policy: str

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Memory | None:
        """Parse `INFO`; None if it does not tell how full Redis is. `used_bytes` is what Redis
        compares with its limit, without the buffers for its file and its replicas.
        """
        try:
            used_bytes, limit_bytes = int(info["used_memory"]), int(info["maxmemory"])
            uncounted_bytes = int(info.get("mem_not_counted_for_evict", 0))
        except (LookupError, TypeError, ValueError):
            return None
        policy = str(info.get("maxmemory_policy", ""))
        return cls(used_bytes - uncounted_bytes, limit_bytes, policy)

    def wrong_settings(self) -> list[str]:
        """What is wrong with the limit and the policy, each as a sentence for Redis's operator."""
        wrong = []
        if self.policy not in ("", "noeviction"):
            wrong.append(
                f"maxmemory-policy is {self.policy}, so Redis will delete requests: set it to "
                "noeviction"
            )
        if not self.limit_bytes:
            wrong.append(
                "maxmemory is 0, so Redis may use all of the machine's memory: set a limit"
            )
        return wrong


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
