"""What vLLM says of itself on its metrics page, read again and again."""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import NamedTuple
from urllib.request import ProxyHandler, build_opener

from ..errors import SystemFailed

EVERY_S = 0.2
_TIMEOUT_S = 5.0
_LINE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total)"
    r"(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)


class Reading(NamedTuple):
    """One reading of the page; ``preemptions`` counts since the engine's start."""

    at_s: float
    running: float
    waiting: float
    kv_used: float
    preemptions: float


def parse_page(page: str, at_s: float) -> Reading | None:
    """The values on a metrics page; None if it has none of vLLM's."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        found[name] = found.get(name, 0.0) + float(value)
    if "num_requests_running" not in found:
        return None
    return Reading(
        at_s,
        found["num_requests_running"],
        found.get("num_requests_waiting", 0.0),
        found.get("kv_cache_usage_perc", 0.0),
        found.get("num_preemptions_total", 0.0),
    )


class EnginePage:
    """The first of ``urls`` that has vLLM's metrics."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._url = next((url for url in urls if parse_page(_fetch(url), 0.0)), "")
        if not self._url:
            raise SystemFailed(f"no page has vLLM's metrics: {', '.join(urls)}")

    async def read(self) -> Reading:
        """Read the page now."""
        page = await asyncio.to_thread(_fetch, self._url)
        reading = parse_page(page, time.perf_counter())
        if reading is None:
            raise SystemFailed(f"{self._url} has vLLM's metrics no more")
        return reading

    async def watch(self, duration_s: float) -> list[Reading]:
        """Read for ``duration_s``; the first and the last reading are at its ends."""
        ends_s = time.perf_counter() + duration_s
        readings = [await self.read()]
        while (left_s := ends_s - time.perf_counter()) > 0:
            await asyncio.sleep(min(EVERY_S, left_s))
            readings.append(await self.read())
        return readings


def _fetch(url: str) -> str:
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
