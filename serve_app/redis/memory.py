"""How much memory Redis uses, and its limit. Pure."""

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
