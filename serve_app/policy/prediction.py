"""How much each sequence of a request will write and how long that will take, learnt from those
that have ended. Pure.

Requests are grouped by what shows before they are computed, from coarse to fine: all; the same kind
(endpoint, streamed or not, turns so far); the same tenant and kind; and of these, the same class
and about the same prompt and limit. Each group keeps a mean of the latest few hundred lengths and
of their logarithms. A group that has seen little leans on the coarser one (shrinkage).

While the predictions are no better than one and the same number for all, `useful` is False, and
nobody should order by them.

A request takes so much time for each token that it reads and so much for each that it writes: the
least squares of the latest few hundred. How busy the engines are is part of it, so it changes with
the load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_LEAN = 10.0
"""How many requests a group must have seen to count as much as the coarser one."""
_MEMORY = 300
"""A group remembers about as many of its latest requests."""
_GROUPS = 10_000
_JUDGED_AFTER = 100
_BETTER = 0.9
"""Predictions are useful if their error is below this part of a constant's error."""
_FIRST = (math.log(256), 256.0)
_NOISE, _LONGER = 1.1, 2.0
"""By so much the mean of a tenant and kind, and that of its requests with the same prompt and
limit, differ from the mean of all by chance.
"""


class Estimated(Protocol):
    """What the policies consider of a request. Times are Unix milliseconds by Redis's clock; tokens
    are estimates; `max_output_tokens` is for each sequence, and 0 without a limit; `kind`: see
    `Work`.
    """

    @property
    def request_class(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def accepted_ms(self) -> int: ...
    @property
    def deadline_ms(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def max_output_tokens(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    @property
    def kind(self) -> str: ...


class Prediction(NamedTuple):
    """What each sequence of a request will probably write, in tokens; `p50` by the mean of the
    logarithms.
    """

    p50: float
    mean: float


@dataclass(eq=False, slots=True)
class _Group:
    """The lengths of similar requests."""

    seen: int = 0
    log: float = 0.0
    mean: float = 0.0

    def learn(self, tokens: float) -> None:
        self.seen = min(self.seen + 1, _MEMORY)
        part, log = 1 / self.seen, math.log(tokens + 1)
        self.log += part * (log - self.log)
        self.mean += part * (tokens - self.mean)


class LengthModel:
    """Predicts lengths, learns from the real ones, and judges itself."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._judged = 0
        self._error = self._constant_error = 0.0

    @property
    def useful(self) -> bool:
        return self._judged >= _JUDGED_AFTER and self.error_ratio < _BETTER

    @property
    def error_ratio(self) -> float:
        """Their error over that of a constant; 1 if there is nothing to compare."""
        return self._error / self._constant_error if self._constant_error else 1.0

    def predict(self, request: Estimated) -> Prediction:
        log, mean = self._shrunk(_groups_of(request))
        most = float(request.max_output_tokens or math.inf)
        return Prediction(min(max(0.0, math.exp(log) - 1), most), min(max(0.0, mean), most))

    def short(self, request: Estimated) -> bool | None:
        """Whether a request will probably write no more than the mean of all; None if nothing of
        its tenant and kind has ended yet.
        """
        _, mean = self._shrunk(())
        if 0 < request.max_output_tokens <= mean:
            return True
        if (request.tenant, request.kind) not in self._groups:
            return None
        *coarse, _ = _groups_of(request)
        _, of_kind = self._shrunk(coarse)
        return of_kind <= _NOISE * mean and self.predict(request).mean <= _LONGER * mean

    def learn(self, request: Estimated, predicted: Prediction, tokens: float) -> None:
        """A request has ended, for which this was predicted when it started; `tokens`: what each of
        its sequences has written, on average.
        """
        self._judge(predicted, tokens)
        for key in ((), *_groups_of(request)):
            group = self._groups.pop(key, None) or _Group()
            self._groups[key] = group  # at the end, as the latest used
            group.learn(tokens)
        while len(self._groups) > _GROUPS:
            del self._groups[next(iter(self._groups))]

    def _judge(self, predicted: Prediction, tokens: float) -> None:
        log = math.log(tokens + 1)
        constant, _ = self._shrunk(())
        self._judged += 1
        part = max(0.01, 1 / self._judged)
        self._error += part * (abs(log - math.log(predicted.p50 + 1)) - self._error)
        self._constant_error += part * (abs(log - constant) - self._constant_error)

    def _shrunk(self, keys: Sequence[tuple[object, ...]]) -> tuple[float, float]:
        """Means of the logarithm and of the length itself, from those of all requests on."""
        whole = self._groups.get(())
        log, mean = (whole.log, whole.mean) if whole else _FIRST
        for key in keys:
            group = self._groups.get(key)
            if group is None:
                break
            own = group.seen / (group.seen + _LEAN)
            log += own * (group.log - log)
            mean += own * (group.mean - mean)
        return log, mean


def _groups_of(request: Estimated) -> list[tuple[object, ...]]:
    """From coarse to fine; sizes by powers of two."""
    kind, tenant = request.kind, request.tenant
    prompt, limit = request.prompt_tokens.bit_length(), request.max_output_tokens.bit_length()
    return [(kind,), (tenant, kind), (tenant, kind, request.request_class, prompt, limit)]


class ServiceTimeModel:
    """Milliseconds per token. Until a request has ended, nothing takes any time."""

    def __init__(self) -> None:
        self.mean_ms = 0.0
        """Of all requests: in this time, about as many start as run at a time."""
        self._seen = 0
        self._prompt_ms = self._output_ms = 0.0
        self._products = [0.0] * 5

    def predict_ms(self, prompt_tokens: float, output_tokens: float) -> float:
        return self._prompt_ms * prompt_tokens + self._output_ms * output_tokens

    def learn(self, prompt_tokens: float, output_tokens: float, took_ms: float) -> None:
        self._seen = min(self._seen + 1, _MEMORY)
        p, o, t = prompt_tokens, output_tokens, max(0.0, took_ms)
        part, new = 1 / self._seen, (p * p, p * o, o * o, p * t, o * t)
        self.mean_ms += part * (t - self.mean_ms)
        self._products = [
            mean + part * (value - mean) for mean, value in zip(self._products, new, strict=True)
        ]
        self._prompt_ms, self._output_ms = _slopes(*self._products)


def _slopes(pp: float, po: float, oo: float, pt: float, ot: float) -> tuple[float, float]:
    """Time per token read and written, neither below 0, by the means of the products of tokens read
    (p), tokens written (o) and time (t).
    """
    determinant = pp * oo - po * po
    if determinant > 1e-6 * pp * oo:
        prompt, output = (pt * oo - ot * po) / determinant, (ot * pp - pt * po) / determinant
        if prompt >= 0 and output >= 0:
            return prompt, output
        if output < 0:
            return pt / pp, 0.0
    return (0.0, ot / oo) if oo else (pt / pp if pp else 0.0, 0.0)
