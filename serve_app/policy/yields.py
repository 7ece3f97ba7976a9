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
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from serve_app.policy.classes import CLASSES
from serve_app.policy.pace import Pace
from serve_app.policy.running import Running
from serve_app.policy.waiting import Claimed, Waiting
from serve_app.policy.work import writes_tokens

C = TypeVar("C", bound=Claimed)

BATCH = "batch"
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
        self._yielding: dict[Running[C], None] = {}
        self._look_ms: dict[tuple[str, str], float] = {}

    def to(self, whom: tuple[str, str], now_ms: int) -> int:
        """How many requests are about to yield to this class and tenant."""
        for running in [one for one in self._yielding if one.again_ms <= now_ms]:
            self.stays(running, now_ms, always=False)
        return sum(running.yields_to == whom for running in self._yielding)

    def started(self, running: Running[C]) -> None:
        """A request runs, again or for the first time."""
        for whom, look_ms in list(self._look_ms.items()):
            self._look_ms[whom] = min(look_ms, self._due_ms(running, whom[0], 0.0))

    def over(self, running: Running[C]) -> tuple[str, str] | None:
        """A request has yielded or ended, or goes on. Returns to whom it was to yield."""
        self._yielding.pop(running, None)
        whom, running.yields_to, running.again_ms = running.yields_to, None, 0.0
        return whom

    def stays(self, running: Running[C], now_ms: int, *, always: bool) -> None:
        """A request that was named has not yielded. `always`: it can never be continued."""
        self.over(running)
        running.again_ms = math.inf if always else now_ms + self._times.again_ms

    def choose(
        self, among: Iterable[Running[C]], waiting: Waiting[C], tokens: float, now_ms: int
    ) -> Running[C] | None:
        """The request that yields now to a waiting one; None if none may.

        Args:
            among: those whose tenants were not served less than that of the waiting one.
            tokens: how many the waiting one will probably write.
        """
        name = waiting.entry.request_class
        whom = name, waiting.entry.tenant
        if now_ms < self._look_ms.get(whom, 0.0):
            return None
        chosen: Running[C] | None = None
        most, look_ms = (-1, 0.0), math.inf
        for running in among:
            due_ms = self._due_ms(running, name, tokens)
            if due_ms > now_ms:
                look_ms = min(look_ms, due_ms)
            elif (left := self._left(running, now_ms)) <= self._least(running, tokens) or (
                not self._in_time(running, left, now_ms)
            ):
                look_ms = min(look_ms, now_ms + self._times.look_ms)
            elif (of := (CLASSES.index(running.entry.request_class), left)) > most:
                chosen, most = running, of
        if chosen is None:
            if len(self._look_ms) >= _TENANTS:
                self._look_ms.clear()
            self._look_ms[whom] = min(look_ms, now_ms + self._times.look_ms)
            return None
        chosen.yields_to = whom
        chosen.again_ms = now_ms + self._times.within_ms
        self._yielding[chosen] = None
        return chosen

    def _due_ms(self, running: Running[C], request_class: str, tokens: float) -> float:
        """From when on a request may be interrupted by one of this class that will write so many
        tokens.
        """
        entry, at_ms = running.entry, running.started_ms
        if at_ms is None or running.yields_to or not writes_tokens(entry.kind):
            return math.inf
        if CLASSES.index(request_class) > CLASSES.index(entry.request_class):
            return math.inf
        urgent = entry.request_class == BATCH != request_class
        least = self._slice * _OF_A_SLICE
        if not urgent:
            least = max(least, min(self._slice, _TIMES * tokens))
        least = max(least, running.tokens * _OF_WRITTEN)
        reading_ms = 0.0 if running.tokens else self._pace.predict_ms(entry.prompt_tokens, 0)
        return max(running.again_ms, at_ms + reading_ms + least * self._token_ms)

    @property
    def _token_ms(self) -> float:
        return self._pace.predict_ms(0, 1) or self._times.first_token_ms

    def _left(self, running: Running[C], now_ms: int) -> float:
        """How many tokens a request will probably write from now on."""
        assert running.started_ms is not None
        written = running.tokens + (now_ms - running.started_ms) / self._token_ms
        return running.expected(written) - written

    def _least(self, running: Running[C], tokens: float) -> float:
        """What must be left of a request, so that a waiting one with so many tokens gains."""
        return 0.0 if running.entry.request_class == BATCH else _TIMES * tokens

    def _in_time(self, running: Running[C], left: float, now_ms: int) -> bool:
        """Whether a request still meets its deadline if it waits for as long as others run."""
        pause_ms = max(self._pace.mean_ms, self._slice * self._token_ms)
        return running.entry.deadline_ms > now_ms + left * self._token_ms + pause_ms
