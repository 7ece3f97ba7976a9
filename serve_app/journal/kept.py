"""How many bytes of Redis the answers occupy that are kept for hours and days because nobody waited
for them: counted per tenant and in total, by the hour in which they expire.
"""

from __future__ import annotations

from typing import NamedTuple

from serve_app import timings
from serve_app.journal.entries import Entry
from serve_app.journal.facts import Summary
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import kept_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.settings import Settings

_STREAM_BYTES = 4_700
"""What Redis needs for a stream besides the fields (docs/redis.md)."""
_ALL = ""
"""No tenant has this name."""


class Kept(NamedTuple):
    """Bytes that are kept."""

    of_tenant: int
    in_all: int


def size_of(terminal: Entry) -> int:
    """About how much a journal occupies of which only this entry is left."""
    # The script that ends a request from outside adds what was used (`finish.py`).
    return sum(map(len, terminal.fields.values())) - len(terminal.used) + _STREAM_BYTES


def keeping(settings: Settings, summary: Summary | None, size: int) -> list[Command]:
    """The commands that count a request that has ended, whose journal has `size` bytes, until it
    expires, or that no longer count it (negative); none if it is not kept for later.
    """
    facts = summary.request if summary else None
    if summary is None or facts is None or not facts.kept:
        return []
    size += facts.body_bytes if size > 0 else -facts.body_bytes
    hour = (summary.ended_ms + int(facts.retention_s * 1000)) // timings.HOUR_MS + 1
    longest_ms = int(settings.journal.max_retention_s * 1000) + 2 * timings.HOUR_MS
    commands: list[Command] = []
    for key in (kept_key(settings.namespace, one) for one in (facts.tenant, _ALL)):
        commands += [("HINCRBY", key, hour, size), ("PEXPIRE", key, longest_ms)]
    return commands


async def kept(link: RedisLink, namespace: str, tenant: str, now_ms: int) -> Kept:
    """What is kept now; forgets the hours that have passed.

    Args:
        tenant: whose share to tell; empty if only the total is wanted.

    Raises:
        RedisUnavailable: Redis cannot be reached.
    """
    keys = {one: kept_key(namespace, one) for one in (tenant, _ALL)}
    pages = all_answered(await link.call([("HGETALL", key) for key in keys.values()]))
    sums, passed = dict[str, int](), list[Command]()
    for (whose, key), page in zip(keys.items(), pages, strict=True):
        sizes = dict(zip(map(int, page[::2]), map(int, page[1::2]), strict=True))
        over = [hour for hour in sizes if hour * timings.HOUR_MS <= now_ms]
        sums[whose] = sum(sizes.values()) - sum(sizes[hour] for hour in over)
        if over:
            passed.append(("HDEL", key, *over))
    if passed:
        await link.call(passed)
    return Kept(sums[tenant], sums[_ALL])
