"""The meaning of Redis's replies: errors, which replies to raw commands contain as exception
objects, and what `INFO` tells. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.errors import RedisRefuses, RedisUnavailable, RefusedForNow

Reply = Any

_DEMOTED = ("READONLY ", "MASTERDOWN ")
_FOR_NOW = (
    "OOM ",
    "LOADING ",
    "BUSY ",
    "TRYAGAIN ",
    "NOREPLICAS ",
    "MISCONF ",
    (_NO_MORE_CLIENTS := "ERR max number of clients"),
    *_DEMOTED,
)


def answered(reply: Reply, what: str = "Redis") -> Any:
    """Return a reply that is not an error; else raise `RedisUnavailable` with Redis's own text."""
    if isinstance(reply, Exception):
        raise RedisUnavailable(f"{what}: {reply}")
    return reply


def all_answered(replies: Sequence[Reply], what: str = "Redis") -> Sequence[Any]:
    """The same for several replies."""
    for reply in replies:
        answered(reply, what)
    return replies


def with_fields(item: Any) -> tuple[bytes, dict[bytes, bytes]]:
    """The id and the fields of a stream's entry, from `[id, [field, value, ...]]`."""
    entry_id, flat = item
    return entry_id, dict(zip(flat[::2], flat[1::2], strict=True))


def owned_by_another(namespace: str, owner: bytes | None, service: str) -> str:
    """Why a service may not use a namespace, in a sentence; empty if it may. `owner` is what the
    key of the namespace's service holds; a `service` without a name is not compared.
    """
    name = (owner or b"").decode(errors="replace")
    if not service or name in ("", service):
        return ""
    return (
        f"the namespace '{namespace}' of this Redis belongs to the service '{name}', and this one "
        f"is '{service}' (settings `namespace`, `service`)"
    )


def check_refused(what: str, reply: Reply) -> None:
    """Raise an error that is the reply to a command: `RedisRefuses`, or `RefusedForNow` if it
    passes by itself, because Redis is full, loads, or fails over.
    """
    if isinstance(reply, Exception):
        check_passes(what, str(reply))
        raise RedisRefuses(what, str(reply))


def check_passes(what: str, error: str) -> None:
    """Raise `RefusedForNow` if this error of Redis passes by itself."""
    if error.startswith(_NO_MORE_CLIENTS):
        raise RefusedForNow(RefusedForNow.CLIENTS, error)
    if error.startswith(_FOR_NOW):
        raise RefusedForNow(what, error)


def _begins(reply: Reply, words: tuple[str, ...] | str) -> bool:
    return isinstance(reply, Exception) and str(reply).startswith(words)


def is_refused_for_now(reply: Reply) -> bool:
    """Whether Redis may accept the same command later: when the error has passed, or when its
    operator has given a right back.
    """
    return _begins(reply, (*_FOR_NOW, "NOPERM ", "NOAUTH "))


def is_demoted(reply: Reply) -> bool:
    """Whether this Redis is not the primary (any more)."""
    return _begins(reply, _DEMOTED)


def is_full(reply: Reply) -> bool:
    """Whether Redis has reached its `maxmemory`."""
    return _begins(reply, "OOM ")


def is_unknown_script(reply: Reply) -> bool:
    """Whether Redis has forgotten the script, and therefore executed nothing of it."""
    return _begins(reply, "NOSCRIPT ")


def is_id_taken(reply: Reply) -> bool:
    """Whether Redis rejected an `XADD` because its id is not above the last one in the stream."""
    said = str(reply) if isinstance(reply, Exception) else ""
    return "exhausted" in said or "equal or smaller" in said


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


def parse_info(reply: bytes) -> dict[str, str]:
    """The fields of a reply to `INFO`."""
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
