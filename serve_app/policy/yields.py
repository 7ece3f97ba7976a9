"""Which running request gives its place to a waiting one. Pure.

`realtime`, `standard` and `critical` requests may interrupt `batch` that has run for a part of a
slice, because somebody waits for them. Beyond that, a request may interrupt one of its own or a
less urgent class that has run for a whole slice, and will probably need longer than itself. So
whoever runs is sure of its slice, also after each interruption. Slices grow with what is written:
whoever continues an answer has to read all of it again, which costs about the sixteenth of what
generating it has cost.

A request that would miss its deadline is not interrupted, nor one that was taken over while it
ran, because nobody knows for how long it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from serve_app.policy.classes import URGENCY
from serve_app.policy.pace import Pace
from serve_app.policy.running import Running
from serve_app.policy.waiting import Claimed, Waiting
from serve_app.policy.work import writes_tokens

C = TypeVar("C", bound=Claimed)

_BATCH = URGENCY["batch"]
_OF_A_SLICE = 1 / 16
"""The part of a slice after which `batch` may be interrupted by what is more urgent."""
_TIMES = 2
"""So many times what the waiting one needs, the running one has written in its slice and still has
to write.
"""
_TENANTS = 50
_OF_WRITTEN = 1 / 64
"""A slice has at least this part of what was written before it."""


class Times(NamedTuple):
    """What nobody should have to choose."""

    within_ms: int = 5_000
    """A request that still runs so long after it was told to yield does not: its worker is lost, or
    its engine produces nothing.
    """
    again_ms: int = 1_000
    """A request that could not be interrupted may be told again after this time."""
    look_ms: int = 100
    """While none of those that run may be interrupted, they are looked at again after this time."""
    first_token_ms: float = 5.0
    """Time per token, until the first request has ended or yielded; the less, the sooner."""


class Yields(Generic[C]):
    """Names requests that shall yield, and remembers which do.

    Args:
        slice_tokens: 0: nobody yields.
    """

    def __init__(self, slice_tokens: int, pace: Pace) -> None:
        self._slice = slice_tokens
        self._pace = pace
        self._times = Times()
        self._yielding: dict[Running[C], float] = {}
        self._look_ms: dict[tuple[str, str], float] = {}

    def to(self, whom: tuple[str, str], now_ms: int) -> int:
        """How many requests are about to yield to this class and tenant."""
        for running in [one for one, end_ms in self._yielding.items() if end_ms <= now_ms]:
            self.stays(running, now_ms, always=False)
        return sum(running.yields_to == whom for running in self._yielding)

    def over(self, running: Running[C]) -> tuple[str, str] | None:
        """A request has yielded or ended, or goes on. Returns to whom it was to yield."""
        self._yielding.pop(running, None)
        whom, running.yields_to = running.yields_to, None
        return whom

    def stays(self, running: Running[C], now_ms: int, *, always: bool) -> None:
        """A request that was named has not yielded. `always`: it can never be continued."""
        self.over(running)
        running.never = running.never or always
        running.due_ms = math.inf if running.never else now_ms + self._times.again_ms

    def choose(
        self,
        among: Iterable[Running[C]],
        waiting: Waiting[C],
        tokens: float,
        now_ms: int,
        fair: Callable[[Running[C]], bool],
    ) -> Running[C] | None:
        """The request that yields now to a waiting one; None if none may.

        Args:
            tokens: how many the waiting one will probably write.
            fair: whether the tenant of a running one may lose its place to that of the waiting one.
        """
        name = waiting.entry.request_class
        whom = name, waiting.entry.tenant
        if now_ms < self._look_ms.get(whom, 0.0):
            return None
        chosen: Running[C] | None = None
        urgency, most, token_ms = URGENCY[name], (-1, 0.0), self._token_ms
        look_ms: float = now_ms + self._times.look_ms
        for running in among:
            if running.urgency < urgency:
                continue
            if running.due_ms > now_ms:
                look_ms = min(look_ms, running.due_ms)
                continue
            left = self._left(running, now_ms, token_ms)
            if (
                (of := (running.urgency, left)) > most
                and self._due_ms(running, urgency, tokens, token_ms) <= now_ms
                and left > self._least(running, tokens)
                and self._in_time(running, left, now_ms)
                and fair(running)
            ):
                chosen, most = running, of
        if chosen is None:
            if len(self._look_ms) >= _TENANTS:
                self._look_ms.clear()
            self._look_ms[whom] = look_ms
            return None
        chosen.yields_to, chosen.due_ms = whom, math.inf
        self._yielding[chosen] = now_ms + self._times.within_ms
        return chosen

    def started(self, running: Running[C]) -> None:
        """A request runs, again or for the first time."""
        entry, running.due_ms = running.entry, math.inf
        if running.started_ms is not None and not running.never and writes_tokens(entry.kind):
            running.urgency = URGENCY[entry.request_class]
            tokens = max(self._slice * _OF_A_SLICE, running.tokens * _OF_WRITTEN)
            reading_ms = 0.0 if running.tokens else self._pace.predict_ms(entry.prompt_tokens, 0)
            running.due_ms = running.started_ms + reading_ms + tokens * self._token_ms

    def _due_ms(self, running: Running[C], urgency: int, tokens: float, token_ms: float) -> float:
        """From when on a request may be interrupted by one so urgent that will write so many
        tokens.
        """
        if running.urgency == _BATCH and urgency < _BATCH:
            return running.due_ms
        assert running.started_ms is not None
        least = min(self._slice, _TIMES * tokens)
        return max(running.due_ms, running.started_ms + least * token_ms)

    @property
    def _token_ms(self) -> float:
        return self._pace.predict_ms(0, 1) or self._times.first_token_ms

    def _left(self, running: Running[C], now_ms: int, token_ms: float) -> float:
        """How many tokens a request will probably write from now on."""
        assert running.started_ms is not None
        written = running.tokens + (now_ms - running.started_ms) / token_ms
        return running.expected(written) - written

    def _least(self, running: Running[C], tokens: float) -> float:
        """What must be left of a request, so that a waiting one with so many tokens gains."""
        return 0.0 if running.urgency == _BATCH else _TIMES * tokens

    def _in_time(self, running: Running[C], left: float, now_ms: int) -> bool:
        """Whether a request still meets its deadline if it waits for as long as others run."""
        pause_ms = max(self._pace.mean_ms, self._slice * self._token_ms)
        return running.entry.deadline_ms > now_ms + left * self._token_ms + pause_ms
