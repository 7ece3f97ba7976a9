"""One row of the table: one load on one system, with latencies, throughput and CPU by kind of
process.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .connection import Exchange
from .load import Generator, Load, LoadResult
from .processes import GENERATOR, Kind, Scope, cpu_by_kind, members, own_cpu_s, read_processes
from .prompts import RequestMaker
from .stats import percentile


@dataclass(frozen=True)
class Latency:
    """Two percentiles of a time, in milliseconds."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of_seconds(cls, values_s: Sequence[float]) -> "Latency":
        """Percentiles of times given in seconds."""
        return cls(
            round(percentile(values_s, 50) * 1e3, 3), round(percentile(values_s, 99) * 1e3, 3)
        )


@dataclass
class Row:
    """What one run measured. CPU covers the whole run, throughput the window in which load was kept
    up.
    """

    system: str
    load: str
    concurrency: int
    round: int
    max_tokens: int
    requests: int
    errors: int
    error_kinds: dict[str, int]
    tokens: int
    prompt_tokens: int
    wall_s: float
    requests_per_s: float
    tokens_per_s: float
    ttft: Latency
    inter_token: Latency
    end_to_end: Latency
    cpu_s: dict[Kind, float] = field(default_factory=dict)
    generator_share: float = 0.0
    others_cores: float = 0.0

    @property
    def server_cpu_s(self) -> float:
        """CPU seconds of the system, without the load generator's."""
        return sum(cpu_s for kind, cpu_s in self.cpu_s.items() if kind != GENERATOR)

    @property
    def cpu_per_token_us(self) -> float:
        """Microseconds of the system's CPU per generated token; NaN when nothing was generated."""
        return self.server_cpu_s / self.tokens * 1e6 if self.tokens else float("nan")


async def measure(
    system: str,
    maker: RequestMaker,
    load: Load,
    scope: Scope,
    others: Sequence[Scope],
    round_number: int,
) -> Row:
    """Put ``load`` on a system and describe what happened as a row."""
    before, own_before_s = read_processes(), own_cpu_s()
    result = await Generator(maker, load).run()
    after, generator_s = read_processes(), own_cpu_s() - own_before_s

    mine = members(after, scope, others)
    row = _describe(system, maker, load, result, round_number)
    row.cpu_s = cpu_by_kind(before, after, mine)
    strangers = (
        set().union(*(members(after, other) for other in others if not other.is_open)) - mine
    )
    row.others_cores = round(sum(cpu_by_kind(before, after, strangers).values()) / result.wall_s, 3)
    row.generator_share = round(generator_s / max(generator_s + row.server_cpu_s, 1e-9), 4)
    row.cpu_s[GENERATOR] = round(generator_s, 3)
    return row


def _describe(
    system: str, maker: RequestMaker, load: Load, result: LoadResult, round_number: int
) -> Row:
    shape = maker.shape
    for exchange in result.exchanges:
        if exchange.error is None and shape.ignore_eos and 0 < exchange.tokens < shape.max_tokens:
            exchange.error = f"short body: {exchange.tokens} of {shape.max_tokens} tokens"
        elif exchange.error is None and exchange.tokens == 0:
            exchange.error = "short body: no tokens"
    good = [exchange for exchange in result.exchanges if exchange.error is None]
    errors = Counter(exchange.error for exchange in result.exchanges if exchange.error is not None)
    tokens = sum(exchange.tokens for exchange in result.exchanges)
    tokens_per_s = _tokens_per_s(result, good, tokens, shape.stream)
    return Row(
        system=system,
        load=f"{load.rate_per_s:g}/s" if load.rate_per_s else str(load.concurrency),
        concurrency=load.concurrency,
        round=round_number,
        max_tokens=shape.max_tokens,
        requests=len(result.exchanges),
        errors=sum(errors.values()),
        error_kinds=dict(errors.most_common(5)),
        tokens=tokens,
        prompt_tokens=sum(exchange.prompt_tokens for exchange in good),
        wall_s=round(result.wall_s, 3),
        requests_per_s=round(tokens_per_s * len(good) / tokens, 3) if tokens else 0.0,
        tokens_per_s=round(tokens_per_s, 2),
        ttft=Latency.of_seconds(
            [e.first_token_s - e.started_s for e in good if e.first_token_s is not None]
        ),
        inter_token=Latency.of_seconds([gap_s for e in good for gap_s in e.gaps_s]),
        end_to_end=Latency.of_seconds(
            [e.finished_s - e.started_s for e in good if e.finished_s is not None]
        ),
    )


def _tokens_per_s(result: LoadResult, good: Sequence[Exchange], tokens: int, stream: bool) -> float:
    """Tokens per second while the load was kept up.

    Events in the window, weighted by the true number of tokens per event; without a stream there
    are no events, and the whole run with its tail has to do.
    """
    if not stream:
        return sum(exchange.tokens for exchange in good) / result.wall_s
    events = sum(exchange.events for exchange in result.exchanges)
    return result.window_events * (tokens / events) / result.window_s if events else 0.0
