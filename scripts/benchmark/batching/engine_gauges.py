"""What vLLM says of itself on its metrics page while a run is under way."""

import asyncio
import re
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

_EVERY_S = 0.5
_TIMEOUT_S = 5.0
_LINE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
_RUNNING, _WAITING, _KV_USED = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
)


class EngineGauges:
    """Reads the page of the server at ``url`` now and then; keeps the highest values."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._page = f"{parts.scheme}://{parts.netloc}/metrics"
        self.readings = 0
        self.most_running = 0.0
        self.most_waiting = 0.0
        self.most_kv_used = 0.0

    async def watch(self) -> None:
        """Read twice a second until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.read()

    async def read(self) -> bool:
        """Read once; whether the page has vLLM's gauges."""
        return self.take(await asyncio.to_thread(self._fetch))

    def take(self, page: str) -> bool:
        """Take the values of a metrics page; whether it has vLLM's gauges."""
        found: dict[str, float] = {}
        for name, value in _LINE.findall(page):
            found[name] = found.get(name, 0.0) + float(value)
        if _RUNNING not in found:
            return False
        self.readings += 1
        self.most_running = max(self.most_running, found[_RUNNING])
        self.most_waiting = max(self.most_waiting, found.get(_WAITING, 0.0))
        self.most_kv_used = max(self.most_kv_used, found.get(_KV_USED, 0.0))
        return True

    def _fetch(self) -> str:
        try:
            with build_opener(ProxyHandler({})).open(self._page, timeout=_TIMEOUT_S) as answer:
                return str(answer.read().decode())
        except OSError:  # an endpoint without such a page has no figures of its engine
            return ""
