"""The simulator starts what the service does: one seeded workload runs live (a real Redis,
dispatcher and worker, with the simulated engine) and in virtual time, in the same order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable

import msgspec
import pytest

from scripts.simulation.engines import EngineParameters, Timing
from scripts.simulation.service import Cluster, VirtualService
from scripts.simulation.virtual_time import run
from scripts.simulation.work import Work
from serve_app.contract import Answer
from serve_app.policy.classes import CLASSES
from tests.journal.in_process import in_process
from tests.journal.journal_helpers import World, world
from tests.waiting import eventually

# The live simulated engine has fixed rates: so has the model, whose memory is never full.
STEP_MS = 5.0
ENGINE = EngineParameters("e", Timing(step_ms=STEP_MS), num_gpu_blocks=1000)
SLOTS = 2
# The two that run first end at different times, and every answer takes a multiple of 0.3 s: two
# ends are so far apart that a busy machine does not change their order.
FIRST_TOKENS = (600, 630)
ANSWER_TOKENS = 60
WAITING = 18


def works(seed: int) -> list[Work]:
    """Two that take all slots, then others of all classes and three tenants."""
    rng = random.Random(seed)
    first = [Work(7, tokens, tenant="t") for tokens in FIRST_TOKENS]
    return first + [
        Work(
            7,
            ANSWER_TOKENS * rng.randint(1, 2),
            tenant=f"tenant-{rng.randrange(3)}",
            request_class=rng.choice(CLASSES),
        )
        for _ in range(WAITING)
    ]


def in_virtual_time(requests: list[Work]) -> list[str]:
    """The order in which they start."""

    async def main() -> list[str]:
        async with VirtualService(Cluster(ENGINE, 1, SLOTS)) as service:
            for work in requests:
                service.submit(work)
                await asyncio.sleep(0.004)
            await service.all_ended()
            return service.started

    return run(main())


async def admit(w: World, number: int, work: Work) -> None:
    """Accept a request as an ingress does."""
    messages = [{"role": "user", "content": f"{number}"}]
    body = {"messages": messages, "stream": True, "max_tokens": work.output_tokens}
    await w.admit(
        f"req_{number}",
        request_class=work.request_class,
        tenant=work.tenant,
        body=msgspec.json.encode(body),
    )


@pytest.mark.clock
async def test_live_and_simulated_requests_start_in_the_same_order(
    redis_url: str, namespace: str
) -> None:
    requests = works(seed=4)
    simulated = await asyncio.to_thread(in_virtual_time, requests)  # has a loop of its own
    assert simulated != sorted(simulated, key=lambda name: int(name[4:])), "by arrival alone"
    started: list[str] = []
    settings = {
        "engine": {"kind": "simulated", "args": {"tokens_per_s": 1e3 / STEP_MS}},
        "workers": {"max_running_requests": SLOTS},
    }

    async def noted(request_id: str, answer: Awaitable[Answer]) -> Answer:
        started.append(request_id)
        return await answer

    async def all_of(count: int) -> None:
        await eventually(lambda: len(started) == count)

    async with (
        world(redis_url, namespace, **settings) as w,
        in_process(w.settings, around=noted) as d,
    ):
        for number, work in enumerate(requests):
            await admit(w, number, work)
            if number < SLOTS:
                await all_of(number + 1)
        await all_of(len(requests))
        await eventually(lambda: not d.ingress.dispatcher.in_flight)
    assert started == simulated
