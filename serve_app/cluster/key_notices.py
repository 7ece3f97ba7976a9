"""Which API keys were revoked, and when each was used last: ingresses tell each other with every
renewal of a lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app import timings
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import key_uses_key, revoked_key

MAX_REVOKED = 10_000
MAX_USES = 100_000
_USES_AT_ONCE = 1_000


def revoke(namespace: str, digest: bytes, now_ms: int) -> list[Command]:
    """What refuses a key, by its SHA-256, at every ingress. `now_ms`: by Redis's clock."""
    key = revoked_key(namespace)
    return [
        ("ZADD", key, now_ms + timings.REVOKED_MS, digest),
        ("ZREMRANGEBYSCORE", key, "-inf", now_ms),
        ("ZREMRANGEBYRANK", key, 0, -MAX_REVOKED - 1),
    ]


def last_uses(namespace: str) -> Command:
    """What asks for all keys that were used, by their ids, with Unix seconds as scores."""
    return ("ZRANGEBYSCORE", key_uses_key(namespace), "-inf", "+inf", "WITHSCORES")


def scored(reply: Sequence[bytes]) -> dict[bytes, int]:
    """A reply `WITHSCORES`."""
    return {member: int(float(score)) for member, score in zip(*[iter(reply)] * 2, strict=True)}


class KeyNotices:
    """What an ingress and the others tell each other of API keys: which were revoked, and when each
    was used last. A file of keys may take a minute to reach a node, as a Secret of Kubernetes does,
    so whoever revokes a key also adds its digest to the sorted set `{ns}:revoked`.
    """

    def __init__(self, namespace: str) -> None:
        self._revoked_at, self._uses_at = revoked_key(namespace), key_uses_key(namespace)
        self._revoked: dict[bytes, int] = {}
        """Until when each is refused, in Unix milliseconds."""
        self._used_s: dict[str, int] = {}
        self._told_s: dict[str, int] = {}

    def is_revoked(self, digest: bytes) -> bool:
        return digest in self._revoked

    def used(self, key_id: str, now_s: float) -> None:
        if key_id in self._used_s or len(self._used_s) < _USES_AT_ONCE:
            self._used_s[key_id] = int(now_s)

    def commands(self, now_ms: int) -> list[Command]:
        """What tells and asks Redis; call `answered` with the last reply."""
        found: list[Command] = []
        if self._used_s:
            uses = [word for name, at_s in self._used_s.items() for word in (at_s, name)]
            found.append(("ZADD", self._uses_at, "GT", *uses))
            found.append(("ZREMRANGEBYRANK", self._uses_at, 0, -MAX_USES - 1))
            self._told_s = dict(self._used_s)
        since_ms = max(now_ms, max(self._revoked.values(), default=0) - timings.REVOKED_LATE_MS)
        where = (self._revoked_at, since_ms, "+inf", "WITHSCORES", "LIMIT", 0, MAX_REVOKED)
        return [*found, ("ZRANGEBYSCORE", *where)]

    def answered(self, reply: Any, now_ms: int) -> None:
        new = self._used_s.items() - self._told_s.items()
        self._used_s, self._told_s = dict(new), {}
        kept = {digest: end_ms for digest, end_ms in self._revoked.items() if end_ms > now_ms}
        self._revoked = kept | scored(reply)
