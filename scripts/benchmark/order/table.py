"""The tables that `--order` prints."""

import math
from collections.abc import Sequence

from ..batching.summary import Spread
from .figures import BacklogRow, ShortRow, ratio_beside, spread_of
from .long_answers import LongAnswer

BACKLOG_HEADING = (
    f"{'round':>5}{'requests':>9}{'tok/s':>8}{'errors':>7}{'in engine: run':>15}{'wait p50':>9}"
    f"{'wait p99':>9}{'held back':>10}{'preempted':>10}{'per request':>12}{'KV p50':>7}"
    f"{'KV p10':>7}"
)
SHORT_HEADING = (
    f"{'round':>5}  {'short requests':<15}{'requests':>9}{'errors':>7}{'TTFT ms p50/p99':>19}"
    f"{'end-to-end ms p50/p99':>24}{'long s':>8}{'long gap s':>11}{'attempts':>10}"
    f"{'texts differ':>13}"
)


def backlog_line(row: BacklogRow) -> str:
    """One round."""
    return (
        f"{row.round:>5}{row.requests:>9}{row.tokens_per_s:>8.0f}{row.errors:>7}"
        f"{row.engine_running_p50:>15.0f}{row.engine_waiting_p50:>9.0f}{row.engine_waiting_p99:>9.1f}"
        f"{row.held_back_p50:>10.0f}{row.preemptions:>10.0f}{row.preemptions_per_request:>12.2%}"
        f"{row.kv_used_p50:>7.0%}{row.kv_used_p10:>7.0%}"
    )


def backlog_summary(rows: Sequence[BacklogRow]) -> str:
    """Medians of the rounds as Markdown."""
    found = {
        "waiting in the engine, median": _count(
            spread_of(rows, lambda row: row.engine_waiting_p50)
        ),
        "waiting in the engine, p99": _count(spread_of(rows, lambda row: row.engine_waiting_p99)),
        "preemptions per request": _percent(
            spread_of(rows, lambda row: row.preemptions_per_request), digits=2
        ),
        "preemptions per request, all rounds together": f"{_together(rows):.2%}",
        "KV cache used, median": _percent(spread_of(rows, lambda row: row.kv_used_p50)),
        "KV cache used, p10": _percent(spread_of(rows, lambda row: row.kv_used_p10)),
        "running in the engine": _count(spread_of(rows, lambda row: row.engine_running_p50)),
        "held back before the engine": _count(spread_of(rows, lambda row: row.held_back_p50)),
        "tokens/s of requests that ended": _count(spread_of(rows, lambda row: row.tokens_per_s)),
    }
    return _markdown(f"median of {len(rows)} rounds (lowest–highest)", found)


def short_line(row: ShortRow) -> str:
    """One turn, with what went wrong below it."""
    long_ones = (
        f"{row.long_s:>8.1f}{row.long_gap_s:>11.1f}{_attempts(row):>10}{row.texts_differ:>13}"
        if row.beside_long
        else ""
    )
    text = (
        f"{row.round:>5}  {'beside long' if row.beside_long else 'alone':<15}{row.requests:>9}"
        f"{row.errors:>7}{f'{row.ttft.p50_ms:,.0f} / {row.ttft.p99_ms:,.0f}':>19}"
        f"{f'{row.end_to_end.p50_ms:,.0f} / {row.end_to_end.p99_ms:,.0f}':>24}{long_ones}"
    )
    return "\n".join([text, *(f"      long: {error}" for error in row.long_errors)])


def short_summary(rows: Sequence[ShortRow], unbroken: Sequence[LongAnswer]) -> str:
    """Medians of the rounds as Markdown."""
    beside = [row for row in rows if row.beside_long]
    alone = [row for row in rows if not row.beside_long]
    texts = len(beside) * len(unbroken)
    alone_s = max(answer.took_s for answer in unbroken)
    found = {
        "p99 of the short alone, ms": _count(spread_of(alone, lambda row: row.end_to_end.p99_ms)),
        "p99 of the short beside long, ms": _count(
            spread_of(beside, lambda row: row.end_to_end.p99_ms)
        ),
        "p99 beside ÷ alone": _ratio(ratio_beside(rows, lambda row: row.end_to_end.p99_ms)),
        "p50 beside ÷ alone": _ratio(ratio_beside(rows, lambda row: row.end_to_end.p50_ms)),
        "p99 of TTFT beside ÷ alone": _ratio(ratio_beside(rows, lambda row: row.ttft.p99_ms)),
        "a long generation, s": f"{_seconds(spread_of(beside, lambda row: row.long_s))}; "
        f"{alone_s:.1f} with nothing beside it",
        "its longest pause, s": _seconds(spread_of(beside, lambda row: row.long_gap_s)),
        "attempts of a long generation": ", ".join(sorted({_attempts(row) for row in beside})),
        "long texts that are not the unbroken one": f"{sum(row.texts_differ for row in beside)} "
        f"of {texts}",
    }
    return _markdown(f"median of {len(beside)} rounds (lowest–highest)", found)


def _together(rows: Sequence[BacklogRow]) -> float:
    """A median would not show the one round in which many were preempted."""
    requests = sum(row.requests for row in rows)
    return sum(row.preemptions for row in rows) / requests if requests else math.nan


def _attempts(row: ShortRow) -> str:
    if not row.long_attempts:
        return "–"
    least, most = min(row.long_attempts), max(row.long_attempts)
    return str(least) if least == most else f"{least}–{most}"


def _markdown(heading: str, found: dict[str, str]) -> str:
    lines = [f"| | {heading} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in found.items())])


def _count(found: Spread) -> str:
    return f"{found.median:,.0f} ({found.low:,.0f}–{found.high:,.0f})"


def _seconds(found: Spread) -> str:
    return f"{found.median:.1f} ({found.low:.1f}–{found.high:.1f})"


def _percent(found: Spread, digits: int = 0) -> str:
    return f"{found.median:.{digits}%} ({found.low:.{digits}%}–{found.high:.{digits}%})"


def _ratio(found: Spread | None) -> str:
    return "–" if found is None else f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"
