"""Metrics of the order of work: what each tenant was served, and how good predictions are."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve_app.policy.classes import CLASSES
from serve_app.policy.prediction import Prediction
from serve_app.policy.running import Settled

_TENANTS = 50
OTHER_TENANTS = "@other"
"""All tenants beyond the first ones of a process; the names of tenants contain no `@`."""
_TIMES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20)


class OrderTelemetry:
    """The metrics of one ingress's scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._served = Counter(
            "hermes_tenant_served_cost",
            "Cost of the requests that ended, by tenant.",
            ["class", "tenant"],
            registry=registry,
        )
        self._lengths = Counter(
            "hermes_predicted_lengths",
            "Requests whose output was at most the predicted p50, at most the p90, or above.",
            ["within"],
            registry=registry,
        )
        self._ratio = Histogram(
            "hermes_prediction_ratio",
            "Real output tokens over predicted ones (the mean).",
            registry=registry,
            buckets=_TIMES,
        )
        self._useful = Gauge(
            "hermes_predictions_useful",
            "1 if short requests go first, because predictions are better than a constant.",
            registry=registry,
        )
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
        self.waiting({}, 0)
        self._tenants: set[str] = set()
        self._promoted = 0
        for within in ("p50", "p90", "above"):
            self._lengths.labels(within)

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

    def yielded(self, request_class: str, to: str) -> None:
        """A running request gave its place to one of another class, or of its own."""
        self._yields.labels(request_class, to).inc()

    def ended(self, settled: Settled, lengths_useful: bool, promotions: int) -> None:
        """A request has ended, and it is known what it has written.

        Args:
            promotions: how many there were since the process was started.
        """
        entry = settled.entry
        self._served.labels(entry.request_class, self._named(entry.tenant)).inc(settled.cost)
        if settled.written.whole:
            self._compare(settled.predicted, settled.written.tokens)
        self._useful.set(lengths_useful)
        self._promotions.inc(promotions - self._promoted)
        self._promoted = promotions

    def _compare(self, predicted: Prediction, tokens: int) -> None:
        within = "above" if tokens > predicted.p90 + 0.5 else "p90"
        self._lengths.labels("p50" if tokens <= predicted.p50 + 0.5 else within).inc()
        self._ratio.observe(tokens / max(1.0, predicted.mean))

    def _named(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) >= _TENANTS:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant
