"""The account of a run: the outcome of every request, and the recovery time after each fault."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from scripts.chaos_testing.traffic import Told

_FLUSHED_S = 1.0
_DAMAGE = ("lost", "duplicated", "corrupted", "stood_still", "misbooked")


@dataclass
class Strike:
    """One fault. `seconds`: when it struck, and from when on the service could recover
    (`time.monotonic`).
    """

    name: str
    at_s: float
    from_s: float = 0.0
    in_flight: int = 0


@dataclass
class Account:
    """Counts; the numbers of lost, duplicated, corrupted, stalled and misbooked requests must be
    0.
    """

    sent: int = 0
    completed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    reconnected: int = 0
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    corrupted: list[str] = field(default_factory=list)
    stood_still: list[str] = field(default_factory=list)
    misbooked: list[str] = field(default_factory=list)
    longest_still_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether nothing happened that must never happen."""
        return not any(getattr(self, kind) for kind in _DAMAGE)


def settle(all_told: Sequence[Told], expected: Callable[[Told], str]) -> Account:
    """Determine the outcome of all requests.

    Args:
        expected: the uninterrupted text of a request.
    """
    account = Account(sent=len(all_told))
    for told in all_told:
        name = f"{told.request_id or told.key}: "
        account.attempts[int(told.state.get("attempts") or 0)] += 1
        account.reconnected += bool(told.breaks)
        if told.wrong:
            (account.duplicated if told.twice else account.lost).append(name + told.wrong)
        elif told.failure.startswith("client gave up") and told.accepted:
            account.lost.append(name + told.failure)
        elif told.failure:
            account.failed[told.failure.partition(":")[0]] += 1
        elif not told.done:
            account.lost.append(name + "never ended")
        elif told.text != expected(told):
            account.corrupted.append(f"{name}{difference(told.text, expected(told))}")
        elif told.state.get("state") not in ("completed", None):
            account.corrupted.append(f"{name}answered, but its state is {told.state.get('state')}")
        else:
            account.completed += 1
    return account


def difference(text: str, expected: str) -> str:
    """Where two texts begin to differ."""
    shorter = min(len(text), len(expected))
    at = next((i for i in range(shorter) if text[i] != expected[i]), shorter)
    return f"differs at character {at}: {text[at : at + 40]!r} is not {expected[at : at + 40]!r}"


class Arrivals(Protocol):
    """A stream, whose events came at these times (`time.monotonic`)."""

    @property
    def arrivals_s(self) -> Sequence[float]: ...


def pause_s(strike: Strike, all_told: Sequence[Arrivals]) -> float | None:
    """The longest time that a stream in flight went without an event; None if none was in flight.

    A gap counts if it contains the fault, or if it began within `_FLUSHED_S` after the fault: bytes
    that were on their way when a process died still arrive, and the pause begins after them.
    """
    from_s = max(strike.from_s, strike.at_s)
    gaps = [
        (began_s, ended_s)
        for told in all_told
        if told.arrivals_s and told.arrivals_s[0] < strike.at_s < told.arrivals_s[-1]
        for began_s, ended_s in pairwise(told.arrivals_s)
        if began_s <= from_s + _FLUSHED_S and ended_s > strike.at_s
    ]
    waits = (max(0.0, ended_s - max(began_s, from_s)) for began_s, ended_s in gaps)
    return max(waits, default=None)


def table(account: Account, strikes: Sequence[Strike], all_told: Sequence[Told]) -> str:
    """The table that the terminal shows at the end."""
    lines = [
        "",
        f"{'fault':<23}{'struck':>8}{'in flight':>12}{'pause p50':>17}{'p95':>8}{'max':>8}  (s)",
    ]
    for name in dict.fromkeys(strike.name for strike in strikes):
        mine = [strike for strike in strikes if strike.name == name]
        waits = sorted(wait for strike in mine if (wait := pause_s(strike, all_told)) is not None)
        busy = sum(strike.in_flight > 0 for strike in mine)
        shown = f"{'-':>17}"
        if waits:
            shown = f"{statistics.median(waits):>17.2f}{p95(waits):>8.2f}{waits[-1]:>8.2f}"
        lines.append(f"{name:<23}{len(mine):>8}{busy:>12}{shown}")
    lines += [
        "",
        *summary(account),
        f"longest without a movement while Redis answered: {account.longest_still_s:.1f} s",
        f"lost {len(account.lost)}, duplicated {len(account.duplicated)}, corrupted "
        f"{len(account.corrupted)}, stood still for 15 s {len(account.stood_still)}",
        f"differences of ledger, journals and clients {len(account.misbooked)}",
        *damage(account),
    ]
    return "\n".join(lines)


def summary(account: Account) -> list[str]:
    several = sum(count for attempts, count in account.attempts.items() if attempts > 1)
    failed = ", ".join(f"{reason} {count}" for reason, count in account.failed.most_common())
    return [
        f"sent {account.sent}, completed {account.completed}, reconnected {account.reconnected}, "
        f"with two attempts or more {several}",
        f"failed by reason: {failed or 'none'}",
    ]


def damage(account: Account) -> list[str]:
    """A line for each request of which something is wrong, ten of each kind at most."""
    return [f"  {kind}: {item}" for kind in _DAMAGE for item in getattr(account, kind)[:10]]


def p95(values: Sequence[float]) -> float:
    """The 95th percentile of a sorted sequence (nearest rank)."""
    return values[max(0, -(-len(values) * 95 // 100) - 1)]
