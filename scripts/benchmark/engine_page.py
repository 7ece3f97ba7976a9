"""What an engine says of itself, under vLLM's names."""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from .client import fetch
from .errors import SystemFailed

GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
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


class EnginePage:
    """The first of ``urls`` that has vLLM's metrics."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._url = next((url for url in urls if parse_page(fetch(url), 0.0)), "")
        if not self._url:
            raise SystemFailed(f"no page has vLLM's metrics: {', '.join(urls)}")

    async def read(self) -> Reading | None:
        """Read it now; None if it does not answer."""
        page = await asyncio.to_thread(fetch, self._url)
        return parse_page(page, time.perf_counter())
