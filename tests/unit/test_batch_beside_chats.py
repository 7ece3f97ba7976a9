"""A batch beside chats, in virtual time: it takes what they leave, and they hardly notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec

from scripts.benchmark.report import percentile
from scripts.simulation.engine_model import load_engine
from scripts.simulation.presets import BATCH, CHAT, capacity_per_s
from scripts.simulation.service import Cluster, Outcome, Source, VirtualService, simulate
from scripts.simulation.work import Record
from scripts.simulation.workloads import open_loop, poisson
from serve_app import timings
from serve_app.batches.runner import BatchRunner
from serve_app.loops import backoff

SLOTS, SECONDS, LOAD = 64, 60.0, 0.4
WARM_S = 10.0
"""Before that nobody knows how long answers are, and one chat of a kind at a time is let in."""
ENGINE = msgspec.structs.replace(load_engine("estimate-h100-llama-8b"), priority_scheduling=True)
CLUSTER = Cluster(ENGINE, 1, SLOTS, refuses=True)


class EndlessJob:
    """Has always another line; the runner feeds it as every job."""

    wants, refilling, deadline_ms = True, False, 0
    batch = SimpleNamespace(facts=SimpleNamespace(tenant="batch"))

    def __init__(self, service: VirtualService, runner: BatchRunner) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self._service, self._runner, self._rng = service, runner, random.Random(1)

    def begin(self) -> bool:
        line = asyncio.create_task(self._line())
        self.running.add(line)
        line.add_done_callback(self._over)
        return True

    async def _line(self) -> None:
        work, refusals = replace(BATCH, tenant="batch")(self._rng), 0
        while (await self._service.submit(work)).refused:
            refusals += 1
            await asyncio.sleep(backoff(timings.BATCH_REFUSED_S, refusals))

    def _over(self, line: asyncio.Task[None]) -> None:
        self.running.discard(line)
        self._runner._changed.set()


async def batch(service: VirtualService) -> None:
    nothing: Any = None
    runner = BatchRunner(nothing, nothing, lambda: True, lambda: SLOTS, 4_096)
    job: Any = EndlessJob(service, runner)
    runner.jobs["batch"] = job
    await runner._feed()


def run(*sources: Source) -> Outcome:
    return simulate(CLUSTER, sources, until_s=SECONDS)


def tokens(outcome: Outcome, request_class: str) -> int:
    return sum(one.tokens for one in outcome.records if one.work.request_class == request_class)


def p99(outcome: Outcome, measure: Callable[[Record], float]) -> float:
    """Of the chats."""
    answered = [one for one in outcome.records if one.answered and one.arrived_s >= WARM_S]
    chats = [one for one in answered if one.work.request_class == CHAT.request_class]
    return percentile([measure(one) for one in chats], 99)


def test_a_batch_takes_what_chats_leave_and_no_chat_waits_for_it() -> None:
    """A first token takes longer, because the engine's steps do."""
    rate_per_s = LOAD * capacity_per_s(CLUSTER, CHAT)

    def chats() -> Source:
        return open_loop(poisson(rate_per_s, SECONDS, "chats"), CHAT, "chats")

    without, beside, alone = run(chats()), run(chats(), batch), run(batch)
    ttft_s = [p99(outcome, lambda one: one.ttft_s) for outcome in (without, beside)]
    wait_s = p99(beside, lambda one: one.wait_s)
    used = tokens(beside, "batch") / (tokens(alone, "batch") * (1 - LOAD))
    print(f"\nttft_p99_ms={ttft_s[0] * 1e3:.1f} beside={ttft_s[1] * 1e3:.1f}", end=" ")
    print(f"ratio={ttft_s[1] / ttft_s[0]:.2f} wait_p99_ms={wait_s * 1e3:.1f} used={used:.3f}")
    assert wait_s <= 0.005
    assert ttft_s[1] <= 2.0 * ttft_s[0]
    assert used >= 0.9
