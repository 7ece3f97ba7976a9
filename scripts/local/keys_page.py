"""Writes docs/redis-keys.md from the table of all Redis keys; a test compares the two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from serve_app.redis.keyspace import KINDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "redis-keys.md"

_HEAD = """# Keys in Redis

Everything that the service keeps in Redis. `<namespace>` is the setting `namespace` (`hermes`).
The module that owns a structure describes its fields: [journal](../serve_app/journal/entries.py),
[queue](../serve_app/request_queue/queue.py),
[dead letters](../serve_app/request_queue/dead_letters.py),
[leases](../serve_app/cluster/leases.py).

| name | type | holds | written by | lifetime |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    for kind in KINDS:
        holds = " ".join(kind.holds.split())
        yield (f"| `{kind.pattern}` | {kind.type} | {holds} | {kind.writers} | {kind.lifetime} |\n")


if __name__ == "__main__":
    PAGE.write_text(page())
