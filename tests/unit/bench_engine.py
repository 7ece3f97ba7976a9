"""For the tests of `scripts/bench`: a small engine, requests to it, and rows without a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import fields

from scripts.benchmark.client import RequestMaker, Shape
from scripts.benchmark.measurement import Row
from scripts.benchmark.stats import Latency
from serve_app.journal.events import DONE
from tests.http_server import END, Asked, Wire, chunk, event, head, whole


class Engine:
    """A script that streams as many tokens as were asked for, each after ``step_s`` and the first
    ``begin_s`` per token later, of which ``slots`` requests get some at a time. It has vLLM's
    metrics page.
    """

    def __init__(
        self,
        step_s: float,
        begin_s: float = 0.0,
        slots: int = 1000,
        word: Callable[[int], str] = lambda _: "a",
    ) -> None:
        self.begun: list[int] = []
        """The lengths of the requests in the order of their first tokens."""
        self.running = self.most_running = 0
        self._step_s = step_s
        self._begin_s = begin_s
        self._slots = threading.Semaphore(slots)
        self._word = word
        self._lock = threading.Lock()
        self._waiting = 0

    def __call__(self, asked: Asked, wire: Wire) -> None:
        if asked.method == "GET":
            wire.send(whole(200, self._page().encode()))
            return
        self._count(waiting=1)
        with self._slots:
            self._count(waiting=-1, running=1)
            try:
                self._stream(json.loads(asked.body)["max_tokens"], wire)
            finally:
                self._count(running=-1)

    def _count(self, waiting: int = 0, running: int = 0) -> None:
        with self._lock:
            self._waiting += waiting
            self.running += running
            self.most_running = max(self.most_running, self.running)

    def _page(self) -> str:
        return (
            f'vllm:num_requests_running{{engine="0"}} {self.running}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {self._waiting}\n'
            f"vllm:num_preemptions_total {len(self.begun)}\nvllm:kv_cache_usage_perc 0.5\n"
        )

    def _stream(self, tokens: int, wire: Wire) -> None:
        wire.send(head(transfer_encoding="chunked"))
        wire.pause(self._begin_s * tokens)
        with self._lock:
            self.begun.append(tokens)
            number = len(self.begun)
        for left in range(tokens - 1, -1, -1):
            wire.pause(self._step_s)
            reason = None if left else "length"
            choices = [{"delta": {"content": self._word(number)}, "finish_reason": reason}]
            wire.send(chunk(event({"id": f"chatcmpl-r{number}", "choices": choices})))
        usage = {"completion_tokens": tokens, "prompt_tokens": 5}
        wire.send(chunk(event({"choices": [], "usage": usage})) + chunk(DONE) + END)


def maker(url: str, max_tokens: int = 16) -> RequestMaker:
    """Requests for so many tokens."""
    return RequestMaker(f"{url}/v1", "k", Shape("m", max_tokens, prompt_chars=10), 1)


def row(name: str, **known: object) -> Row:
    """A row of eight users in which all else is 0."""
    latencies = dict.fromkeys(("ttft", "inter_token", "end_to_end", "interactive"), Latency(1, 2))
    values: dict[str, object] = dict.fromkeys((field.name for field in fields(Row)), 0.0)
    values |= latencies | {"name": name, "load": "8", "error_kinds": {}, "cpu_s": {}}
    return Row(**(values | known))  # type: ignore[arg-type]
