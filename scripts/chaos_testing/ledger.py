"""Whether the ledger, the journals and the clients say the same: every request that has ended once,
and every token.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from scripts.chaos_testing.parts import Parts
from scripts.chaos_testing.traffic import Told
from serve_app import timings
from serve_app.journal.entries import entry_from_redis
from serve_app.journal.usage import STATES, Row, Usage
from serve_app.redis.keyspace import journal_key, usage_key

_WITHIN_S = 60.0
_AT_ONCE = 500


async def differences(
    parts: Parts, all_told: Sequence[Told], namespace: str = "hermes"
) -> list[str]:
    """A sentence for each difference, once all requests have ended."""
    redis = parts.operator()
    until_s = time.monotonic() + _WITHIN_S
    while True:
        journals, open_ones = await _journals(redis, namespace)
        if not open_ones or time.monotonic() > until_s:
            break
        await asyncio.sleep(timings.HEALTH_LOOK_S)
    found = [f"{name} has not ended" for name in open_ones]
    booked = await _ledger(redis, namespace)
    found += [
        f"{name}: {booked[name]} in the ledger, {journals[name]} in the journals"
        for name in sorted({*booked, *journals})
        if booked[name] != journals[name]
    ]
    return found + [
        f"{told.request_id}: {used['output_tokens']} tokens booked, {told.tokens} received"
        for told in all_told
        if told.done and (used := told.state.get("usage"))
        if used["output_tokens"] != told.tokens
    ]


async def _journals(redis: Any, namespace: str) -> tuple[Counter[str], list[str]]:
    """The sums over all journals that have ended, and the names of the others."""
    found, open_ones = Counter[str](), list[str]()
    keys = [key async for key in redis.scan_iter(journal_key(namespace, "*"), count=1_000)]
    for at in range(0, len(keys), _AT_ONCE):
        pipeline = redis.pipeline(transaction=False)
        for key in keys[at : at + _AT_ONCE]:
            pipeline.xrevrange(key, count=1)
        for key, tail in zip(keys[at : at + _AT_ONCE], await pipeline.execute(), strict=True):
            last = entry_from_redis(tail[0]) if tail else None
            if last is None or last.state is None:
                open_ones.append(key.decode().rpartition(":")[2])
            else:
                found[last.state] += 1
                found.update(_tokens(Usage.decode(last.used)))
    return found, open_ones


async def _ledger(redis: Any, namespace: str) -> Counter[str]:
    found = Counter[str]()
    async for key in redis.scan_iter(usage_key(namespace, 0).removesuffix("0") + "*"):
        for value in (await redis.hgetall(key)).values():
            row = Row.decode(value)
            found.update(dict(zip(STATES, row.states, strict=True)))
            found.update(_tokens(row.usage))
    return found


def _tokens(usage: Usage) -> dict[str, int]:
    return {f"{name} tokens": count for name, count in usage._asdict().items()}
