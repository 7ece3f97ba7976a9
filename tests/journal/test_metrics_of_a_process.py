"""A real ingress and a real worker feed the metrics of the order of work and of their loops."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from tests.journal.in_process import (
    WORKER,
    calling,
    door_of,
    ingress_process,
    settings_of,
    worker_process,
)
from tests.journal.ingresses import ended, serving
from tests.journal.journal_helpers import World
from tests.waiting import eventually

LATE = "hermes_loop_lag_seconds_count"


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


async def test_an_ingress_shows_what_it_claims_runs_and_keeps_waiting(w: World) -> None:
    async with serving(w, capacity=1) as (worker, ingress):
        registry = ingress.base.telemetry.registry
        worker.busy = {"first": asyncio.Event()}
        await w.admit("first", tenant="noisy")
        await eventually(lambda: worker.calls)
        for number in range(2):
            await w.admit(f"n{number}", tenant="noisy")
            await w.admit(f"q{number}", tenant="quiet")
        await eventually(lambda: value(registry, "hermes_slots_reserved") == 1)
        assert value(registry, "hermes_slots_allowed") == 1
        worker.busy["first"].set()
        await eventually(lambda: ended(w, "q1"))
        await eventually(lambda: value(registry, "hermes_slots_reserved") == 0)
        waits = "hermes_tenant_queue_wait_time_seconds_count"
        assert value(registry, waits, tenant="noisy") == 3
        assert value(registry, waits, tenant="quiet") == 2
        assert value(registry, "hermes_claim_requests_sum") == 5
        await eventually(lambda: value(registry, LATE))


async def test_a_worker_tells_serves_autoscaler_what_runs_and_what_waits_in_redis(
    redis_url: str, namespace: str
) -> None:
    args = {"faults": {"stay": "stay"}}
    settings = settings_of(
        redis_url,
        namespace,
        engine={"kind": "simulated", "args": args},
        workers={"max_running_requests": 2},
        order={"claim_ahead": 0.5},
    )
    async with (
        worker_process(settings) as worker,
        ingress_process(settings, calling(worker), [WORKER]) as ingress,
        door_of(ingress) as door,
    ):
        for number in range(9):
            door.posted(f"stay {number}")
        full = {"sequences": 9, "waiting": 7, "sequences_per_engine": 2}
        await eventually(lambda: worker.replica.load() == full)
        (lease,) = ingress.membership.members.ingresses
        assert lease.unclaimed, "or nothing waits in Redis"
        await door.close()
        await eventually(lambda: worker.replica.load()["sequences"] == 0)
        worker.replica._health.sick.set_result(None)
        assert worker.replica.load() == {}, "it reads the leases no more"
