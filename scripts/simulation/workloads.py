"""Work over time, equal for equal seeds: arrivals, users who wait for answers, conversations, and a
public trace.
"""

import asyncio
import csv
import math
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from serve_app.errors import SettingsError

from .service import Source, VirtualService
from .work import Work

_ROOT = Path(__file__).resolve().parents[2]
_LONGEST_TALK_TOKENS = 3500
_THINK_S = 10.0

Make = Callable[[random.Random], Work]


@dataclass(frozen=True)
class Lengths:
    """Log-normal numbers of tokens: half are below `median`, a sixth above `median * spread`."""

    median: float
    spread: float = 2.0
    most: int = 100_000

    def draw(self, rng: random.Random) -> int:
        drawn = rng.lognormvariate(math.log(self.median), math.log(self.spread))
        return max(1, min(self.most, round(drawn)))


@dataclass(frozen=True)
class Kind:
    """Requests of one kind."""

    prompt: Lengths
    output: Lengths
    request_class: str = "standard"
    tenant: str = "tenant-0"
    name: str = ""
    """What shows of it, beside its prompt, before it is computed."""
    sequences: int = 1
    within_s: float = 3_600.0

    def __call__(self, rng: random.Random) -> Work:
        output = self.output.draw(rng)
        return Work(
            self.prompt.draw(rng),
            output,
            tenant=self.tenant,
            request_class=self.request_class,
            kind=self.name,
            sequences=self.sequences,
            within_s=self.within_s,
        )


def mixed(*kinds: tuple[float, Make]) -> Make:
    weights = [weight for weight, _ in kinds]
    return lambda rng: rng.choices(kinds, weights)[0][1](rng)


def poisson(rate_per_s: float, duration_s: float, seed: str) -> list[float]:
    return bursts(rate_per_s, 1.0, duration_s, seed)


def bursts(rate_per_s: float, cv: float, duration_s: float, seed: str) -> list[float]:
    """Arrivals with Gamma-distributed times between them.

    Args:
        cv: coefficient of variation of those times: 1 is Poisson, more comes in bursts.
    """
    rng = random.Random(seed)
    shape = 1 / (cv * cv)
    arrivals_s: list[float] = []
    now_s = rng.gammavariate(shape, 1 / (rate_per_s * shape))
    while now_s < duration_s:
        arrivals_s.append(now_s)
        now_s += rng.gammavariate(shape, 1 / (rate_per_s * shape))
    return arrivals_s


def open_loop(arrivals_s: Iterable[float], make: Make, seed: str) -> Source:
    """Clients who do not wait for each other."""

    rng = random.Random(seed)
    return schedule([(arrival_s, make(rng)) for arrival_s in arrivals_s])


def obedient(arrivals_s: Iterable[float], make: Make, seed: str) -> Source:
    """Clients who send a request that was refused again, once and when they were told to."""
    rng = random.Random(seed)
    timed = [(arrival_s, make(rng)) for arrival_s in arrivals_s]

    async def client(service: VirtualService, work: Work) -> None:
        first = await service.submit(work)
        if first.retry_after_s is not None:
            await asyncio.sleep(first.retry_after_s)
            await service.submit(first.work, first)

    async def source(service: VirtualService) -> None:
        async with asyncio.TaskGroup() as group:
            for arrival_s, work in timed:
                await asyncio.sleep(max(0.0, arrival_s - service.now_s))
                group.create_task(client(service, work))

    return source


def schedule(timed: Iterable[tuple[float, Work]]) -> Source:
    """Each work at its time."""

    async def source(service: VirtualService) -> None:
        for arrival_s, work in timed:
            if arrival_s > service.now_s:
                await asyncio.sleep(arrival_s - service.now_s)
            service.submit(work)

    return source


def closed_loop(users: int, make: Make, duration_s: float, seed: str) -> Source:
    """Users who send their next request after the answer to the last."""

    async def user(service: VirtualService, number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        while service.now_s < duration_s:
            await service.submit(make(rng))

    async def source(service: VirtualService) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(service, number))

    return source


def conversations(begins_s: Iterable[float], seed: str) -> Source:
    """Conversations of four tenants that begin at given times: each turn's prompt is all that was
    said before, and something new, some seconds after the answer to the turn before it.
    """
    turns, question, reply = Lengths(5, 1.6), Lengths(120, 2.0), Lengths(150, 1.8)

    async def speak(service: VirtualService, number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        tenant, session, base = f"tenant-{rng.randrange(4)}", f"{seed}-{number}", (number + 1) << 32
        said = 0
        for _ in range(turns.draw(rng)):
            prompt, answer = said + question.draw(rng), reply.draw(rng)
            said = prompt + answer
            if said > _LONGEST_TALK_TOKENS:
                return
            await service.submit(Work(prompt, answer, tenant, session, base=base))
            await asyncio.sleep(rng.expovariate(1 / _THINK_S))

    async def source(service: VirtualService) -> None:
        async with asyncio.TaskGroup() as group:
            for number, begin_s in enumerate(begins_s):
                await asyncio.sleep(max(0.0, begin_s - service.now_s))
                group.create_task(speak(service, number))

    return source


def azure(seed: int, count: int, most_tokens: int) -> list[tuple[float, Work]]:
    """Arrivals and lengths of so many requests in a row of Azure's conversation trace of 2023, from
    a place that the seed chooses. Those with more than `most_tokens` are left out. The trace lies
    in `$HERMES_DATA/traces` and is never copied into the project.

    Raises:
        SettingsError: the trace is not there.
    """
    folder = Path(os.environ.get("HERMES_DATA", _ROOT / ".hermes" / "data"))
    path = folder / "traces" / "azure2023_conv.csv"
    if not path.exists():
        raise SettingsError(f"{path} is absent: scripts/fetch-data brings it (or set HERMES_DATA)")
    timed = []
    with path.open() as file:
        for row in csv.DictReader(file):
            # Seven digits, of which Python reads six.
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            if prompt + output <= most_tokens:
                timed.append((at_s, Work(max(1, prompt), max(1, output))))
    first = random.Random(f"{seed}/azure").randrange(max(1, len(timed) - count))
    part = timed[first : first + count]
    return [(at_s - part[0][0], work) for at_s, work in part]
