"""A well-behaved client that measures its waiting times: small requests, one after another."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from tests.running_time import RunningTime
from tests.service.support import CHAT, asking, of_tenant

EMBEDDINGS = "/v1/embeddings"
_PERIOD_S = 0.1


@dataclass
class Polite:
    """Asks at a steady pace for as long as the `with` block lasts. Times in seconds, of whole
    answers; what the machine kept this process from its turns is not counted.
    """

    url: str
    key: str
    model: str
    path: str = CHAT
    times_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Polite:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def p99_s(self) -> float:
        """The 99th percentile (nearest rank)."""
        ordered = sorted(self.times_s)
        return ordered[max(0, -(-len(ordered) * 99 // 100) - 1)]

    def _ask(self) -> None:
        body = asking(tokens=2, model=self.model)
        if self.path == EMBEDDINGS:
            body = {"model": self.model, "input": "Hello"}
        headers = of_tenant(self.key)
        client = httpx.Client(base_url=self.url, headers=headers, timeout=120)
        with client as http, RunningTime() as running:
            while not self._stop.is_set():
                began_s = running.now_s()
                try:
                    answer = http.post(self.path, json=body)
                    if answer.status_code != 200:
                        self.wrong.append(f"{answer.status_code}: {answer.text[:200]}")
                except httpx.TransportError as error:
                    self.wrong.append(repr(error))
                took_s = running.now_s() - began_s
                self.times_s.append(took_s)
                self._stop.wait(max(0.0, _PERIOD_S - took_s))
