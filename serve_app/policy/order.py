"""The order of work: which claimed request starts now, and what to claim next. Pure.

Three questions, each answered by one policy: which class goes next
(`serve_app/policy/classes.py`), which of its tenants (`tenants.py`), and which of that tenant's
requests: one that must start now to meet its deadline (`pace.py`), else the one with the least
predicted work (`prediction.py`), and older ones before younger ones. A request ranks by the time of
its arrival plus `short_first_ms_per_token` for each token of its predicted cost, of which its
prompt counts a quarter. So only requests that arrive within that time can pass it, and that time is
at most a quarter of the time that it has until its deadline. Where predictions are of no use, the
oldest goes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

from serve_app.contract import EngineReport, Written
from serve_app.policy.claims import Claim, what_to_claim
from serve_app.policy.classes import CLASSES, URGENCY, ClassOrder
from serve_app.policy.estimates import Estimates
from serve_app.policy.heap import Heap
from serve_app.policy.overtaking import Overtaking
from serve_app.policy.room import Room
from serve_app.policy.rules import DEFAULT_RULES, Rules
from serve_app.policy.running import Running, Settled
from serve_app.policy.tenants import TenantLines
from serve_app.policy.waiting import Claimed, Waiting
from serve_app.policy.yields import Yields

C = TypeVar("C", bound=Claimed)

_TENANTS = 4
"""How many tenants' next requests are considered before nobody yields."""


class Scheduler(Generic[C]):
    """Decides the order in which one ingress starts the requests that it has claimed.

    At most `capacity` requests run at the same time. Up to `claim_ahead` times as many of each
    class are claimed in addition (`ahead`), so that there is a choice. All others wait in Redis,
    where every ingress can reach them.
    """

    def __init__(self, rules: Rules = DEFAULT_RULES) -> None:
        self.capacity = 0
        """Requests that may run at the same time; 0 if there is no engine."""
        self.claiming = True
        """Whether anything may be claimed. A newer Ray cluster takes new requests otherwise."""
        self.ahead = True
        """Whether to claim requests that cannot start yet. Nobody else can start them, so it is
        for the time in which other ingresses have hardly any capacity left.
        """
        self.classes = ClassOrder(rules.classes)
        self.lines: dict[str, TenantLines[C]] = {
            name: TenantLines(rules.tenants) for name in CLASSES
        }
        self._rules = rules
        self.running: dict[Running[C], None] = {}
        """The requests that have started and not ended, in the order of their starts."""
        self._running_cost = 0.0
        self.estimates: Estimates[C] = Estimates(rules)
        self.room = Room()
        self.overtaking: Overtaking[C] = Overtaking()
        self._stuck = False
        """Whether nothing that waits fits into the engines' memory, as far as is known."""
        self._yields: Yields[C] = Yields(rules.slice_tokens, self.estimates.pace)
        self._by_deadline: Heap[Waiting[C]] = Heap()

    def __len__(self) -> int:
        """How many requests are claimed and have not started."""
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[C]:
        """The requests that have not started, in any order."""
        return (waiting.entry for line in self.lines.values() for waiting in line)

    @property
    def full(self) -> bool:
        """Whether no request may start before another has ended."""
        return len(self.running) >= self.capacity

    @property
    def yielding(self) -> bool:
        """Whether requests yield their places at all."""
        return self._rules.slice_tokens > 0

    def waiting(self) -> dict[str, tuple[int, int]]:
        """How many of each class have not started, and when the oldest was enqueued, in Unix
        milliseconds; only classes of which some wait.
        """
        return {name: (len(line), line.oldest_ms) for name, line in self.lines.items() if len(line)}

    def room_changed(
        self, engines: Sequence[EngineReport], share_tokens: float, others_tokens: int
    ) -> None:
        """The engines have reported, see `Room.reported`; none if memory is to be no bound."""
        self.room.reported(engines, share_tokens, others_tokens, self.overtaking.short)
        self._stuck = False

    def wanted(self) -> Claim | None:
        """What to claim before calling `next`, if anything.

        Where requests yield, also while nothing is free: what comes may interrupt others.
        """
        if self._stuck or not self.claiming:
            return None
        if self.full and not (self.yielding and self.capacity):
            return None
        waiting = {name: len(line) for name, line in self.lines.items()}
        short = self.overtaking.short
        places = max(1, len(self.running)) if short else self.capacity
        ahead = math.ceil(self._rules.claim_ahead * places) if self.ahead or short else 0
        return what_to_claim(self.capacity, len(self.running), waiting, ahead, places)

    def add(self, entry: C) -> None:
        """A request has been claimed."""
        self._wait(self.estimates.waiting(entry))

    def next(self, now_ms: int) -> Running[C] | None:
        """The request that starts now; it runs until `ended` is called.

        A request whose deadline has passed starts at once: it only ends, and uses no engine. So its
        tenant pays nothing: one whose requests expire would be pushed back ever further.
        """
        first_due = self._by_deadline.first()
        if first_due is None:
            return None
        if first_due.entry.deadline_ms <= now_ms:
            return self._start(first_due, now_ms, uses_engine=False)
        if self.full:
            return None
        oldest_ms, soon_ms = self._oldest_ms(), self.estimates.pace.mean_ms
        head = self.lines[self.classes.choose(oldest_ms, now_ms)].next(now_ms, soon_ms)
        waiting = self.overtaking.choose(head, self.lines, self.room, now_ms, soon_ms)
        self._stuck = waiting is None
        if waiting is None:
            return None
        self.classes.starts(waiting.entry.request_class, oldest_ms)
        return self._start(waiting, now_ms)

    def to_yield(self, now_ms: int) -> list[Running[C]]:
        """The requests that shall yield their places, so that those that go next need not wait.
        For each, `suspended`, `ended` or `stays` is called later.
        """
        named: list[Running[C]] = []
        while self.yielding and len(self) and len(self.running) == self.capacity:
            running = self._next_to_yield(now_ms)
            if running is None:
                break
            named.append(running)
        return named

    def _next_to_yield(self, now_ms: int) -> Running[C] | None:
        """For a request of the class that goes next. Its tenant need not be the next one, because
        that may have nothing but long requests; but it must not have been served more by a slice
        than the one that loses its place.
        """
        name = self.classes.choose(self._oldest_ms(), now_ms)
        line = self.lines[name]
        ahead = self._rules.tenants.output_weight * self._rules.slice_tokens
        for tenant in line.first_tenants(_TENANTS):
            if self._yields.to((name, tenant), now_ms) >= line.size_of(tenant):
                continue
            waiting = line.next_of(tenant, now_ms, self.estimates.pace.mean_ms)
            needs = self.room.need(waiting.prompt_tokens, waiting.output_tokens)
            fair = partial(self._is_fair, name, line.counters[tenant] - ahead, needs)
            left = self.estimates.left(waiting)
            running = self._yields.choose(self.running, waiting, left, now_ms, fair)
            if running is not None:
                return running
        return None

    def _is_fair(self, name: str, most: float, needs: int, running: Running[C]) -> bool:
        if not self.room.fits(max(0, needs - running.reserved_tokens)):
            return False  # its place would be of no use
        of_class, tenant = running.entry.request_class, running.entry.tenant
        return of_class != name or most <= self.lines[name].counters[tenant]

    def stays(self, running: Running[C], now_ms: int, *, always: bool) -> None:
        """A request that was to yield goes on. `always`: it can never be interrupted."""
        self._yields.stays(running, now_ms, always=always)

    def suspended(self, running: Running[C], written: Written, now_ms: int) -> Running[C] | None:
        """A request has yielded its place. If it was to one of its own class, its slice was over,
        and it waits behind all of its tenant's requests that wait now; if it was to a more urgent
        one, it is the next of its tenant, and finds more of its KV. Its tenant pays for what it has
        written so far.

        Returns:
            The request that starts in its place, if any still waits.
        """
        own = running.entry.request_class
        name, tenant = self._yields.over(running) or (own, "")
        line, rank_ms = self.lines[name], now_ms if name == own else running.entry.enqueued_ms
        self.estimates.learn_pace(running, written, now_ms)
        self._settle(running, written)
        running.slices += 1
        running.tokens, running.paid = written.tokens, self._used(running.entry, written)
        starts = None
        if line.size_of(tenant) and not self.full:
            first = line.next_of(tenant, now_ms, self.estimates.pace.mean_ms)
            if self.room.fits(self.room.need(first.prompt_tokens, first.output_tokens)):
                starts = self._start(first, now_ms)
        self._wait(self.estimates.again(running, rank_ms, now_ms))
        return starts

    def adopt(self, entries: Iterable[C]) -> list[Running[C]]:
        """Start requests that were taken over while they ran, in order, whatever else runs."""
        return [self._run(self.estimates.new(entry)) for entry in sorted(entries, key=_urgency)]

    def ended(
        self, running: Running[C], written: Written | None = None, now_ms: int | None = None
    ) -> Settled | None:
        """A request no longer runs. Its tenant pays for what it has used: for the prompt and for
        what was written, also of an answer that was broken off; for nothing if nobody has worked on
        it.

        Args:
            written: what it has written; if that is not known, its tenant pays what was expected.
            now_ms: Unix milliseconds, by Redis's clock.

        Returns:
            What it has cost; None if that is not known.
        """
        self._yields.over(running)
        cost = self._settle(running, written)
        if written is None:
            return None
        self.estimates.learn(running, written, now_ms)
        return Settled(running.entry, running.predicted, written, cost)

    def _settle(self, running: Running[C], written: Written | None) -> float:
        """A request runs no more, and its tenant pays what it owes. Returns what it has cost."""
        del self.running[running]
        self.room.give_back(running.reserved_tokens)
        self._stuck = False
        self._running_cost -= running.cost
        if written is None:
            return running.paid + running.cost
        used = self._used(running.entry, written)
        self._add_cost(running.entry, used - running.paid - running.cost)
        return used

    def _used(self, entry: C, written: Written) -> float:
        cost = self._rules.tenants.cost(entry.prompt_tokens, written.tokens)
        return cost if written.begun else 0.0

    def _oldest_ms(self) -> dict[str, int]:
        return {name: line.oldest_ms for name, line in self.lines.items() if len(line)}

    def _wait(self, waiting: Waiting[C]) -> None:
        entry = waiting.entry
        line = self.lines[entry.request_class]
        if not len(line):
            self.classes.begins_to_wait(entry.request_class, self._running_cost)
        line.add(waiting)
        self._by_deadline.push(entry.deadline_ms, waiting)

    def _start(self, waiting: Waiting[C], now_ms: int, uses_engine: bool = True) -> Running[C]:
        entry = waiting.entry
        line = self.lines[entry.request_class]
        line.remove(waiting)
        running = self._run(waiting.resumes or self.estimates.new(entry), uses_engine, now_ms)
        self.overtaking.started(waiting, running.reserved_tokens)
        if not len(line):
            others = {name: len(other) for name, other in self.lines.items() if len(other)}
            self.classes.waits_no_more(entry.request_class, others)
        return running

    def _run(
        self, running: Running[C], uses_engine: bool = True, now_ms: int | None = None
    ) -> Running[C]:
        entry = running.entry
        tokens = running.expected(running.tokens)
        if self.yielding:  # whoever may be interrupted pays for each slice
            tokens = min(tokens, running.tokens + self._rules.slice_tokens)
        expected = self._rules.tenants.cost(entry.prompt_tokens, tokens)
        running.cost = max(0.0, expected - running.paid) if uses_engine else 0.0
        running.started_ms = now_ms
        reads_tokens = running.prompt_tokens + running.tokens
        needs_tokens = self.room.need(reads_tokens, running.left_at_most)
        running.reserved_tokens = needs_tokens if uses_engine else 0
        self.room.take(running.reserved_tokens)
        self.running[running] = None
        self._running_cost += running.cost
        self._add_cost(entry, running.cost)
        self._yields.started(running)
        return running

    def _add_cost(self, entry: C, cost: float) -> None:
        self.classes.charge(entry.request_class, cost)
        self.lines[entry.request_class].counters.charge(entry.tenant, cost)


def _urgency(entry: Claimed) -> tuple[int, int]:
    return URGENCY[entry.request_class], entry.enqueued_ms
