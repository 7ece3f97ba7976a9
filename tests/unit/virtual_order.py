"""One ingress in virtual time: the real scheduler, the queue's streams as lists, and an engine that
serves every request at the same speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import pytest

from serve_app.contract import CompletionStats
from serve_app.policy.classes import CLASSES
from serve_app.policy.order import DEFAULT_RULES, Rules, Running, Scheduler

NEVER_MS = 10**15


def seeds(first: int, *others: int) -> list[Any]:
    """Parameters of equal runs with different chances: the gate has one of them."""
    return [first, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in others)]


@dataclass(frozen=True, eq=False)
class Entry:
    """A request, with the output that it will have."""

    request_class: str = "standard"
    accepted_ms: int = 0
    tenant: str = "t"
    prompt_tokens: int = 10
    output_tokens: int = 100
    max_output_tokens: int = 0
    deadline_ms: int = NEVER_MS
    kind: str = ""
    sequences: int = 1


class Served(NamedTuple):
    """When a request ran."""

    entry: Entry
    start_ms: float
    end_ms: float

    @property
    def wait_ms(self) -> float:
        """From its arrival to its start."""
        return self.start_ms - self.entry.accepted_ms


def cost(entry: Entry) -> float:
    """What a request costs in the end."""
    return DEFAULT_RULES.tenants.cost(entry.prompt_tokens, entry.output_tokens)


class VirtualService:
    """An ingress and its engine; each running request is served `speed` cost per second."""

    def __init__(
        self,
        arrivals: Iterable[Entry],
        capacity: int = 8,
        rules: Rules = DEFAULT_RULES,
        speed: float = 1_000.0,
    ) -> None:
        self.scheduler: Scheduler[Entry] = Scheduler(rules)
        self.scheduler.capacity = capacity
        self.served: list[Served] = []
        self.expired = self.idle_while_waiting = 0
        self._speed = speed
        self._arrivals = deque(sorted(arrivals, key=lambda entry: entry.accepted_ms))
        self._queue = {name: deque[Entry]() for name in CLASSES}
        self._running: list[tuple[float, int, Running[Entry]]] = []
        self._now_ms = 0.0

    def run(self, until_ms: float = float("inf")) -> list[Served]:
        """Everything that has started by then, in order."""
        while self._arrivals or self._running:
            arrival_ms = self._arrivals[0].accepted_ms if self._arrivals else float("inf")
            end_ms = self._running[0][0] if self._running else float("inf")
            self._now_ms = min(arrival_ms, end_ms)
            if self._now_ms > until_ms:
                break
            while self._arrivals and self._arrivals[0].accepted_ms <= self._now_ms:
                arrived = self._arrivals.popleft()
                self._queue[arrived.request_class].append(arrived)
            while self._running and self._running[0][0] <= self._now_ms:
                _, _, running = heappop(self._running)
                written = CompletionStats(running.entry.output_tokens)
                self.scheduler.ended(running, written, int(self._now_ms))
            self._dispatch()
        return self.served

    def _dispatch(self) -> None:
        """What the dispatcher does until it waits for an arrival or an end."""
        while (wanted := self.scheduler.wanted()) is not None:
            lines = [self._queue[name] for name in wanted.classes]
            claimed = [
                line.popleft() for line in lines for _ in range(min(wanted.of_each, len(line)))
            ]
            for one in claimed:
                self.scheduler.add(one)
            while self.scheduler.drop(lambda one: one.deadline_ms <= self._now_ms):
                self.expired += 1
            while (running := self.scheduler.next(int(self._now_ms))) is not None:
                self._start(running)
            if wanted.wait and not claimed:
                break
        waits = len(self.scheduler) + sum(map(len, self._queue.values()))
        self.idle_while_waiting += bool(waits) and not self.scheduler.full

    def _start(self, running: Running[Entry]) -> None:
        entry = running.entry
        end_ms = self._now_ms + 1000 * cost(entry) / self._speed
        heappush(self._running, (end_ms, len(self.served), running))
        self.served.append(Served(entry, self._now_ms, end_ms))
