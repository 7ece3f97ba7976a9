"""The ledger: what requests have used, in sums.

A row sums up the requests of one tenant, API key, class and model that ended in one hour. It is
written by the script that ends them (`requests/lifecycle.lua`), so it can be neither ahead of the
journals nor behind them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from serve_app.contract import FINAL
from serve_app.journal.usage import Usage
from serve_app.redis.keyspace import usage_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered

log = logging.getLogger("hermes.ledger")

_AT_ONCE = 24
"""Hours that one round trip reads."""


class Whose(NamedTuple):
    """Whose requests a row sums up. `key` is empty if no API key is required."""

    tenant: str
    key: str
    request_class: str
    model: str

    def encode(self) -> str:
        """The row's name. Only the model's name, which is the last, may contain spaces."""
        return f"{self.tenant} {self.key or '-'} {self.request_class} {self.model}"

    @classmethod
    def decode(cls, name: bytes) -> Whose:
        tenant, key, request_class, model = name.decode().split(" ", 3)
        return cls(tenant, key.removeprefix("-"), request_class, model)


class Row(NamedTuple):
    """Sums over requests."""

    states: tuple[int, ...]
    """How many ended in each of `FINAL`."""
    usage: Usage
    attempts: int
    queued_ms: int
    """From admission until a worker began, or until the end if none did."""
    running_ms: int
    """From then on."""

    @property
    def requests(self) -> int:
        return sum(self.states)

    def __add__(self, other: object) -> Row:
        assert isinstance(other, Row)
        states = tuple(map(sum, zip(self.states, other.states, strict=True)))
        usage = Usage(*map(sum, zip(self.usage, other.usage, strict=True)))
        rest = (a + b for a, b in zip(self[2:], other[2:], strict=True))
        return Row(states, usage, *rest)

    @classmethod
    def decode(cls, value: bytes) -> Row:
        """A newer version may have added numbers."""
        numbers = [*map(int, value.split())]
        states, used = len(FINAL), len(FINAL) + len(Usage._fields)
        if len(numbers) < used + 3:
            raise ValueError(f"a row with {len(numbers)} numbers")
        usage = Usage(*numbers[states:used])
        return cls(tuple(numbers[:states]), usage, *numbers[used : used + 3])


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
