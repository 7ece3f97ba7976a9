"""What is counted for every token: plain numbers, which become metrics when a page is made.

prometheus_client's counters and histograms take locks and walk their buckets at each call, which
was a twelfth of the CPU time that a worker spends on a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class TokenTelemetry(Collector):
    """Tokens and the times between them. One thread counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._prompt = self._output = self._recomputed = 0
        self._gaps = [0] * (len(_BOUNDS_S) + 1)
        self._gaps_s = 0.0
        registry.register(self)

    def prompt(self, tokens: int) -> None:
        self._prompt += tokens

    def output(self, tokens: int, since_last_s: float | None) -> None:
        """An engine output arrived. `since_last_s`: None for a request's first."""
        self._output += tokens
        if since_last_s is not None:
            self._gaps[bisect_left(_BOUNDS_S, since_last_s)] += 1
            self._gaps_s += since_last_s

    def recomputed(self, tokens: int) -> None:
        """Tokens that a request had before its engine died have to be computed again."""
        self._recomputed += tokens

    def collect(self) -> Iterator[Metric]:
        """The metrics, for prometheus_client."""
        tokens = CounterMetricFamily(
            "hermes_tokens",
            "Tokens that engines have read (`prompt`) and generated (`output`).",
            labels=["kind"],
        )
        tokens.add_metric(["prompt"], self._prompt)
        tokens.add_metric(["output"], self._output)
        yield tokens
        yield CounterMetricFamily(
            "hermes_recomputed_tokens",
            "Prompt and output tokens that were computed again after an engine or worker died.",
            value=self._recomputed,
        )
        upper = [*map(floatToGoString, _BOUNDS_S), "+Inf"]
        yield HistogramMetricFamily(
            "hermes_inter_token_time_seconds",
            "Time between two engine outputs of a request; one may hold several tokens.",
            buckets=list(zip(upper, accumulate(self._gaps), strict=True)),
            sum_value=self._gaps_s,
        )
