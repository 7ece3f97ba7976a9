"""How long a request would wait, and what follows from it: whether it is accepted, when a refused
one may come again, and whether the breaker to asynchronous work is open. Pure; one for each
ingress. Times are Unix milliseconds by Redis's clock.

**The estimated wait** of a class is the predicted cost of what waits, over the cost that starts per
second. Both are sums over all ingresses, which tell each other with their leases (`Load`). What
starts is measured only while the class waits, so it contains the class's share beside the others,
and it is measured for each slot, so it follows the number of engines at once. Of a tenant it is the
cost of what waits of it over what it gets: of the class, what it got lately, or its share by weight
if that is more. What is known from few starts decides nothing.

**A promise.** A refused request is told when it would be accepted, behind all that were told so
before: `Retry-After` is its place in a queue outside. Promises of one class and tenant are as far
apart as their costs need. A request that has one is recognized by the digest of its tenant and
body, at every ingress, and what is new leaves room for it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.policy.classes import CLASSES

_CERTAIN_STARTS = 16
"""With fewer starts the estimate decides nothing."""
_MARGIN = 1.2
"""Factor on the wait of what is accepted: lengths are predictions, and what drains varies."""
_PROMISED = 1.1
"""The same of a request that was promised a place, for which the estimate may have grown."""
_BEHIND = 2.0
"""The same of a new one while others of its tenant have promises. They fill the queue, so it is
accepted only if they do not come back.
"""
_MOST_TENANTS = 1_000
"""What a tenant has got of a class is known if it is more than the part of so many equal ones."""
_NOTHING: Mapping[str, float] = {}
_NEVER = 10**15
_ROUNDING = 1e-3


class OverloadRules(NamedTuple):
    """Bounds, and how long what is known counts."""

    async_above_s: float = 0.0
    """Estimated wait of a class above which its breaker opens; it closes below half of that. 0:
    never.
    """
    memory_s: float = 60.0
    memory_starts: int = 256
    """What was measured is halved when it is of so much time and has so many starts."""
    known_s: float = 120.0
    """It is forgotten if the class has not waited for so long."""
    retry_after_s: float = 1.0
    """`Retry-After` where it is not known how fast a class drains; an end frees capacity."""
    most_promises: int = 10_000
    """What one ingress knows at a time takes some 3 MB."""
    most_ahead_s: float = 300.0
    """A later time is told, but it is no promise. OpenAI's clients give up beyond 120 s."""
    early_ms: int = 250
    late_ms: int = 30_000
    """A retry may come so much before its time, because clocks differ, and so much later."""
    soon_ms: int = 1_000
    """New requests leave room in a queue for those that are due within this time, or were."""
    told_ms: int = 1_500
    """A promise is in the leases of this time, so that all read it once."""


DEFAULT_OVERLOAD = OverloadRules()
MOST_TOLD = 256
"""The latest promises of an ingress, with which its lease has 5 KB."""


class Asked(NamedTuple):
    """A request that arrives, as the order of work sees it (`Estimated`)."""

    request_class: str
    tenant: str
    accepted_ms: int = 0
    deadline_ms: int = _NEVER
    prompt_tokens: int = 0
    max_output_tokens: int = 0
    sequences: int = 1
    kind: str = ""
    detached: bool = False
    """Whether it goes on without its client, so that the breaker lets it pass."""
    digest: str = ""
    """Of its body, eight hexadecimal digits; empty if no promise can be for it."""


class Expected(NamedTuple):
    """What a request will probably cost, and how long it will run."""

    cost: float
    run_ms: float


class Flow(NamedTuple):
    """One class at one ingress."""

    starts: float = 0.0
    """Requests that have started while some waited, lately."""
    cost: float = 0.0
    """Of these."""
    slot_s: float = 0.0
    """The time of that, times the slots of the ingress."""
    backlog: float = 0.0
    """The cost of what it has accepted and no worker has started."""


class Load(NamedTuple):
    """What an ingress tells the others: a flow for each of `CLASSES`, and its latest promises, as
    digest and due time. Encoded, `<starts>,<cost>,<slot ms>,<backlog>;…/<digest><due, hex>,…`.
    """

    flows: tuple[Flow, ...] = ()
    promises: tuple[tuple[str, int], ...] = ()

    def encode(self) -> str:
        flows = ";".join(
            f"{one.starts:.1f},{one.cost:.0f},{one.slot_s * 1000:.0f},{one.backlog:.0f}"
            for one in self.flows
        )
        return flows + "/" + ",".join(f"{digest}{due_ms:x}" for digest, due_ms in self.promises)

    @classmethod
    def decode(cls, text: str) -> Load:
        """Empty if another version wrote something else: the rest of a lease counts
        nevertheless.
        """
        with suppress(ValueError):
            flows, _, promised = text.partition("/")
            made = [
                Flow(float(starts), float(cost), float(slot_ms) / 1000, float(backlog))
                for starts, cost, slot_ms, backlog in (one.split(",") for one in flows.split(";"))
            ]
            promises = [(one[:8], int(one[8:], 16)) for one in promised.split(",") if one]
            if len(made) == len(CLASSES) and all(math.isfinite(n) for one in made for n in one):
                return cls(tuple(made), tuple(promises[:MOST_TOLD]))
        return cls()


class Reading(NamedTuple):
    """One reading of the members, and what this ingress knows of the queues."""

    slots: int
    """Sequences that all engines may run."""
    mine: int
    """How many of them this ingress may use."""
    waiting: frozenset[str]
    """The classes of which claimed requests wait here."""
    others: tuple[Load, ...] = ()
    """Of the other ingresses, also those that say nothing."""
    unclaimed: Mapping[str, int] = {}
    """Requests in the queue of each class that nobody has claimed."""


@dataclass(slots=True)
class _Measured:
    """What has started of a class while it waited here."""

    rules: OverloadRules
    starts: float = 0.0
    cost: float = 0.0
    slot_s: float = 0.0
    time_s: float = 0.0
    by_tenant: dict[str, float] = field(default_factory=dict)
    """The cost of those tenants of which some has started."""
    new: list[tuple[str, float]] = field(default_factory=list)
    """Tenants and costs since the last reading."""
    waited: bool = False
    """Whether the class waited at the last reading."""
    idle_s: float = 0.0

    def read(self, waits: bool, slots: int, for_s: float) -> None:
        """So much time has passed. The time counts in which the class waited at both ends."""
        if waits and self.waited:
            self.starts += len(self.new)
            self.slot_s += slots * for_s
            self.time_s += for_s
            for tenant, cost in self.new:
                self.cost += cost
                self.by_tenant[tenant] = self.by_tenant.get(tenant, 0.0) + cost
        self.waited = waits
        self.new.clear()
        self.idle_s = 0.0 if waits else self.idle_s + for_s
        full = self.starts > self.rules.memory_starts and self.time_s > self.rules.memory_s
        if self.idle_s > self.rules.known_s:
            self._fade(0.0)
        elif full or self.time_s > self.rules.known_s:
            self._fade(0.5)

    def _fade(self, part: float) -> None:
        """Only this part of what was measured counts from now on."""
        self.starts *= part
        self.cost *= part
        self.slot_s *= part
        self.time_s *= part
        least = self.cost / _MOST_TENANTS
        faded = {name: part * cost for name, cost in self.by_tenant.items()}
        self.by_tenant = {name: cost for name, cost in faded.items() if cost > least}


class Overload:
    """What one ingress knows of the waits of all classes, and decides by it. `weights`: of tenants,
    1 unless given.
    """

    def __init__(
        self,
        rules: OverloadRules = DEFAULT_OVERLOAD,
        weights: Mapping[str, float] = _NOTHING,
    ) -> None:
        self.promises = Promises(rules)
        self.open: set[str] = set()
        """The classes whose breaker is open."""
        self._rules, self._weights = rules, weights
        self._measured = {name: _Measured(rules) for name in CLASSES}
        self._backlog: dict[str, defaultdict[str, float]] = {
            name: defaultdict(float) for name in CLASSES
        }
        """The cost of what was accepted here and has not started, by class and tenant."""
        self._total = dict.fromkeys(CLASSES, 0.0)
        self._weight = dict.fromkeys(CLASSES, 0.0)
        """Of the tenants of `_backlog` together, at the last reading."""
        self._others: Mapping[str, Flow] = dict.fromkeys(CLASSES, Flow())
        self._reading = Reading(0, 0, frozenset())
        self._read_ms: int | None = None

    # -- what happens ------------------------------------------------------------------------------

    def enters(self, request_class: str, tenant: str, cost: float) -> None:
        """A request was accepted; with `-cost`, it has started, or ended before."""
        backlog = self._backlog[request_class]
        backlog[tenant] += cost
        self._total[request_class] += cost
        if backlog[tenant] < _ROUNDING:
            del backlog[tenant]
        if not backlog:  # what sums have lost to rounding
            self._total[request_class] = 0.0

    def started(self, request_class: str, tenant: str, cost: float) -> None:
        """A claimed request has got its slot."""
        self._measured[request_class].new.append((tenant, cost))

    def told(self, reading: Reading, now_ms: int) -> None:
        """The members were read."""
        for_s = 0.0 if self._read_ms is None else max(0, now_ms - self._read_ms) / 1000
        self._reading, self._read_ms = reading, now_ms
        for name, measured in self._measured.items():
            measured.read(name in reading.waiting, reading.mine, for_s)
        flows = [one.flows for one in reading.others if one.flows]
        self._others = {
            name: Flow(*map(sum, zip(Flow(), *(one[place] for one in flows), strict=True)))
            for place, name in enumerate(CLASSES)
        }
        for name, tenants in self._backlog.items():
            self._weight[name] = sum(self._weights.get(tenant, 1.0) for tenant in tenants)
        for load in reading.others:
            self.promises.heard(load.promises)
        self.promises.sweep(now_ms)
        for name in CLASSES if self._rules.async_above_s else ():
            wait_s = self.wait_s(name) or 0.0
            if wait_s > self._rules.async_above_s:
                self.open.add(name)
            elif wait_s < self._rules.async_above_s / 2:
                self.open.discard(name)

    @property
    def shared(self) -> frozenset[str]:
        """The classes in which requests of several tenants wait that were accepted here."""
        return frozenset(name for name, tenants in self._backlog.items() if len(tenants) > 1)

    def load(self, now_ms: int) -> Load:
        """What the others are told with the lease."""
        flows = [
            Flow(one.starts, one.cost, one.slot_s, self._total[name])
            for name, one in self._measured.items()
        ]
        return Load(tuple(flows), self.promises.latest(now_ms))

    # -- what is known -----------------------------------------------------------------------------

    def flow(self, request_class: str) -> Flow:
        """The sum over all ingresses."""
        own, others = self._measured[request_class], self._others[request_class]
        return Flow(
            own.starts + others.starts,
            own.cost + others.cost,
            own.slot_s + others.slot_s,
            self._total[request_class] + others.backlog,
        )

    def drain_per_s(self, request_class: str) -> float | None:
        """The cost of a class that starts in a second while it waits; None if it is not certain."""
        flow = self.flow(request_class)
        if flow.starts < _CERTAIN_STARTS or not flow.slot_s:
            return None
        return self._reading.slots * flow.cost / flow.slot_s or None

    def wait_s(self, request_class: str, tenant: str = "", cost: float = 0.0) -> float | None:
        """The estimated wait of a class, or of a tenant's next request of this cost; None if it is
        not certain.
        """
        drain_per_s = self.drain_per_s(request_class)
        if drain_per_s is None:
            return None
        flow = self.flow(request_class)
        # What no ingress has accepted that is alive counts by its number.
        unclaimed = self._reading.unclaimed.get(request_class, 0) * flow.cost / flow.starts
        wait_s = max(flow.backlog, unclaimed) / drain_per_s
        here, measured = self._total[request_class], self._measured[request_class]
        if not tenant or not here:
            return wait_s
        got = measured.by_tenant.get(tenant, 0.0) / measured.cost if measured.cost else 0.0
        mine = (self._backlog[request_class].get(tenant, 0.0) + cost) / here
        return wait_s * mine / max(got, self._share(request_class, tenant))

    def _share(self, request_class: str, tenant: str) -> float:
        """The part of a class that a tenant gets if all of whom requests wait want more."""
        weight, here = self._weights.get(tenant, 1.0), self._backlog[request_class]
        in_all = self._weight[request_class] + (0.0 if tenant in here else weight)
        return min(1.0, weight / in_all) if in_all else 1.0

    # -- what is decided ---------------------------------------------------------------------------

    def check(self, asked: Asked, expected: Expected) -> None:
        """Refuse a request that would wait beyond its deadline, or that the breaker keeps out
        (`overloaded`). One with a promise that is due is let in while it would just end in time.
        """
        name, run_s = asked.request_class, expected.run_ms / 1000
        left_s = (asked.deadline_ms - asked.accepted_ms) / 1000
        wait_s = self.wait_s(name, asked.tenant, expected.cost)
        promised = self.promises.due(asked)
        if not wait_s:
            return
        over_s = (_PROMISED if promised else _MARGIN) * wait_s + run_s - left_s
        behind = not promised and self.promises.outstanding(asked)
        refused = over_s > 0 or (behind and _BEHIND * wait_s + run_s > left_s)
        what = f"Requests of class '{name}' wait for about {wait_s:,.0f} s"
        instead = "send it with Prefer: respond-async"
        if not (asked.detached or promised) and name in self.open:
            over_s, refused = max(over_s, wait_s - self._rules.async_above_s / 2), True
        else:
            what += f", and this one has {max(0.0, left_s):,.0f} s"
            instead += ", or give it more time (x-request-timeout-seconds)"
        if refused:
            raise self.refusal(Reason.OVERLOADED, what, asked, expected.cost, over_s, instead)

    def coming(self, asked: Asked) -> int:
        """How many requests of its class are promised a place about now, before this one."""
        if self.promises.due(asked):
            return 0
        return self.promises.coming(asked.request_class, asked.accepted_ms)

    def refusal(
        self,
        reason: Reason,
        what: str,
        asked: Asked,
        cost: float,
        over_s: float | None = None,
        instead: str = "",
    ) -> RequestRefused:
        """The refusal of a request, with a promise if it is known how fast its class drains.

        Args:
            over_s: after that time it would be accepted if nobody else came; None: after that of
                its own cost.
            instead: what the client could do, too.
        """
        drain_per_s = self.drain_per_s(asked.request_class)
        message = f"{what}; {instead}, or " if instead else f"{what}; please "
        message += "retry after Retry-After."
        if drain_per_s is None:
            return RequestRefused(reason, message, retry_after_s=self._rules.retry_after_s)
        share = self._share(asked.request_class, asked.tenant) / (len(self._reading.others) + 1)
        takes_s = cost / (drain_per_s * share)
        over_s = takes_s if over_s is None else max(0.0, over_s)
        due_ms = self.promises.make(asked, cost, over_s, takes_s)
        wait_s = max(1, due_ms - asked.accepted_ms) / 1000
        return RequestRefused(reason, message, retry_after_s=wait_s, jitter=0.0)


class _Promise(NamedTuple):
    due_ms: int
    request_class: str = ""
    """Empty if another ingress has made it: as many of ours come there as of its here."""
    cost: float = 0.0


class Promises:
    """When refused requests were told to come again; a bounded number for a bounded time."""

    def __init__(self, rules: OverloadRules) -> None:
        self._rules = rules
        self._known: dict[str, list[_Promise]] = {}
        """By digest, the first due first: equal requests of several clients have one each."""
        self._count = 0
        self._dues_ms: defaultdict[str, list[int]] = defaultdict(list)
        """Of our own, by class and in order: every request that arrives asks how many come."""
        self._tails: dict[tuple[str, str], int] = {}
        """When the last promise of a class and tenant is due."""
        self._made: deque[tuple[int, str, int]] = deque(maxlen=MOST_TOLD)
        """Our latest: when each was made, its digest, and when it is due."""

    def __len__(self) -> int:
        return self._count

    def due(self, asked: Asked) -> bool:
        """Whether a request comes as it was promised."""
        known = self._known.get(asked.digest)
        if known is None:
            return False
        return asked.accepted_ms >= known[0].due_ms - self._rules.early_ms

    def outstanding(self, asked: Asked) -> bool:
        """Whether others of its class and tenant have been promised a place that is not due."""
        line = asked.request_class, asked.tenant
        return self._tails.get(line, 0) > asked.accepted_ms

    def kept(self, asked: Asked) -> None:
        """A request was accepted, perhaps by its promise."""
        if self.due(asked):
            self._forget(asked.digest)

    def make(self, asked: Asked, cost: float, over_s: float, takes_s: float) -> int:
        """When a refused request may come again. One that came as promised, and for which there was
        no room after all, goes before the others. What lies too far ahead, or is too much to keep,
        is no promise and keeps nobody behind it.

        Args:
            over_s: after that time it would be accepted if nobody else came.
            takes_s: how much later the next one of this class and tenant may come.
        """
        now_ms, line = asked.accepted_ms, (asked.request_class, asked.tenant)
        due_ms = now_ms + math.ceil(1000 * over_s)
        if self.due(asked):
            self._forget(asked.digest)
        else:
            behind_ms = self._tails.get(line, 0) + math.ceil(1000 * takes_s)
            due_ms = max(due_ms, behind_ms)
        ahead_s = (due_ms - now_ms) / 1000
        if (
            asked.digest
            and ahead_s <= self._rules.most_ahead_s
            and self._count < self._rules.most_promises
        ):
            self._tails[line] = max(due_ms, self._tails.get(line, 0))
            self._keep(asked.digest, _Promise(due_ms, asked.request_class, cost))
            self._made.append((now_ms, asked.digest, due_ms))
        return due_ms

    def coming(self, request_class: str, now_ms: int) -> int:
        """How many of a class come about now by promises of ours."""
        dues_ms, soon_ms = self._dues_ms.get(request_class, ()), self._rules.soon_ms
        return bisect_right(dues_ms, now_ms + soon_ms) - bisect_left(dues_ms, now_ms - soon_ms)

    def latest(self, now_ms: int) -> tuple[tuple[str, int], ...]:
        """What the others are told of: each is in the leases of some seconds."""
        since_ms = now_ms - self._rules.told_ms
        return tuple((digest, due) for made, digest, due in self._made if made >= since_ms)

    def heard(self, promises: Iterable[tuple[str, int]]) -> None:
        """Promises of other ingresses."""
        for digest, due_ms in promises:
            known = self._known.get(digest, ())
            if (
                all(one.due_ms != due_ms for one in known)
                and self._count < self._rules.most_promises
            ):
                self._keep(digest, _Promise(due_ms))

    def sweep(self, now_ms: int) -> None:
        """Forget what nobody has come back for."""
        before_ms = now_ms - self._rules.late_ms
        for digest in [one for one, some in self._known.items() if some[0].due_ms < before_ms]:
            self._forget(digest)
        for line in [line for line, due_ms in self._tails.items() if due_ms < now_ms]:
            del self._tails[line]

    def _keep(self, digest: str, promise: _Promise) -> None:
        some = self._known.setdefault(digest, [])
        some.append(promise)
        some.sort()
        if promise.request_class:
            insort(self._dues_ms[promise.request_class], promise.due_ms)
        self._count += 1

    def _forget(self, digest: str) -> None:
        some = self._known[digest]
        promise = some.pop(0)
        if promise.request_class:
            dues_ms = self._dues_ms[promise.request_class]
            del dues_ms[bisect_left(dues_ms, promise.due_ms)]
        self._count -= 1
        if not some:
            del self._known[digest]
