"""The account of a run: what became of every request, and how soon the streams went on after each fault."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.disorder.traffic import Told


@dataclass
class Strike:
    """One fault. `seconds`: when, and from when on the service could go on (`time.monotonic`)."""

    name: str
    at_s: float
    from_s: float = 0.0
    in_flight: int = 0


@dataclass
class Account:
    """Counts; what was lost, duplicated, corrupted or stood still must be 0."""

    sent: int = 0
    completed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    reconnected: int = 0
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    corrupted: list[str] = field(default_factory=list)
    stood_still: list[str] = field(default_factory=list)
    longest_still_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether nothing happened that must never happen."""
        return not (self.lost or self.duplicated or self.corrupted or self.stood_still)


def settle(all_told: Sequence[Told], expected: Callable[[str, int], str]) -> Account:
    """What became of all requests.

    Args:
        expected: the unbroken text of a prompt and a number of tokens.
    """
    account = Account(sent=len(all_told))
    for told in all_told:
        name = f"{told.request_id or told.key}: "
        account.attempts[int(told.state.get("attempts") or 0)] += 1
        account.reconnected += bool(told.breaks)
        if told.wrong:
            (account.duplicated if _twice(told.wrong[0]) else account.lost).append(name + told.wrong[0])
        elif told.failure.startswith("client gave up") and told.accepted:
            account.lost.append(name + told.failure)
        elif told.failure:
            account.failed[told.failure.partition(":")[0]] += 1
        elif not told.done:
            account.lost.append(name + "never ended")
        elif told.text != expected(told.prompt, told.tokens):
            account.corrupted.append(f"{name}{difference(told.text, expected(told.prompt, told.tokens))}")
        elif told.state.get("state") not in ("completed", None):
            account.corrupted.append(f"{name}answered, but its state is {told.state.get('state')}")
        else:
            account.completed += 1
    return account


def _twice(wrong: str) -> bool:
    words = wrong.split()
    return int(words[1]) <= int(words[4])


def difference(text: str, expected: str) -> str:
    """Where two texts part."""
    at = next(
        (i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), min(len(text), len(expected))
    )
    return f"differs at character {at}: {text[at : at + 40]!r} is not {expected[at : at + 40]!r}"


def went_on_after_s(strike: Strike, all_told: Sequence[Told]) -> float | None:
    """The longest that a stream in flight waited for its next event; None where none was."""
    waits = []
    for told in all_told:
        arrivals = told.arrivals_s
        if arrivals and arrivals[0] < strike.at_s < arrivals[-1]:
            following = next(at for at in arrivals if at > max(strike.from_s, strike.at_s) or at == arrivals[-1])
            waits.append(max(0.0, following - max(strike.from_s, strike.at_s)))
    return max(waits, default=None)


def table(account: Account, strikes: Sequence[Strike], all_told: Sequence[Told]) -> str:
    """What the terminal shows in the end."""
    lines = ["", f"{'fault':<23}{'struck':>8}{'in flight':>12}{'next token p50':>17}{'p95':>8}{'max':>8}  (s)"]
    for name in dict.fromkeys(strike.name for strike in strikes):
        mine = [strike for strike in strikes if strike.name == name]
        waits = sorted(wait for strike in mine if (wait := went_on_after_s(strike, all_told)) is not None)
        busy = sum(strike.in_flight > 0 for strike in mine)
        shown = f"{statistics.median(waits):>17.2f}{p95(waits):>8.2f}{waits[-1]:>8.2f}" if waits else f"{'-':>17}"
        lines.append(f"{name:<23}{len(mine):>8}{busy:>12}{shown}")
    several = sum(count for attempts, count in account.attempts.items() if attempts > 1)
    failed = ", ".join(f"{reason} {count}" for reason, count in account.failed.most_common()) or "none"
    lines += [
        "",
        f"sent {account.sent}, completed {account.completed}, reconnected {account.reconnected}, "
        f"with two attempts or more {several}",
        f"failed by reason: {failed}",
        f"longest without a movement while Redis answered: {account.longest_still_s:.1f} s",
        f"lost {len(account.lost)}, duplicated {len(account.duplicated)}, corrupted {len(account.corrupted)}, "
        f"stood still for 15 s {len(account.stood_still)}",
    ]
    for kind in ("lost", "duplicated", "corrupted", "stood_still"):
        lines += [f"  {kind}: {item}" for item in getattr(account, kind)[:10]]
    return "\n".join(lines)


def p95(values: Sequence[float]) -> float:
    """Of a sorted sequence, the nearest rank."""
    return values[max(0, -(-len(values) * 95 // 100) - 1)]


def as_json(account: Account, strikes: Sequence[Strike], all_told: Sequence[Told]) -> dict[str, Any]:
    """Every figure of the table, and what it was made of."""
    return {
        "sent": account.sent,
        "completed": account.completed,
        "failed": dict(account.failed),
        "attempts": {str(number): count for number, count in sorted(account.attempts.items())},
        "reconnected": account.reconnected,
        "lost": account.lost,
        "duplicated": account.duplicated,
        "corrupted": account.corrupted,
        "stood_still": account.stood_still,
        "longest_still_s": account.longest_still_s,
        "strikes": [
            {"fault": s.name, "in_flight": s.in_flight, "next_token_s": went_on_after_s(s, all_told)} for s in strikes
        ],
    }
