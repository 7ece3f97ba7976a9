"""The order of work: how many sequences may run at the same time, which claimed request starts now,
and what to claim next. Pure.

Three questions, each answered by one policy: which class goes next (`classes.py`), which of its
tenants (`tenant_lines.py`), and which of that tenant's requests: one that must start soon to meet
its deadline, else the one of the least rank, which is the time of its arrival and more for what it
will probably cost (`prediction.py`). docs/order-of-work.md says what is promised.

A request of a kind that has never ended may be endless. It counts as short if it is the only one of
its kind, and such requests hold no more than half of the spare slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from serve_app.contract import CompletionStats, IngressLease
from serve_app.policy.classes import BATCH, CLASSES, CRITICAL, URGENCY, ClassOrder, ClassRules
from serve_app.policy.overload import Expected
from serve_app.policy.prediction import Estimated, LengthModel, Prediction, ServiceTimeModel
from serve_app.policy.tenant_lines import TenantLines, TenantRules, Waiting

C = TypeVar("C", bound=Estimated)

_MOST_PROMPT_TOKENS = 131_072
"""What counts of an estimate. Sixteen megabytes of text would be four million tokens, which the
engine refuses at once.
"""
KV_FULL = 0.85
"""The share of an engine's KV cache beyond which it takes no more sequences. What is free beyond it
is needed until the next reading.
"""
_HARDLY_ANY = 1 / 8
"""Of the engines' capacity; more than is free between the end of one request and the next claim."""
_SPARE = 1 / 8
"""Of the most sequences that an engine runs, rounded down."""
_AT_ONCE = 256
"""Entries of each class in one claim: reading a thousand takes some 20 ms of the event loop, in
which no stream goes on.
"""
_DEEPER = 8
"""How many times as much is claimed ahead of a class in which several tenants wait."""
_URGENT = (CRITICAL, "realtime")
_TENANTS = 8
"""How many tenants' shortest requests are considered for a spare slot."""
_PASSED_PART = 1 / 4
"""The part of the time until its deadline in which later requests can pass a long one. Without this
bound, one that will write 100,000 tokens would wait behind all that comes in its first 400 s.
"""
_PROMPT_PART = 1 / 4
"""The part of a prompt's cost that ranks a request. An engine reads thousands of prompt tokens in
the time in which it writes a few, and prompts differ more than answers do: with all of their cost,
long prompts would wait for much longer than first come, first served.
"""


class Rules(NamedTuple):
    """The settings of all policies."""

    classes: ClassRules = ClassRules()
    tenants: TenantRules = TenantRules()
    claim_ahead: float = 4.0
    """Requests of each class that are claimed and wait, in multiples of the capacity."""
    short_first_ms_per_cost: float = 2.0
    engine_slots: int = 128
    """The most sequences that one engine runs, and so the most slots of one request."""


DEFAULT_RULES = Rules()


class Claim(NamedTuple):
    """What to claim from the queue: up to `of_each` entries of each of `classes`."""

    classes: Sequence[str]
    of_each: int
    wait: bool
    """Whether to wait for an arrival if the queue is empty."""


@dataclass(eq=False)
class Running(Generic[C]):
    """A request from its start to its end. Compared by identity: a duplicate queue entry has its
    own.
    """

    entry: C
    predicted: Prediction
    """What it was expected to write when it started."""
    started_ms: int | None = None
    """Unix milliseconds, by Redis's clock. None if it was taken over while it ran."""
    sequences: int = 1
    """Those that its engine runs at a time."""
    holds_slots: bool = True
    """Whether nobody else may have its slots: not while it waits in quarantine."""
    general: bool = False
    """Whether it had no right to a spare slot when it started."""
    probation: bool = False
    """Whether it is the first of its kind, and holds a spare slot."""
    cost: float = 0.0
    """What its tenant has paid in advance."""


class Completion(NamedTuple):
    """A request that has ended: what was expected when it started, and what it has written."""

    entry: Estimated
    predicted: Prediction
    written: CompletionStats
    cost: float


class Scheduler(Generic[C]):
    """Decides the order in which one ingress starts the requests that it has claimed.

    A request that would run beyond `capacity` waits; one of several sequences starts when one slot
    is free, and its engine takes the rest as slots become free. Up to `claim_ahead` times as many
    requests of each class are claimed in addition (`ahead`), so that there is a choice. All others
    wait in Redis, where every ingress can reach them.
    """

    def __init__(self, rules: Rules = DEFAULT_RULES) -> None:
        self.capacity = 0
        """Sequences that may run at the same time; 0 if there is no engine."""
        self.general_capacity: float = math.inf
        """How many of them may be of requests that have no right to a spare slot."""
        self.claiming = True
        """Whether anything may be claimed. A newer Ray cluster takes new requests otherwise."""
        self.ahead = True
        """Whether to claim requests that cannot start yet. Nobody else can start them, so it is
        for the time in which other ingresses have hardly any capacity left.
        """
        self.shared: Collection[str] = ()
        """The classes in which several tenants wait: of these more is claimed ahead, because the
        requests of one may lie in the queue behind many of another.
        """
        self.classes = ClassOrder(rules.classes)
        self.lines: dict[str, TenantLines[C]] = {
            name: TenantLines(rules.tenants) for name in CLASSES
        }
        self.running: dict[Running[C], None] = {}
        """The requests that have started and not ended, in the order of their starts."""
        self.sequences = 0
        """Their sequences: those of the last one may exceed what was free."""
        self.general_sequences = 0
        """How many of these are of requests that have no right to a spare slot."""
        self.waiting_sequences = 0
        """The slots that the requests will hold that have not started."""
        self.lengths = LengthModel()
        self.pace = ServiceTimeModel()
        self._rules = rules
        self._running_cost = self._batch_cost = 0.0
        self._only_spare_free = False
        """Whether slots are free, but spare for all that wait."""
        self._on_probation: set[tuple[str, str]] = set()
        """Tenants and kinds of which a first request holds a spare slot."""

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[C]:
        """The requests that have not started, in any order."""
        return (waiting.entry for line in self.lines.values() for waiting in line)

    @property
    def taken(self) -> int:
        """The slots that are not free. Sequences of general requests count up to
        `general_capacity`: those beyond it take no spare slots.
        """
        return slots_taken(self.sequences, self.general_sequences, self.general_capacity)

    @property
    def full(self) -> bool:
        """Whether no request may start before another has ended."""
        return self.taken >= self.capacity

    def waiting(self) -> dict[str, tuple[int, int]]:
        """How many of each class have not started, and when the oldest was enqueued, in Unix
        milliseconds; only classes of which some wait.
        """
        return {name: (len(line), line.oldest_ms) for name, line in self.lines.items() if len(line)}

    def wanted(self) -> Claim | None:
        """What to claim before calling `next`, if anything."""
        if self.full or not self.claiming:
            return None
        waiting = {name: len(line) for name, line in self.lines.items()}
        ahead = self.ahead or self._only_spare_free
        most = math.ceil(self._rules.claim_ahead * self.capacity) if ahead else 0
        bounds = {name: most * (_DEEPER if name in self.shared else 1) for name in waiting}
        return what_to_claim(self.capacity, self.taken, waiting, bounds, self._only_spare_free)

    def add(self, entry: C) -> None:
        predicted, prompt_tokens = self.lengths.predict(entry), _prompt(entry)
        handicap_ms = self._handicap_ms(entry, predicted) if self.lengths.useful else 0.0
        waiting = Waiting(
            entry,
            rank_ms=entry.accepted_ms + handicap_ms,
            latest_ms=entry.deadline_ms - self.pace.predict_ms(prompt_tokens, predicted.mean),
            size=int(_output(entry, predicted)).bit_length(),
        )
        line = self.lines[entry.request_class]
        if not len(line):
            self.classes.begins_to_wait(entry.request_class, self._running_cost)
        line.add(waiting)
        self.waiting_sequences += self._slots(entry)

    def expected(self, entry: Estimated) -> Expected:
        """What a request will probably cost and how long it will run, at most the mean of all: a
        long one may be shorter than expected.
        """
        predicted, prompt_tokens = self.lengths.predict(entry), _prompt(entry)
        cost = self._rules.tenants.cost(prompt_tokens, _output(entry, predicted))
        run_ms = self.pace.predict_ms(prompt_tokens, predicted.mean)
        return Expected(cost, min(run_ms, self.pace.mean_ms))

    def next(self, now_ms: int) -> Running[C] | None:
        """The request that starts now; it runs until `ended` is called."""
        self._only_spare_free = False
        if self.full or not len(self):
            return None
        oldest_ms = {name: line.oldest_ms for name, line in self.lines.items() if len(line)}
        waiting = self._head(self.classes.choose(oldest_ms, now_ms), now_ms)
        only_spare = self.general_sequences >= self.general_capacity or (
            oldest_ms.keys() == {BATCH} and self._batches_leave_the_rest
        )
        if only_spare and not self._may_take_spare(waiting.entry):
            spared = self._for_spare_slot(oldest_ms, now_ms)
            self._only_spare_free = spared is None
            if spared is None:
                return None
            waiting = spared
        self.classes.starts(waiting.entry.request_class, oldest_ms, now_ms)
        return self._start(waiting, now_ms)

    def drop(self, unwanted: Callable[[C], bool]) -> bool:
        """One that waits shall not start any more. Returns whether there was such a request."""
        for name, line in self.lines.items():
            for waiting in line:
                if unwanted(waiting.entry):
                    line.remove(waiting)
                    self.waiting_sequences -= self._slots(waiting.entry)
                    if not len(line):
                        self.classes.waits_no_more(name)
                    return True
        return False

    def adopt(self, entries: Iterable[C]) -> list[Running[C]]:
        """Start requests that were taken over while they ran, in order, whatever else runs."""
        return [self._run(entry) for entry in sorted(entries, key=_urgency)]

    def give_back(self, idle: Iterable[Running[C]]) -> None:
        """Of the requests that run, only these hold no slots now: they wait for their turn, for
        which they need no engine. When it comes, they run beyond the capacity until enough has
        ended.
        """
        without = set(idle)
        for running in self.running:
            if running.holds_slots is (running in without):
                running.holds_slots = not running.holds_slots
                self._count(running, 1 if running.holds_slots else -1)

    def ended(
        self, running: Running[C], written: CompletionStats | None = None, now_ms: int | None = None
    ) -> Completion | None:
        """A request no longer runs. Returns what it has cost; None if that is not known.

        Its tenant pays for what it has used: for the prompt and for what was written, also of an
        answer that was broken off; for nothing if nobody has worked on it. If it is not known what
        was written, its tenant has paid what was expected.
        """
        del self.running[running]
        if running.holds_slots:
            self._count(running, -1)
        if written is None:
            return None
        entry = running.entry
        cost = self._rules.tenants.cost(_prompt(entry), written.tokens)
        used = cost if written.begun else 0.0
        self._add_cost(entry, used - running.cost)
        # The length of an answer that was broken off is learnt only if it is already longer than
        # expected: otherwise a tenant whose answers all break off would always look like a short
        # one.
        each = written.tokens / entry.sequences
        if written.whole or each > running.predicted.mean:
            self.lengths.learn(entry, running.predicted, each)
        if written.whole and now_ms is not None and running.started_ms is not None:
            self.pace.learn(_prompt(entry), each, now_ms - running.started_ms)
        return Completion(entry, running.predicted, written, used)

    def _head(self, name: str, now_ms: int) -> Waiting[C]:
        return self.lines[name].next(now_ms, self.pace.mean_ms)

    def _for_spare_slot(self, oldest_ms: dict[str, int], now_ms: int) -> Waiting[C] | None:
        first: dict[str, Waiting[C]] = {}
        for name in (name for name in oldest_ms if name != BATCH):
            candidates = [self._head(name, now_ms), *self.lines[name].shortest_per_tenant(_TENANTS)]
            for waiting in candidates:
                if self._may_take_spare(waiting.entry):
                    first[name] = waiting
                    break
        if not first:
            return None
        return first[self.classes.choose({name: oldest_ms[name] for name in first}, now_ms)]

    def _may_take_spare(self, entry: C) -> bool:
        short = self._is_short(entry)
        return self._may_be_on_probation(entry) if short is None else short

    def _may_be_on_probation(self, entry: C) -> bool:
        """Whether a request like which nothing has ended may take a spare slot."""
        return _alike(entry) not in self._on_probation and len(self._on_probation) < max(
            1, self._spare // 2
        )

    @property
    def _spare(self) -> float:
        return self.capacity - self.general_capacity

    @property
    def _batches_leave_the_rest(self) -> bool:
        """Whether `batch` requests, of which some wait and no others do, leave the slots that are
        free: an eighth of all, once they have their share of the cost of all that runs. (In as many
        slots as others, long prompts would take most of the engines' time.) Where an engine's
        memory bounds what runs, few of many spare slots will ever be used.
        """
        free, own = self.capacity - self.sequences, 1 - self._rules.classes.interactive_share
        beside = min(self._spare, _SPARE * self.capacity)
        return free <= beside and self._batch_cost >= own * self._running_cost

    def _is_short(self, entry: C) -> bool | None:
        """Whether a request has a right to a spare slot; None if nothing like it has ended. One of
        more sequences than there are spare slots has none, and one of several does not try.
        """
        if entry.sequences > max(1, self._spare):
            return False
        if entry.request_class in _URGENT:
            return True
        if entry.request_class == BATCH:
            return False
        short = self.lengths.short(entry)
        return False if short is None and entry.sequences > 1 else short

    def _start(self, waiting: Waiting[C], now_ms: int) -> Running[C]:
        entry = waiting.entry
        line = self.lines[entry.request_class]
        line.remove(waiting)
        self.waiting_sequences -= self._slots(entry)
        running = self._run(entry, now_ms)
        if not len(line):
            self.classes.waits_no_more(entry.request_class)
        return running

    def _run(self, entry: C, now_ms: int | None = None) -> Running[C]:
        predicted = self.lengths.predict(entry)
        running = Running(entry, predicted, now_ms, self._slots(entry))
        short = self._is_short(entry)
        full = self.general_sequences >= self.general_capacity
        running.probation = short is None and full and self._may_be_on_probation(entry)
        running.general = not (short or running.probation)
        running.cost = self._rules.tenants.cost(_prompt(entry), _output(entry, predicted))
        self.running[running] = None
        self._count(running, 1)
        self._add_cost(entry, running.cost)
        return running

    def _slots(self, entry: C) -> int:
        return min(entry.sequences, self._rules.engine_slots)

    def _count(self, running: Running[C], times: int) -> None:
        """A request takes its slots, or gives them back."""
        entry = running.entry
        self.sequences += times * running.sequences
        self._running_cost += times * running.cost
        if running.general:
            self.general_sequences += times * running.sequences
        if entry.request_class == BATCH:
            self._batch_cost += times * running.cost
        if running.probation:
            (self._on_probation.add if times > 0 else self._on_probation.discard)(_alike(entry))

    def _add_cost(self, entry: C, cost: float) -> None:
        self.classes.charge(entry.request_class, cost)
        self.lines[entry.request_class].counters.charge(entry.tenant, cost)

    def _handicap_ms(self, entry: C, predicted: Prediction) -> float:
        """By how much later a request ranks than one that needs no work."""
        rules = self._rules
        prompt_tokens = int(_PROMPT_PART * _prompt(entry))
        cost = rules.tenants.cost(prompt_tokens, _output(entry, predicted))
        most = max(0.0, _PASSED_PART * (entry.deadline_ms - entry.accepted_ms))
        return min(rules.short_first_ms_per_cost * cost, most)


def _alike(entry: Estimated) -> tuple[str, str]:
    return entry.tenant, entry.kind


def _prompt(entry: Estimated) -> int:
    """What counts of its prompts, of which it has at most one for each sequence."""
    return min(entry.prompt_tokens, _MOST_PROMPT_TOKENS * entry.sequences)


def _output(entry: Estimated, predicted: Prediction) -> float:
    """What all of its sequences will probably write."""
    return entry.sequences * predicted.mean


def _urgency(entry: Estimated) -> tuple[int, int]:
    return URGENCY[entry.request_class], entry.accepted_ms


# -- capacity ------------------------------------------------------------------------------------
# Each worker says how many sequences its engine may run (`workers/replica.py`).


def share(capacity: int, ingresses: int) -> int:
    """The part of the engines' capacity that one ingress may use.

    It is rounded up, so that an engine whose capacity is lower than the number of ingresses is used
    by all of them. The shares together exceed the capacity by at most `ingresses - 1` requests.
    """
    return math.ceil(capacity / max(1, ingresses))


def allowance(capacity: int, others: Iterable[IngressLease], waiting: bool) -> int:
    """How many sequences one ingress may run at the same time.

    Without waiting requests it has its share. An ingress in which requests wait divides with those
    like it what the others leave unused, so that no engine is idle while requests wait. What others
    run already is never given out twice, but for one slot: shares are rounded up, so a few of many
    ingresses may use all of the capacity for as long as requests keep coming, and what has been
    claimed in another would never start.

    `others` are as they were half a second ago. Requests that they have started since then, or that
    use an engine again, come on top, and the engines queue them for a moment.
    """
    uses = list(others)
    mine = most = share(capacity, len(uses) + 1)
    if waiting:
        idle = [use for use in uses if use.waiting == 0]
        left = capacity - sum(use.running for use in idle)
        most = max(mine, share(left, len(uses) - len(idle) + 1))
    least = min(1, capacity) if waiting else 0
    return max(least, min(most, capacity - sum(use.running for use in uses)))


def peers_saturated(capacity: int, others: Iterable[IngressLease], mine: int) -> bool:
    """Whether other ingresses can start hardly any request more than the `mine` that this one may
    run, so that what waits in Redis may as well wait in this one.
    """
    free = capacity - mine - sum(use.running for use in others)
    return free <= _HARDLY_ANY * capacity


def spare_slots(most: int) -> int:
    """How many slots of an engine that runs at most so many sequences are spare."""
    return math.floor(_SPARE * most)


def general_slots(capacity: int, most: int) -> int:
    """How many of a worker's slots are for all requests. One with other settings may have fewer
    slots than would be spare here, and then has none to spare.
    """
    spare = spare_slots(most)
    return capacity - spare if capacity > spare else capacity


def slots_taken(sequences: int, general: int, general_capacity: float) -> int:
    """How many slots are not free for the sequences of requests that run. One of several starts
    when one slot is free, so `general` may exceed the slots for all; that takes no spare ones.
    """
    return sequences - general + int(min(general, general_capacity))


def as_general_use(use: IngressLease) -> IngressLease:
    """The use of general slots in place of that of all, to divide them in the same way."""
    return use._replace(running=use.running_general)


def what_to_claim(
    capacity: int,
    taken: int,
    waiting: Mapping[str, int],
    ahead: Mapping[str, int],
    only_spare_free: bool,
) -> Claim | None:
    """What to claim next, if anything.

    While much is free, here or elsewhere, the free capacity is divided among the classes, rounded
    up. When little is free, or some wait already, each class is filled up to its bound.

    Args:
        capacity: sequences that may run at the same time.
        taken: how many of these slots are not free; fewer than `capacity`.
        waiting: how many requests of each class have been claimed and have not started.
        ahead: how many of each class may wait so; 0 while much is free elsewhere.
        only_spare_free: whether only an arrival can take what is free.
    """
    free, empty = capacity - taken, not any(waiting.values())
    if empty and (free > max(1, capacity / 4) or not any(ahead.values())):
        return Claim(tuple(waiting), min(math.ceil(free / len(waiting)), _AT_ONCE), wait=True)
    room = {name: ahead[name] - count for name, count in waiting.items() if count < ahead[name]}
    if not room:
        return None
    # Little by little, so that several ingresses get similar parts of a sudden backlog.
    of_each = min(min(room.values()), 2 * capacity, _AT_ONCE)
    return Claim(tuple(room), of_each, wait=empty or only_spare_free)
