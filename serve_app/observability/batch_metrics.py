"""Metrics of batches, which the ingress that works on them shows."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge

from serve_app.observability.metrics import Metrics

_OUTCOMES = ("completed", "failed", "expired", "cancelled")


class BatchTelemetry(Metrics):
    """The metrics of one ingress's batches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("batches", registry)
        self._shown: dict[Gauge, frozenset[str]] = {}
        """The labels of each gauge."""
        for outcome in _OUTCOMES:  # Prometheus sees no increase to the first value of a series
            self.of("hermes_batch_lines_done", outcome)

    def done(self, outcome: str, lines: int) -> None:
        """So many lines have ended like that."""
        self.count("hermes_batch_lines_done", outcome, by=lines)

    def show(
        self, batches: Mapping[str, int], lines: Mapping[str, int], spare_s: Mapping[str, float]
    ) -> None:
        """What there is now: batches and lines by state, and the seconds that batches can spare,
        by their ids.
        """
        self._only(self.of("hermes_batches"), batches)
        self._only(self.of("hermes_batch_lines"), lines)
        self._only(self.of("hermes_batch_spare_seconds"), spare_s)

    def _only(self, gauge: Gauge, values: Mapping[str, float]) -> None:
        for label, value in values.items():
            gauge.labels(label).set(value)
        for label in self._shown.get(gauge, frozenset()) - values.keys():
            gauge.remove(label)
        self._shown[gauge] = frozenset(values)

    def clear(self) -> None:
        """Another ingress works on the batches."""
        self.show({}, {}, {})
