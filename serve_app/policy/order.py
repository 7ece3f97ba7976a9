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
from typing import Generic, NamedTuple, TypeVar

from serve_app.contract import EngineReport, Written
from serve_app.policy.classes import CLASSES, ClassOrder, ClassRules
from serve_app.policy.heap import Heap
from serve_app.policy.overtaking import Overtaking
from serve_app.policy.pace import Pace
from serve_app.policy.prediction import Lengths, Prediction
from serve_app.policy.prompts import Prompts
from serve_app.policy.room import Room
from serve_app.policy.running import Running
from serve_app.policy.tenants import MOST_PROMPT_TOKENS, TenantLines, TenantRules
from serve_app.policy.waiting import Claimed, Waiting

C = TypeVar("C", bound=Claimed)

_AT_ONCE = 256
"""Entries of each class in one claim: reading a thousand takes some 20 ms of the event loop, in
which no stream goes on.
"""
_PASSED_FOR = 1 / 4
"""The part of the time until its deadline in which later requests can pass a long one. Without this
bound, a prompt of 60,000 tokens would wait behind all that comes in its first ten minutes.
"""
_PROMPTS_COUNT = 1 / 4
"""The part of a prompt's cost that ranks a request. An engine reads thousands of prompt tokens in
the time in which it writes a few, and prompts differ more than answers do: with all of their cost,
long prompts would wait for much longer than first come, first served.
"""


class Claim(NamedTuple):
    """What to claim from the queue: up to `of_each` entries of each of `classes`."""

    classes: Sequence[str]
    of_each: int
    wait: bool
    """Whether to wait for an arrival if the queue is empty."""


class Settled(NamedTuple):
    """A request that has ended: what was expected when it started, and what it has written."""

    entry: Claimed
    predicted: Prediction
    written: Written
    cost: float


class Rules(NamedTuple):
    """The settings of all policies."""

    classes: ClassRules = ClassRules()
    tenants: TenantRules = TenantRules()
    claim_ahead: float = 4.0
    """Requests of each class that are claimed and wait, in multiples of the capacity."""
    short_first_ms_per_token: float = 2.0
    kv_room: bool = True
    """Whether requests start only when there is room for them in the engines' memory."""


DEFAULT_RULES = Rules()


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
        self.lengths = Lengths()
        self.pace = Pace()
        self.prompts = Prompts()
        self.room = Room()
        self.overtaking: Overtaking[C] = Overtaking()
        self._stuck = False
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

    def waiting(self) -> dict[str, tuple[int, int]]:
        """How many of each class have not started, and when the oldest was enqueued, in Unix
        milliseconds; only classes of which some wait.
        """
        return {name: (len(line), line.oldest_ms) for name, line in self.lines.items() if len(line)}

    def room_changed(
        self, engines: Sequence[EngineReport], share_tokens: float, others_tokens: int
    ) -> None:
        """The engines have reported.

        Args:
            engines: all of them; none if their memory is not to be considered.
            share_tokens: what this ingress may reserve of their memory.
            others_tokens: what other ingresses have reserved.
        """
        self.room.reported(engines, share_tokens, others_tokens, self.overtaking.short)
        self._stuck = False

    def wanted(self) -> Claim | None:
        """What to claim before calling `next`, if anything.

        While much is free, here or elsewhere, the free capacity is divided among the classes,
        rounded up. When little is free, or some wait already, each class is filled up to its bound.
        """
        if self.full or self._stuck or not self.claiming:
            return None
        free = self.capacity - len(self.running)
        short = self.overtaking.short
        places = max(1, len(self.running)) if short else self.capacity
        empty = not len(self)
        if empty and (free > max(1, self.capacity / 4) or not self.ahead):
            return Claim(CLASSES, min(math.ceil(free / len(CLASSES)), _AT_ONCE), wait=True)
        if not (self.ahead or short):
            return None
        ahead = math.ceil(self._rules.claim_ahead * places)
        room = {name: ahead - len(line) for name, line in self.lines.items() if len(line) < ahead}
        if not room:
            return None
        # Little by little, so that several ingresses get similar parts of a sudden backlog.
        of_each = min(min(room.values()), 2 * places, _AT_ONCE)
        return Claim(tuple(room), of_each, wait=empty)

    def add(self, entry: C) -> None:
        """A request has been claimed."""
        line = self.lines[entry.request_class]
        if not len(line):
            self.classes.begins_to_wait(entry.request_class, self._running_cost)
        predicted = self.lengths.predict(entry)
        output_tokens = predicted.mean
        rank_ms = entry.enqueued_ms + self._handicap_ms(entry, output_tokens)
        latest_ms = entry.deadline_ms - self.pace.predict_ms(_prompt(entry), output_tokens)
        prompt_tokens = self.prompts.predict(entry, _prompt(entry))
        waiting = Waiting(entry, rank_ms, latest_ms, prompt_tokens, predicted.p90)
        line.add(waiting)
        self._by_deadline.push(entry.deadline_ms, waiting)

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
        oldest_ms = {name: line.oldest_ms for name, line in self.lines.items() if len(line)}
        soon_ms = self.pace.mean_ms
        head = self.lines[self.classes.choose(oldest_ms, now_ms)].next(now_ms, soon_ms)
        waiting = self.overtaking.choose(head, self.lines, self.room, now_ms, soon_ms)
        self._stuck = waiting is None
        if waiting is None:
            return None
        self.classes.starts(waiting.entry.request_class, oldest_ms)
        return self._start(waiting, now_ms)

    def adopt(self, entries: Iterable[C]) -> list[Running[C]]:
        """Start requests that were taken over while they ran, in order, whatever else runs."""
        return [self._run(entry) for entry in sorted(entries, key=_urgency)]

    def ended(
        self, running: Running[C], written: Written | None = None, now_ms: int | None = None
    ) -> Settled | None:
        """A request no longer runs. Its tenant pays for what it has used: for the prompt and for
        what was written, also of an answer that was broken off; for nothing if nobody has worked on
        it. The length of an answer that was broken off is learnt only if it is already longer than
        expected: otherwise a tenant whose answers all break off would always look like a short one.

        Args:
            written: what it has written; if that is not known, its tenant pays what was expected.
            now_ms: Unix milliseconds, by Redis's clock.

        Returns:
            What it has cost; None if that is not known.
        """
        del self.running[running]
        self.room.give_back(running.reserved_tokens)
        self._stuck = False
        self._running_cost -= running.cost
        if written is None:
            return None
        entry = running.entry
        self.prompts.learn(entry, _prompt(entry), written.prompt_tokens)
        if written.whole or written.tokens > running.predicted.mean:
            self.lengths.learn(entry, running.predicted, written.tokens)
        if written.whole and now_ms is not None and running.started_ms is not None:
            self.pace.learn(_prompt(entry), written.tokens, now_ms - running.started_ms)
        used = self._rules.tenants.cost(entry.prompt_tokens, written.tokens)
        cost = used if written.begun else 0.0
        self._add_cost(entry, cost - running.cost)
        return Settled(entry, running.predicted, written, cost)

    def _handicap_ms(self, entry: C, output_tokens: float) -> float:
        """By how much later a request ranks than one that needs no work."""
        if not self.lengths.useful:
            return 0.0
        cost = self._rules.tenants.cost(int(_PROMPTS_COUNT * entry.prompt_tokens), output_tokens)
        most = max(0.0, _PASSED_FOR * (entry.deadline_ms - entry.enqueued_ms))
        return min(self._rules.short_first_ms_per_token * cost, most)

    def _start(self, waiting: Waiting[C], now_ms: int, uses_engine: bool = True) -> Running[C]:
        entry = waiting.entry
        line = self.lines[entry.request_class]
        line.remove(waiting)
        running = self._run(entry, uses_engine, now_ms)
        self.overtaking.started(waiting, running.reserved_tokens)
        if not len(line):
            others = {name: len(other) for name, other in self.lines.items() if len(other)}
            self.classes.waits_no_more(entry.request_class, others)
        return running

    def _run(self, entry: C, uses_engine: bool = True, now_ms: int | None = None) -> Running[C]:
        predicted = self.lengths.predict(entry)
        expected = self._rules.tenants.cost(entry.prompt_tokens, predicted.mean)
        cost = expected if uses_engine else 0.0
        prompt_tokens = self.prompts.predict(entry, _prompt(entry))
        tokens = self.room.need(prompt_tokens, predicted.p90) if uses_engine else 0
        running = Running(entry, predicted, cost, now_ms, tokens)
        self.room.take(tokens)
        self.running[running] = None
        self._running_cost += cost
        self._add_cost(entry, cost)
        return running

    def _add_cost(self, entry: C, cost: float) -> None:
        self.classes.charge(entry.request_class, cost)
        self.lines[entry.request_class].counters.charge(entry.tenant, cost)


def _prompt(entry: Claimed) -> int:
    return min(entry.prompt_tokens, MOST_PROMPT_TOKENS)


def _urgency(entry: Claimed) -> tuple[int, int]:
    return CLASSES.index(entry.request_class), entry.enqueued_ms
