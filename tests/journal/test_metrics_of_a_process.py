"""A real ingress and a real worker feed the metrics of the order of work and of their loops."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tests.journal.in_process import in_process, settings_of
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


async def test_the_page_of_all_shows_how_many_requests_an_engine_runs_and_each_loop(
    redis_url: str, namespace: str
) -> None:
    settings = settings_of(redis_url, namespace)
    slots = settings.workers.max_running_requests
    expected = {
        ("hermes_engine_slots", "ingress-1"): 0,
        ("hermes_engine_slots", "worker-1"): slots,
        ("hermes_slots_allowed", "ingress-1"): slots,
    }

    async with in_process(settings) as d:

        async def shown() -> bool:
            families = text_string_to_metric_families((await d.ingress.metrics.read()).decode())
            samples = [sample for family in families for sample in family.samples]
            found = {(s.name, s.labels.get("replica", "")): s.value for s in samples}
            late = {name for name in ("ingress-1", "worker-1") if found.get((LATE, name))}
            return len(late) == 2 and expected.items() <= found.items()

        await eventually(shown)
