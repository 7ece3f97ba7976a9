"""Two tenants want more than the engine can do, over HTTP at two ingresses: what each gets,
and how soon a refused client knows.

    python -m pytest -s tests/journal/test_shares_over_http.py
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.journal.in_process import (
    WORKER,
    Door,
    calling,
    door_of,
    ingress_process,
    settings_of,
    worker_process,
)
from tests.journal.test_tenant_policies import bearer, written
from tests.waiting import eventually

pytestmark = pytest.mark.clock

SLOTS, TOKENS, ENDED = 8, 20, 800
CLIENTS = 4 * SLOTS
"""Of each tenant: even one that gets most of the slots waits at both ingresses."""
ENGINE = {"kind": "simulated", "args": {"tokens_per_s": 100.0}}
PATH = "/v1/chat/completions"


@asynccontextmanager
async def two_doors(redis_url: str, namespace: str, **sections: Any) -> AsyncIterator[list[Door]]:
    """Two ingresses that share one worker."""
    sections |= {"engine": ENGINE, "workers": {"max_running_requests": SLOTS}}
    settings = settings_of(redis_url, namespace, **sections)
    async with AsyncExitStack() as stack:
        call = calling(await stack.enter_async_context(worker_process(settings)))
        doors = []
        for name in ("ingress-1", "ingress-2"):
            its = ingress_process(settings, call, [WORKER], name)
            ingress = await stack.enter_async_context(its)
            doors.append(await stack.enter_async_context(door_of(ingress)))
        await eventually(lambda: all(one.ingress.readiness.report()[0] for one in doors))
        yield doors


def chat(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "hermes-tiny", "messages": messages, "max_tokens": TOKENS}


@pytest.mark.parametrize("weight", [1, 4])
async def test_two_tenants_get_their_shares(
    redis_url: str, namespace: str, tmp_path: Path, weight: int
) -> None:
    auth = written(tmp_path, a={"weight": weight}, b={})
    done: Counter[str] = Counter()
    begun, enough = asyncio.Event(), asyncio.Event()

    async def client(door: Door, tenant: str) -> None:
        for turn in itertools.count():
            answer = await door.http.post(PATH, json=chat(f"{turn}"), headers=bearer(tenant))
            assert answer.status_code == 200, answer.text
            if begun.is_set():
                done[tenant] += 1
            elif turn == 3:
                begun.set()
            if sum(done.values()) >= ENDED:
                enough.set()

    async with two_doors(redis_url, namespace, auth=auth) as doors, asyncio.TaskGroup() as group:
        clients = [
            group.create_task(client(doors[number % 2], tenant))
            for tenant in "ab"
            for number in range(CLIENTS)
        ]
        await enough.wait()
        for one in clients:
            one.cancel()
    share = done["a"] / sum(done.values())
    print(f"\nshare={share:.3f} wanted={weight / (weight + 1):.3f} of={sum(done.values())}")
    assert abs(share - weight / (weight + 1)) <= 0.05


async def test_a_refusal_at_three_times_the_capacity_takes_milliseconds(
    redis_url: str, namespace: str
) -> None:
    """Clients in this process share its event loop, so the figure is an upper bound."""
    every_s = TOKENS / 100.0 / SLOTS / 3
    refused_ms, states = list[float](), Counter[int]()

    async def client(door: Door, number: int) -> None:
        began_s = time.perf_counter()
        headers = {"x-request-timeout-seconds": "5"}
        answer = await door.http.post(PATH, json=chat(f"{number}"), headers=headers)
        states[answer.status_code] += 1
        if answer.status_code in (429, 503):
            refused_ms.append((time.perf_counter() - began_s) * 1e3)
            assert float(answer.headers["retry-after-ms"]) > 0

    async with two_doors(redis_url, namespace) as doors, asyncio.TaskGroup() as group:
        begin_s = time.perf_counter()
        for number in range(2_400):
            group.create_task(client(doors[number % 2], number))
            await asyncio.sleep(max(0.0, begin_s + number * every_s - time.perf_counter()))
    refused_ms.sort()
    p50_ms, p99_ms = (refused_ms[int(part * len(refused_ms))] for part in (0.5, 0.99))
    print(f"\nrefused={len(refused_ms)} p50_ms={p50_ms:.1f} p99_ms={p99_ms:.1f} ", end="")
    print(f"statuses={dict(sorted(states.items()))}")
    assert len(refused_ms) > 500
    assert p50_ms <= 20.0, "the p99 is that of the machine, whose pauses the clients share"
