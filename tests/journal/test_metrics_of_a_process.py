"""A real ingress and a real worker feed the metrics of the order of work and of their loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.loops import Loops
from serve_app.observability.metrics import Telemetry
from serve_app.observability.metrics_pages import Snapshots
from serve_app.redis.keyspace import metrics_key
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
from workers.journal_writer import JournalWriter

LATE = "hermes_event_loop_lag_seconds_count"


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


class Slow(Collector):
    """Says in which threads it was asked, and by how many at a time."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.inside = self.most = 0
        self.go_on = threading.Semaphore(0)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self.threads.append(threading.get_ident())
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.go_on.acquire(timeout=60)
        self.inside -= 1
        yield GaugeMetricFamily("slow", "", value=1)


async def test_the_loop_runs_while_a_page_is_made_and_one_is_made_at_a_time(
    w: World, namespace: str
) -> None:
    telemetry, slow, loops = Telemetry(), Slow(), Loops()
    telemetry.registry.register(slow)
    snapshots = Snapshots(w.link, namespace, "one", telemetry, 0.01, loops)
    await snapshots.start()
    asking = [asyncio.create_task(snapshots.pages([])) for _ in range(3)]
    for number in range(4):  # nothing else would let the collector go on
        await eventually(lambda number=number: len(slow.threads) > number)  # type: ignore[misc]
        slow.go_on.release()
    await eventually(lambda: w.redis.exists(metrics_key(namespace, "one")))
    slow.go_on.release(100)
    for page in await asyncio.gather(*asking):
        assert b"slow 1.0" in page["one"]
    await loops.stop()
    assert slow.most == 1
    assert threading.get_ident() not in slow.threads


async def test_requests_may_begin_and_end_while_a_page_asks_what_they_keep(w: World) -> None:
    writer = JournalWriter(w.settings)

    class Ends:
        @property
        def memory_bytes(self) -> int:
            writer._attempts.popitem()
            return 1

    many: Any = {str(number): SimpleNamespace(history=Ends()) for number in range(3)}
    writer._attempts = many
    assert writer.kept_bytes == 3
