"""One row of every table: what one run measured. How a system is got ready for that."""

import math
import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import uvloop

from .processes import GENERATOR, Kind, apart, cpu_by_kind, read_processes
from .report import Column, Latency, line, median
from .run import Exchange, Load, Ran, RequestMaker, Run, SystemFailed, one_exchange, put
from .systems import System


@dataclass
class Row:
    """Throughput and the mean numbers are those of the window, in which load was kept up; latencies
    and CPU those of the whole run. ``unfinished`` were never sent, or broken off: they count in the
    latencies with the time that they had waited by then, which is a lower bound.
    """

    name: str
    load: str
    round: int
    requests: int
    unfinished: int
    errors: int
    lost: int
    """Errors of streams that had begun."""
    error_kinds: dict[str, int]
    tokens: int
    requests_per_s: float
    tokens_per_s: float
    ttft: Latency
    inter_token: Latency
    end_to_end: Latency
    interactive: Latency
    in_flight: float
    slots: float
    busy: float
    waiting_p50: float
    preempted: float
    """Per request, of as many as the window's tokens make."""
    kv_used: float
    rss_mib: float = math.nan
    wall_s: float = math.nan
    cpu_s: dict[Kind, float] = field(default_factory=dict)
    generator_share: float = math.nan
    others_cores: float = math.nan
    long_s: float = math.nan
    """How long the slowest of the long generations beside it took."""
    lines_per_s: float = math.nan
    """Of batches, whose requests have ended meanwhile."""

    @property
    def slots_used(self) -> float:
        """Mean share of the batcher's slots in use; NaN for a batcher without a bound."""
        return self.in_flight / self.slots if self.slots else math.nan

    @property
    def server_cpu_s(self) -> float:
        """CPU seconds of the system, without the load generator's."""
        return sum(cpu_s for kind, cpu_s in self.cpu_s.items() if kind != GENERATOR)

    @property
    def cores(self) -> float:
        """Cores that the system used; NaN in virtual time."""
        return self.server_cpu_s / self.wall_s if self.cpu_s else math.nan

    @property
    def cpu_per_token_us(self) -> float:
        """Microseconds of the system's CPU per generated token; NaN when nothing was generated."""
        return self.server_cpu_s / self.tokens * 1e6 if self.tokens else math.nan

    @property
    def cpu_per_request_ms(self) -> float:
        """Milliseconds of the system's CPU per request; NaN when there was none."""
        return self.server_cpu_s / self.requests * 1e3 if self.requests else math.nan


Subject = TypeVar("Subject")
Measured = TypeVar("Measured")


OF_REQUESTS = (
    Column("requests", lambda row: row.requests),
    Column("errors", lambda row: row.errors),
    Column("TTFT p50 ms", lambda row: row.ttft.p50_ms, spread=True),
    Column("p99", lambda row: row.ttft.p99_ms, spread=True),
    Column("end-to-end p50 ms", lambda row: row.end_to_end.p50_ms, spread=True),
    Column("p99", lambda row: row.end_to_end.p99_ms, spread=True),
)
"""Of requests that have something beside them."""


def take_turns(
    columns: Sequence[Column],
    loads: Sequence[Load],
    rounds: int,
    subjects: Sequence[Subject],
    measure: Callable[[Subject, Load, int], Measured],
) -> list[Measured]:
    """For every load in every round one run of every subject, so that noise meets all alike; prints
    a line for each. The seed of a load tells rounds apart.
    """
    rows = []
    for load in loads:
        for number in range(1, rounds + 1):
            seeded = replace(load, seed=f"{load.seed}/{number}")
            for subject in subjects:
                rows.append(measure(subject, seeded, number))
                print(line(columns, rows[-1]), flush=True)
    return rows


async def measure(
    round_number: int, run: Run, system: System, others: Sequence[System] = (), name: str = ""
) -> Row:
    """Run to the end and describe what happened, with the CPU and the memory of the processes of
    ``system``, and the CPU of those of ``others`` meanwhile.
    """
    before, own_before_s = read_processes(), time.process_time()
    ran = await run.measure()
    after, generator_s = read_processes(), time.process_time() - own_before_s

    mine, strangers = apart(after, system.marks, [one.marks for one in others])
    row = describe(name or system.name, round_number, ran)
    row.rss_mib = round(sum(after[process].rss_bytes for process in mine) / 2**20, 1)
    row.cpu_s = cpu_by_kind(before, after, mine)
    row.others_cores = round(sum(cpu_by_kind(before, after, strangers).values()) / row.wall_s, 3)
    row.generator_share = round(generator_s / max(generator_s + row.server_cpu_s, 1e-9), 4)
    row.cpu_s[GENERATOR] = round(generator_s, 3)
    return row


def describe(name: str, round_number: int, ran: Ran) -> Row:
    """The row of a run, without what its processes used."""
    for one in ran.exchanges:
        wanted = one.job.output_tokens
        if one.ended.is_set() and not one.error and one.tokens != wanted:
            one.error = f"wrong length: {one.tokens} of {wanted} tokens"
    whole = [one for one in ran.exchanges if one.ended.is_set()]
    good = [one for one in whole if one.error is None]
    errors = Counter(one.error for one in whole if one.error is not None)
    events, tokens = (sum(getattr(one, what) for one in good) for what in ("events", "tokens"))
    # Events in the window, weighted by the number of tokens of an event.
    tokens_per_s = ran.window_events * (tokens / events if events else 1.0) / ran.window_s
    # From the tokens: a count of the answers that ended in the window would miss what those that
    # were under way at its end had got.
    lengths = [one.job.output_tokens for one in ran.exchanges]
    requests_per_s = tokens_per_s * len(lengths) / max(1, sum(lengths))
    readings = ran.readings
    running = [one.running for one in readings]
    preemptions = readings[-1].preemptions - readings[0].preemptions if readings else math.nan
    in_window = requests_per_s * ran.window_s
    return Row(
        name=name,
        load=ran.load.name,
        round=round_number,
        requests=len(ran.exchanges),
        unfinished=sum(not one.ended.is_set() for one in ran.exchanges),
        errors=sum(errors.values()),
        lost=sum(one.error is not None and one.events > 0 for one in whole),
        error_kinds=dict(errors.most_common(5)),
        tokens=sum(one.tokens for one in whole),
        requests_per_s=round(requests_per_s, 3),
        tokens_per_s=round(tokens_per_s, 2),
        ttft=Latency.of_seconds(
            [one.first_token_s - one.job.arrived_s for one in good if one.first_token_s is not None]
        ),
        inter_token=Latency.of_seconds([gap_s for one in good for gap_s in one.gaps_s]),
        end_to_end=_waits(ran, ran.exchanges),
        interactive=_waits(ran, [one for one in ran.exchanges if one.job.interactive]),
        in_flight=round(ran.in_flight, 3),
        slots=round(ran.slots, 3),
        busy=sum(map(bool, running)) / len(running) if running else math.nan,
        waiting_p50=median([one.waiting for one in readings]),
        preempted=preemptions / in_window if in_window else math.nan,
        kv_used=max((one.kv_used for one in readings), default=math.nan),
        wall_s=round(ran.ended_s - ran.started_s, 3),
    )


def _waits(ran: Ran, exchanges: Sequence[Exchange]) -> Latency:
    """Times to the end; of what is unfinished, how long it has waited."""
    return Latency.of_seconds(
        [
            ((one.finished_s or 0.0) if one.ended.is_set() else ran.ended_s) - one.job.arrived_s
            for one in exchanges
            if one.error is None
        ]
    )


def warm_up(options: Namespace, system: System, prompt_chars: int, users: int) -> None:
    """First requests pay for lazy imports, connections and kernels; nobody's row should."""
    maker = maker_for(options, system, prompt_chars, random.Random().randrange(2**31))
    load = Load(users=users, window_s=None)
    tokens = min(16, options.max_tokens)
    row = describe(system.name, 0, uvloop.run(put(maker, load, tokens, requests=2 * users)))
    if row.errors == row.requests:
        raise SystemFailed(f"{system.name}: every request of the warm-up failed: {row.error_kinds}")


def maker_for(options: Namespace, system: System, prompt_chars: int, seed: int) -> RequestMaker:
    """Makes requests for a system's own model."""
    embeddings = bool(options.embeddings)
    return RequestMaker(system.url, system.model, options.api_key, prompt_chars, seed, embeddings)


def wanted_chars(options: Namespace, system: System) -> int:
    """A prompt's length in characters that makes the wanted number of tokens."""

    async def tokens_of(chars: int) -> int:
        maker = maker_for(options, system, chars, options.seed)
        return (await one_exchange(maker, max_tokens=2)).prompt_tokens

    few, many = (uvloop.run(tokens_of(chars)) for chars in (100, 300))
    per_char = (many - few) / 200
    if per_char <= 0:
        # No usage in the answers: four characters a token is what English text has.
        return 4 * int(options.prompt_tokens)
    template_tokens = few - 100 * per_char
    return max(1, round((int(options.prompt_tokens) - template_tokens) / per_char))
