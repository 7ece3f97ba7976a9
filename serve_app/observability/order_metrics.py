"""Metrics of the order of work: slots, claims, what waits, and ageing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve_app.observability.prediction_metrics import PredictionTelemetry
from serve_app.observability.tenant_metrics import TenantTelemetry
from serve_app.policy.classes import CLASSES
from serve_app.policy.order import Scheduler
from serve_app.policy.room import Room
from serve_app.policy.running import Running, Settled

_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_ROOM = {
    "engines_tokens": "Tokens that fit into the KV caches of all engines; 0 if one does not say.",
    "engines_used_tokens": "What running sequences occupy of them.",
    "share_tokens": "What this ingress may reserve of them.",
    "reserved_tokens": "What its running requests have reserved.",
    "overcommit": "How much more than fits for certain is given out; it follows preemptions.",
}


class OrderTelemetry:
    """The metrics of one ingress's scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tenants = TenantTelemetry(registry)
        self._slots_allowed = Gauge(
            "hermes_slots_allowed",
            "Requests that this ingress may run at the same time: its share of the engines'.",
            registry=registry,
        )
        self._slots_reserved = Gauge(
            "hermes_slots_reserved",
            "Requests that this ingress has started and that have not ended.",
            registry=registry,
        )
        self._claims = Histogram(
            "hermes_claim_requests",
            "Requests that one claim has brought.",
            registry=registry,
            buckets=_REQUESTS,
        )
        self._predictions = PredictionTelemetry(registry)
        self._promotions = Counter(
            "hermes_ageing_promotions",
            "Requests that went before a more urgent class because of their age.",
            registry=registry,
        )
        self._yields = Counter(
            "hermes_yields",
            "Requests that gave their place to another one and continued later.",
            ["class", "to"],
            registry=registry,
        )
        for place, name in enumerate(CLASSES):
            for to in CLASSES[: place + 1]:
                self._yields.labels(name, to)
        self._claimed_waiting = Gauge(
            "hermes_claimed_waiting",
            "Requests that this ingress has claimed and not started.",
            ["class"],
            registry=registry,
        )
        self._claimed_oldest = Gauge(
            "hermes_claimed_oldest_age_seconds",
            "Age of the oldest of them.",
            ["class"],
            registry=registry,
        )
        self._room = {
            name: Gauge(f"hermes_kv_{name}", about, registry=registry)
            for name, about in _ROOM.items()
        }
        self._overtakings = Counter(
            "hermes_overtakings",
            "Requests that started before one whose turn it was and for which there was no room.",
            registry=registry,
        )
        self._overtaken = 0
        self.waiting({}, 0)
        self._promoted = 0

    def waiting(self, lines: Mapping[str, tuple[int, int]], now_ms: int) -> None:
        """What waits in this ingress; the queue's own gauges do not count it.

        Args:
            lines: how many of each class, and when the oldest was enqueued, in Unix milliseconds;
                only classes of which some wait.
        """
        for name in CLASSES:
            count, oldest_ms = lines.get(name, (0, now_ms))
            self._claimed_waiting.labels(name).set(count)
            self._claimed_oldest.labels(name).set(max(0.0, (now_ms - oldest_ms) / 1000))

    def claimed(self, requests: int) -> None:
        """A claim has brought this many requests."""
        if requests:
            self._claims.observe(requests)

    def started(self, running: Running[Any]) -> None:
        """A request starts."""
        if running.started_ms is not None:
            waited_s = (running.started_ms - running.entry.enqueued_ms) / 1000
            self.tenants.started(running.entry.tenant, waited_s)

    def order(self, scheduler: Scheduler[Any]) -> None:
        """Where the order of work stands now."""
        self._slots_allowed.set(scheduler.capacity)
        self._slots_reserved.set(len(scheduler.running))
        self._predictions.error(scheduler.estimates.lengths.error_ratio)
        lines = scheduler.lines.items()
        self.tenants.counters({name: line.counters.waiting() for name, line in lines})
        self._tell_room(scheduler.room, scheduler.overtaking.passes)

    def _tell_room(self, room: Room, passes: int) -> None:
        """What this ingress may use of the engines' memory, and uses; `passes` since its start."""
        bounded = room.bounded
        self._room["share_tokens"].set(room.capacity_tokens if bounded else 0)
        self._room["reserved_tokens"].set(room.reserved_tokens)
        self._room["engines_tokens"].set(room.total_tokens if bounded else 0)
        self._room["engines_used_tokens"].set(room.used_tokens)
        self._room["overcommit"].set(room.factor)
        self._overtakings.inc(passes - self._overtaken)
        self._overtaken = passes

    def yielded(self, request_class: str, to: str) -> None:
        """A running request gave its place to one of another class, or of its own."""
        self._yields.labels(request_class, to).inc()

    def ended(self, settled: Settled, lengths_useful: bool, promotions: int) -> None:
        """A request has ended, and it is known what it has written.

        Args:
            promotions: how many there were since the process was started.
        """
        entry = settled.entry
        self.tenants.ended(entry.request_class, entry.tenant, settled.cost)
        if settled.written.whole:
            self._predictions.compare(settled.predicted, settled.written.tokens)
        self._predictions.useful(lengths_useful)
        self._promotions.inc(promotions - self._promoted)
        self._promoted = promotions
