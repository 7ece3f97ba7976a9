"""What engines report travels with the workers' leases, and older versions do not notice."""

from __future__ import annotations

from itertools import count

from serve_app.cluster.leases import Membership
from serve_app.cluster.members import Members
from serve_app.contract import EngineReport, IngressLease, WorkerLease
from serve_app.redis.keyspace import engines_key, workers_key
from tests.journal.journal_helpers import World
from tests.waiting import eventually


async def test_ingresses_read_with_the_leases_what_each_engine_reports(
    w: World, namespace: str
) -> None:
    used = count(1)
    seen: list[Members] = []
    worker = Membership(w.redis, namespace)
    await worker.join_as_worker(
        "worker-1",
        lambda _: 8,
        lambda: EngineReport("worker-1", 4096, 512, next(used), 2, 1, 3),
    )
    ingress = Membership(w.redis, namespace, seen.append)
    await ingress.join_as_ingress(lambda: IngressLease("ingress-1"))
    await eventually(lambda: len({one.engines for one in seen}) > 2)
    assert all(len(one.engines) == 1 for one in seen), "the one before is gone"
    (report,) = seen[0].engines
    assert report._replace(used_tokens=0) == EngineReport("worker-1", 4096, 512, 0, 2, 1, 3)
    await worker.leave()
    await eventually(lambda: not seen[-1].engines)
    await ingress.leave()
    assert not await w.operator.exists(engines_key(namespace))


async def test_a_worker_of_an_older_version_reports_nothing_and_a_malformed_report_hides_no_other(
    w: World, namespace: str
) -> None:
    later_ms = 2**40 * 1000
    older = {WorkerLease("worker-0", 4).encode(): later_ms}
    await w.operator.zadd(workers_key(namespace), older)
    reports = {"worker-1|x": later_ms, "worker-2|96|32|0|0|0|0|of a later version": later_ms}
    await w.operator.zadd(engines_key(namespace), reports)
    seen: list[Members] = []
    ingress = Membership(w.redis, namespace, seen.append)
    await ingress.join_as_ingress(lambda: IngressLease("ingress-1"))
    await ingress.leave()
    assert seen[0].workers == (WorkerLease("worker-0", 4),)
    assert seen[0].engines == (EngineReport("worker-2", 96, 32),)
