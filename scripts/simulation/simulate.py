"""Runs one workload on one cluster under one policy."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from . import virtual_time
from .service import Cluster, Outcome, VirtualService
from .workloads import Source


@dataclass(frozen=True)
class Fault:
    """What happens to an engine."""

    kind: str
    """`stop` or `hang`."""
    at_s: float
    engine: int = 0
    back_after_s: float = 30.0


def simulate(
    cluster: Cluster,
    sources: Sequence[Source],
    policy: str = "hermes",
    until_s: float | None = None,
    faults: Sequence[Fault] = (),
) -> Outcome:
    """Run until all work has ended, or until `until_s`; what waits or runs then stays open."""
    began_s = time.perf_counter()

    async def work(service: VirtualService) -> None:
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(_as_coroutine(source, service))
        await service.all_ended()

    async def main() -> Outcome:
        async with VirtualService(cluster, policy) as service:
            striking = [asyncio.create_task(_strike(service, fault)) for fault in faults]
            with suppress(TimeoutError):
                async with asyncio.timeout(until_s):
                    await work(service)
            for task in striking:
                task.cancel()
        return service.outcome(time.perf_counter() - began_s)

    return virtual_time.run(main())


async def _as_coroutine(source: Source, service: VirtualService) -> None:
    await source(service)


async def _strike(service: VirtualService, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    await service.fault(fault.kind, fault.engine, fault.back_after_s)
