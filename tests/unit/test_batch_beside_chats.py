"""A batch beside chats, in virtual time: it takes what they leave, and they hardly notice."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from scripts.benchmark.report import percentile
from scripts.simulation.engine_model import EngineParameters, load_engine
from scripts.simulation.presets import BATCH, CHAT, capacity_per_s
from scripts.simulation.service import Cluster, Outcome, Source, VirtualService, simulate
from scripts.simulation.work import Record
from scripts.simulation.workloads import Kind, Lengths, open_loop, poisson
from serve_app import timings
from serve_app.batches.runner import BatchRunner
from serve_app.loops import backoff

SECONDS = 60.0


def on_gpu(name: str) -> EngineParameters:
    """As vLLM works there for our workers."""
    return msgspec.structs.replace(
        load_engine(name), priority_scheduling=True, async_scheduling=True
    )


H100 = on_gpu("estimate-h100-llama-8b")


@dataclass(frozen=True)
class Case:
    """Chats and a batch on one engine."""

    engine: EngineParameters = H100
    slots: int = 64
    load: float = 0.4
    """Of the chats."""
    lines: Kind = BATCH
    warm_s: float = 10.0
    """Before that nobody knows how long answers are, and one chat of a kind at a time is let in."""


class EndlessJob:
    """Has always another line; the runner feeds it as every job."""

    wants, refilling, deadline_ms = True, False, 0
    batch = SimpleNamespace(facts=SimpleNamespace(tenant="batch"))

    def __init__(self, service: VirtualService, runner: BatchRunner, lines: Kind) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self._service, self._runner = service, runner
        self._lines, self._rng = replace(lines, tenant="batch"), random.Random(1)

    def begin(self) -> bool:
        line = asyncio.create_task(self._line())
        self.running.add(line)
        line.add_done_callback(self._over)
        return True

    async def _line(self) -> None:
        work, refusals = self._lines(self._rng), 0
        while (await self._service.submit(work)).refused:
            refusals += 1
            await asyncio.sleep(backoff(timings.BATCH_REFUSED_S, refusals))

    def _over(self, line: asyncio.Task[None]) -> None:
        self.running.discard(line)
        self._runner._changed.set()


@dataclass(frozen=True)
class Found:
    """TTFT and waits of the chats beside the batch; TTFT also without it."""

    without_ttft_s: list[float]
    ttft_s: list[float]
    wait_s: list[float]
    used: float
    """Tokens of the batch, of what it makes in the part of the time that chats leave."""

    def times(self, percent: float) -> float:
        return percentile(self.ttft_s, percent) / percentile(self.without_ttft_s, percent)

    def __str__(self) -> str:
        each = [self.without_ttft_s, self.ttft_s, self.wait_s]
        p50, p99 = [" ".join(f"{percentile(of, at) * 1e3:.0f}" for of in each) for at in (50, 99)]
        ratios = f"{self.times(50):.2f} {self.times(99):.2f}"
        return f"ttft_ms, beside, wait_ms: p50={p50} p99={p99} times={ratios} used={self.used:.2f}"


def measured(case: Case) -> Found:
    cluster = Cluster(case.engine, 1, case.slots, refuses=True)
    rate_per_s = case.load * capacity_per_s(cluster, CHAT)

    def chats() -> Source:
        return open_loop(poisson(rate_per_s, SECONDS, "chats"), CHAT, "chats")

    async def batch(service: VirtualService) -> None:
        nothing: Any = None
        runner = BatchRunner(nothing, nothing, lambda: True, lambda: case.slots, 4_096)
        job: Any = EndlessJob(service, runner, case.lines)
        runner.jobs["batch"] = job
        await runner._feed()

    def run(*sources: Source) -> Outcome:
        return simulate(cluster, sources, until_s=SECONDS)

    def of_chats(outcome: Outcome) -> list[Record]:
        answered = [one for one in outcome.records if one.answered]
        late = [one for one in answered if one.arrived_s >= case.warm_s]
        return [one for one in late if one.work.request_class == CHAT.request_class]

    def tokens(outcome: Outcome) -> int:
        return sum(one.tokens for one in outcome.records if one.work.request_class == "batch")

    without, beside, alone = run(chats()), run(chats(), batch), run(batch)
    found = of_chats(beside)
    return Found(
        [one.ttft_s for one in of_chats(without)],
        [one.ttft_s for one in found],
        [one.wait_s for one in found],
        tokens(beside) / (tokens(alone) * (1 - case.load)),
    )


def test_a_batch_takes_what_chats_leave_and_no_chat_waits_for_it() -> None:
    """A first token takes longer, because the engine's steps do."""
    found = measured(Case())
    print(f"\n{found}")
    assert percentile(found.wait_s, 99) <= 0.005
    assert found.times(99) <= 2.0
    assert found.used >= 0.9


SHORT, LONG = Lengths(100, 1.8, 400), Lengths(3_000, 1.8, 12_000)
CASES = {
    "load 0.2": Case(load=0.2),
    "load 0.6": Case(load=0.6),
    "32 slots": Case(slots=32),
    "128 slots": Case(slots=128),
    "A100": Case(on_gpu("estimate-a100-llama-8b")),
    "70B": Case(on_gpu("estimate-4xh100-llama-70b")),
    "1,024 tokens in a step": Case(msgspec.structs.replace(H100, max_num_batched_tokens=1_024)),
    "short lines": Case(lines=replace(BATCH, prompt=SHORT)),
    # All of its lines begin at once, and their prompts take seven seconds.
    "long lines": Case(lines=replace(BATCH, prompt=LONG), warm_s=25.0),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_half_of_the_chats_hardly_notice_a_batch(name: str) -> None:
    found = measured(CASES[name])
    print(f"\n{name}: {found}")
    assert found.times(50) <= 2.5
    assert found.used >= 0.85
