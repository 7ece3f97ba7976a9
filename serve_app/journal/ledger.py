"""Reads the ledger: what requests have used, by time and by whatever they are grouped by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping

from serve_app.journal.usage import Row, Whose
from serve_app.redis.keyspace import usage_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered

log = logging.getLogger("hermes.ledger")

_AT_ONCE = 24
"""Hours that one round trip reads."""

Group = Callable[[Whose], Hashable | None]
"""What a row is summed up under; None: it does not count."""


async def sums(
    link: RedisLink, namespace: str, hours: range, group: Group
) -> list[Mapping[Hashable, Row]]:
    """The sums by group in `hours` (since 1970); one mapping for each period, of as many hours as
    the range's step.

    Raises:
        RedisUnavailable: Redis cannot be reached.
    """
    periods: list[dict[Hashable, Row]] = [{} for _ in hours]
    every = [
        (number, hour)
        for number, begin in enumerate(hours)
        for hour in range(begin, begin + hours.step)
    ]
    for at in range(0, len(every), _AT_ONCE):
        part = every[at : at + _AT_ONCE]
        questions = [("HGETALL", usage_key(namespace, hour)) for _, hour in part]
        pages = all_answered(await link.call(questions, large=True))
        numbers = [number for number, _ in part]
        for number, page in zip(numbers, pages, strict=True):
            if page:
                await asyncio.to_thread(_add, periods[number], page, group)
    return [*periods]


def _add(period: dict[Hashable, Row], page: list[bytes], group: Group) -> None:
    for name, value in zip(page[::2], page[1::2], strict=True):
        try:
            whose, row = Whose.decode(name), Row.decode(value)
        except ValueError:
            log.warning(
                "ledger: a row cannot be decoded: name=%r value=%r", name[:200], value[:200]
            )
            continue
        if (key := group(whose)) is not None:
            period[key] = period[key] + row if key in period else row
