"""How much a request will write, learnt from those that have ended. Pure.

Requests are grouped by what shows before they are computed, from coarse to fine: all; the same kind
(endpoint, streamed or not, turns so far); the same tenant and kind; and of these, the same class
and about the same prompt and limit. Each group keeps a mean of the latest few hundred lengths and
of their logarithms. A group that has seen little leans on the coarser one (shrinkage).

The estimate of the 90th percentile is corrected by how often it was too low, so that it covers nine
of ten requests whatever the lengths look like. While the predictions are no better than one and
the same number for all, `useful` is False, and nobody should order by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from serve_app.policy.waiting import Claimed

_LEAN = 10.0
"""How many requests a group must have seen to count as much as the coarser one."""
_MEMORY = 300
"""A group remembers about as many of its latest requests."""
_GROUPS = 10_000
_JUDGED_AFTER = 100
_BETTER = 0.9
"""Predictions are useful if their error is below this part of a constant's error."""
_FIRST = (math.log(256), 1.0, 256.0)
_NORMAL_P90 = 1.28


class Prediction(NamedTuple):
    """What a request will probably write, in tokens."""

    p50: float
    p90: float
    mean: float


class _Group:
    """The lengths of similar requests."""

    __slots__ = ("log", "log_square", "mean", "seen")

    def __init__(self) -> None:
        self.seen = 0
        self.log = self.log_square = self.mean = 0.0

    def learn(self, tokens: int) -> None:
        self.seen = min(self.seen + 1, _MEMORY)
        part, log = 1 / self.seen, math.log(tokens + 1)
        self.log += part * (log - self.log)
        self.log_square += part * (log * log - self.log_square)
        self.mean += part * (tokens - self.mean)


class Lengths:
    """Predicts lengths, learns from the real ones, and judges itself."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._p90_above = _NORMAL_P90
        self._judged = 0
        self._error = self._constant_error = 0.0

    @property
    def useful(self) -> bool:
        """Whether the predictions are better than a constant."""
        return self._judged >= _JUDGED_AFTER and self.error_ratio < _BETTER

    @property
    def error_ratio(self) -> float:
        """Their error over that of a constant; 1 if there is nothing to compare."""
        return self._error / self._constant_error if self._constant_error else 1.0

    def predict(self, request: Claimed) -> Prediction:
        """What is known of requests like this one."""
        log, variance, mean = self._shrunk(_groups_of(request))
        above = math.sqrt(variance) * self._p90_above
        most = float(request.max_output_tokens or math.inf)
        tokens = (math.exp(log) - 1, math.exp(min(log + above, 30.0)) - 1, mean)
        return Prediction(*(min(max(0.0, count), most) for count in tokens))

    def learn(self, request: Claimed, predicted: Prediction, tokens: int) -> None:
        """A request has ended.

        Args:
            predicted: what was predicted when it started.
            tokens: what it has written.
        """
        # Against what would be predicted now: a correction that comes a request's time too late
        # swings ever further when many requests run.
        self._correct(self.predict(request).p90, tokens)
        self._judge(predicted, tokens)
        for key in _groups_of(request):
            group = self._groups.pop(key, None) or _Group()
            self._groups[key] = group  # at the end, as the latest used
            group.learn(tokens)
        while len(self._groups) > _GROUPS:
            del self._groups[next(iter(self._groups))]

    def _correct(self, p90: float, tokens: int) -> None:
        too_low = tokens > p90 + 0.5
        self._p90_above = min(max(self._p90_above + 0.05 * (too_low - 0.1), 0.0), 5.0)

    def _judge(self, predicted: Prediction, tokens: int) -> None:
        log = math.log(tokens + 1)
        constant, _, _ = self._shrunk([()])
        self._judged += 1
        part = max(0.01, 1 / self._judged)
        self._error += part * (abs(log - math.log(predicted.p50 + 1)) - self._error)
        self._constant_error += part * (abs(log - constant) - self._constant_error)

    def _shrunk(self, keys: Sequence[tuple[object, ...]]) -> tuple[float, float, float]:
        """Mean and variance of the logarithm, and the mean itself."""
        log, variance, mean = _FIRST
        for key in keys:
            group = self._groups.get(key)
            if group is None:
                break
            own = group.seen / (group.seen + _LEAN)
            spread = max(0.0, group.log_square - group.log * group.log)
            variance += own * (spread - variance)
            log += own * (group.log - log)
            mean += own * (group.mean - mean)
        return log, variance, mean


def _groups_of(request: Claimed) -> list[tuple[object, ...]]:
    """From coarse to fine; sizes by powers of two."""
    kind, tenant = request.kind, request.tenant
    prompt, limit = request.prompt_tokens.bit_length(), request.max_output_tokens.bit_length()
    return [(), (kind,), (tenant, kind), (tenant, kind, request.request_class, prompt, limit)]
