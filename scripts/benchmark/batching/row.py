"""One row: one batcher under one load in one round."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..measurement import Latency
from .engine_gauges import EngineGauges
from .run import Pressure, Ran, Served


@dataclass
class BatchRow:
    """What one run measured. ``unfinished`` were never sent, or broken off after the window: they
    count in the latencies with the time that they had waited by then, which is a lower bound.
    """

    batcher: str
    load: str
    round: int
    requests: int
    unfinished: int
    errors: int
    error_kinds: dict[str, int]
    requests_per_s: float
    tokens_per_s: float
    end_to_end: Latency
    interactive: Latency
    batch: Latency
    in_flight: float
    slots: float
    engine_running: float
    engine_waiting: float
    kv_used: float
    rss_mib: float
    cores: float
    loop_share: float
    turns_per_s: float
    turn_us: float

    @property
    def occupancy(self) -> float:
        """Mean share of the batcher's slots in use; NaN for a batcher without a bound."""
        return self.in_flight / self.slots if self.slots else float("nan")

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens for each second of CPU that the server got; where others use the machine, this
        says more than tokens/s. 0 if it got none.
        """
        return self.tokens_per_s / self.cores if self.cores else 0.0


def describe(
    batcher: str, pressure: Pressure, round_number: int, ran: Ran, gauges: EngineGauges, rss: int
) -> BatchRow:
    """The row of a run; ``rss`` is the memory of the server's processes in bytes."""
    for one in ran.served:
        _check_length(one)
    good = [one for one in ran.served if one.ended and _error(one) is None]
    errors = Counter(error for one in ran.served if one.ended and (error := _error(one)))
    tokens_per_s = _tokens_per_s(ran, good)
    return BatchRow(
        batcher=batcher,
        load=pressure.name,
        round=round_number,
        requests=len(ran.served),
        unfinished=sum(not one.ended for one in ran.served),
        errors=sum(errors.values()),
        error_kinds=dict(errors.most_common(5)),
        requests_per_s=round(_requests_per_s(tokens_per_s, ran.served), 3),
        tokens_per_s=round(tokens_per_s, 2),
        end_to_end=_latency(ran, ran.served),
        interactive=_latency(ran, [one for one in ran.served if one.job.interactive]),
        batch=_latency(ran, [one for one in ran.served if not one.job.interactive]),
        in_flight=round(ran.in_flight, 3),
        slots=round(ran.slots, 3),
        engine_running=gauges.most_running,
        engine_waiting=gauges.most_waiting,
        kv_used=round(gauges.most_kv_used, 4),
        rss_mib=round(rss / 2**20, 1),
        cores=round(ran.server_cpu_s / ran.window_s, 3),
        loop_share=round(ran.loop_share, 4),
        turns_per_s=round(ran.turns / ran.window_s, 1),
        turn_us=round(ran.turn_s / max(1, ran.turns) * 1e6, 2),
    )


def _error(one: Served) -> str | None:
    return one.exchange.error if one.exchange is not None else None


def _check_length(one: Served) -> None:
    exchange, wanted = one.exchange, one.job.output_tokens
    if exchange is not None and one.ended and not exchange.error and exchange.tokens != wanted:
        exchange.error = f"wrong length: {exchange.tokens} of {wanted} tokens"


def _tokens_per_s(ran: Ran, good: Sequence[Served]) -> float:
    """Events in the window, weighted by the number of tokens of an event."""
    whole = [one.exchange for one in good if one.exchange is not None]
    events = sum(exchange.events for exchange in whole)
    tokens = sum(exchange.tokens for exchange in whole)
    return ran.window_events * tokens / events / ran.window_s if events else 0.0


def _requests_per_s(tokens_per_s: float, served: Sequence[Served]) -> float:
    """From the tokens: a count of the answers that ended in the window would miss what those that
    were under way at its end had got.
    """
    lengths = [one.job.output_tokens for one in served]
    return tokens_per_s * len(lengths) / sum(lengths) if lengths else 0.0


def _latency(ran: Ran, served: Sequence[Served]) -> Latency:
    times_s: list[float] = []
    for one in served:
        exchange = one.exchange
        if exchange is not None and one.ended and exchange.finished_s is not None:
            if exchange.error is None:
                times_s.append(exchange.finished_s - one.job.arrived_s)
        else:
            times_s.append(ran.ended_s - one.job.arrived_s)
    return Latency.of_seconds(times_s)
