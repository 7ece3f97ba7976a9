"""The room in the engines' memory: what running requests have reserved of it, and what fits. Pure.

An engine keeps keys and values (KV) of every token of a running request. When its memory is full,
it preempts: it forgets one request and computes it again later. So each request reserves what it
will need, its prompt and the output that it probably writes (at most `max_tokens`, else the
predicted 90th percentile), and starts when that fits into this ingress's share.

Reserving that much leaves memory unused: few requests write as much, and none has written it from
the beginning. How much more may be given out is learnt from the engines' reports: a little more
while requests wait for room and the engines use less than they have, much less after a preemption.
What is counted less is the outputs, and only when hardly anything is left of those, the prompts:
those are needed at once and in full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from serve_app.contract import EngineReport

_USED = 0.91
"""Share of its memory that an engine should use. What is free beyond that is needed until the next
reading.
"""
_STEP = 0.005
"""By how much the factor changes with each reading (twice a second), towards that share."""
_FIRST_STEP = 0.01
"""The same, until that share is used for the first time."""
_LESS = 0.85
"""By what the factor is multiplied after a preemption."""
_CALM_READINGS = 8
"""For so many readings after that it neither grows nor shrinks: what was started before still
runs.
"""
_URGENT = 1 / 16
"""Of all memory: so much more than fits may be reserved for urgent requests."""
_LEAST, _MOST = 0.5, 8.0
_OUTPUTS = 4.0
"""Up to this factor, outputs are counted as so many times less; beyond it, the room as more."""
_ROUNDED_TOKENS = 16
"""The last block of a sequence is half empty."""


class Room:
    """What one ingress may reserve of the engines' memory, in tokens, and has reserved."""

    def __init__(self) -> None:
        self.capacity_tokens: float = math.inf
        """This ingress's share; no bound if an engine does not report its memory."""
        self.total_tokens: float = math.inf
        """What all engines have."""
        self.others_tokens = 0
        """What other ingresses have reserved."""
        self.used_tokens = 0
        """What running sequences occupy of it, by the engines' own count."""
        self.longest_tokens: float = math.inf
        """No request needs more: the engines' context."""
        self.reserved_tokens = 0
        self.factor = 1.0
        """How much more is given out than fits for certain."""
        self._preemptions: dict[str, int] = {}
        self._calm = 0
        self._step = _FIRST_STEP

    @property
    def bounded(self) -> bool:
        """Whether there is any bound."""
        return self.capacity_tokens < math.inf

    def need(self, prompt_tokens: float, output_tokens: float) -> int:
        """What a request reserves.

        Args:
            output_tokens: what it probably writes at most.
        """
        whole = prompt_tokens + output_tokens / min(max(1.0, self.factor), _OUTPUTS)
        return math.ceil(min(whole + _ROUNDED_TOKENS, self.longest_tokens))

    def fits(self, tokens: int, urgent: bool = False, overdue: bool = False) -> bool:
        """Whether so much is free.

        Args:
            urgent: whether the request may use what other ingresses leave free, and a little more:
                what is running in this ingress may take long to end, and the engine knows better
                which of all its requests ends first.
            overdue: whether it has waited for room for long. A request that exceeds the share needs
                room that others leave free, and they may never do.
        """
        limit = self._limit()
        if self.reserved_tokens + tokens <= limit:
            return True
        left = self.total_tokens - self.others_tokens - self.reserved_tokens
        if urgent and tokens <= left + _URGENT * self.total_tokens:
            return True
        if tokens <= limit:
            return False
        alone = not self.reserved_tokens and (overdue or not self.others_tokens)
        return alone or tokens <= left

    def take(self, tokens: int) -> None:
        """A request starts."""
        self.reserved_tokens += tokens

    def give_back(self, tokens: int) -> None:
        """A request has ended."""
        self.reserved_tokens -= tokens

    def reported(
        self, engines: Sequence[EngineReport], share_tokens: float, others_tokens: int, short: bool
    ) -> None:
        """Learn from what the engines say.

        Args:
            engines: all that this ingress sends work to; none if there is no bound.
            share_tokens: of their memory, for this ingress.
            others_tokens: what other ingresses have reserved.
            short: whether a request waits for room.
        """
        kv_tokens = sum(one.kv_tokens for one in engines)
        self.capacity_tokens = share_tokens if engines else math.inf
        self.total_tokens = kv_tokens if engines else math.inf
        self.longest_tokens = max((one.max_model_len for one in engines), default=math.inf)
        self.others_tokens = others_tokens
        self.used_tokens = sum(one.used_tokens for one in engines)
        before = self._preemptions
        self._preemptions = {one.name: one.preemptions for one in engines}
        # An engine that was started again counts from 0.
        if any(one.preemptions > before.get(one.name, one.preemptions) for one in engines):
            self._step = _STEP
            if self._calm <= 0:
                self.factor = max(_LEAST, self.factor * _LESS)
            self._calm = _CALM_READINGS
            return
        self._calm -= 1
        if self.used_tokens >= _USED * kv_tokens:
            self._step = _STEP
            self.factor = max(_LEAST, self.factor - self._step)
        elif short and self._calm <= 0:
            self.factor = min(_MOST, self.factor + self._step)

    def _limit(self) -> float:
        return self.capacity_tokens * min(1.0, self.factor) * max(1.0, self.factor / _OUTPUTS)
