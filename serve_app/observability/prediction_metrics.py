"""Metrics of predicted lengths: how far they are from the real ones, and whether they are used."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram

from serve_app.policy.waiting import Prediction

_TIMES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20)


class PredictionTelemetry:
    """The predictions of one ingress."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ratio = Histogram(
            "hermes_prediction_ratio",
            "Real output tokens over predicted ones (the mean).",
            registry=registry,
            buckets=_TIMES,
        )
        self._error = Gauge(
            "hermes_prediction_error_ratio",
            "Error of the predictions over that of one and the same number for all requests.",
            registry=registry,
        )
        self._useful = Gauge(
            "hermes_predictions_useful",
            "1 if short requests go first, because predictions are better than a constant.",
            registry=registry,
        )

    def compare(self, predicted: Prediction, tokens: int) -> None:
        """An answer has ended by itself after this many tokens."""
        self._ratio.observe(tokens / max(1.0, predicted.mean))

    def error(self, over_a_constants: float) -> None:
        """The error of the latest predictions over that of a constant."""
        self._error.set(over_a_constants)

    def useful(self, useful: bool) -> None:
        self._useful.set(useful)
