"""What an engine says of itself, again and again, under vLLM's names."""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from .client import fetch
from .errors import SystemFailed

GAUGES = (
    *("num_requests_running", "num_requests_waiting"),
    *("kv_cache_usage_perc", "num_preemptions_total"),
)
"""vLLM's names for what a `Reading` has after its time."""
_LINE = re.compile(rf"^vllm:({'|'.join(GAUGES)})(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)


class Reading(NamedTuple):
    """One reading; ``preemptions`` counts since the engine's start."""

    at_s: float
    running: float
    waiting: float
    kv_used: float
    preemptions: float


def parse_page(page: str, at_s: float) -> Reading | None:
    """The values on a metrics page, those of several engines added; None if it has none of
    vLLM's.
    """
    found: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        found[name] = found.get(name, 0.0) + float(value)
    if GAUGES[0] not in found:
        return None
    return Reading(at_s, *(found.get(name, 0.0) for name in GAUGES))


class Watched:
    """Something that can be read again and again."""

    every_s = 0.2

    def now_s(self) -> float:
        """Its clock."""
        return time.perf_counter()

    async def read(self) -> Reading | None:
        """Read now; None if there is nothing to read."""
        return None

    async def watch(self, duration_s: float) -> list[Reading]:
        """Read for ``duration_s``; the first and the last reading are at its ends."""
        ends_s = self.now_s() + duration_s
        readings = [await self.read()]
        while (left_s := ends_s - self.now_s()) > 0:
            await asyncio.sleep(min(self.every_s, left_s))
            readings.append(await self.read())
        return [one for one in readings if one is not None]


class EnginePage(Watched):
    """The first of ``urls`` that has vLLM's metrics, read five times a second."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._url = next((url for url in urls if parse_page(fetch(url), 0.0)), "")
        if not self._url:
            raise SystemFailed(f"no page has vLLM's metrics: {', '.join(urls)}")

    async def read(self) -> Reading | None:
        page = await asyncio.to_thread(fetch, self._url)
        return parse_page(page, self.now_s())
