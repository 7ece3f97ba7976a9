"""Works on the batches of a model, in the one ingress that holds the lease for it, and ends those
of models that nobody serves any more: at their deadlines, or when they are cancelled.

Lines of several batches share a bounded number of places in the queue. The tenant with the fewest
lines there gets the next place; of its batches, the one whose deadline comes first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter

from serve_app import timings
from serve_app.batches.job import BatchParts, Job
from serve_app.batches.leading import Deposed
from serve_app.batches.progress import Progress, shown
from serve_app.batches.record import Batch
from serve_app.batches.segments import FOLDER
from serve_app.errors import RedisUnavailable
from serve_app.files.storage import StorageUnavailable
from serve_app.loops import Loops, backoff, jittered
from serve_app.observability.logs import Outage

log = logging.getLogger("hermes.batches")

_LEAST_IN_FLIGHT = 16
"""Also while no engine runs: what waits makes one start."""
_JOBS_A_SECOND = 50_000
"""That are looked at for the next line, however many there are."""
_JOBS_SHOWN, _SHOWN_A_SECOND = 100, 1_000
"""Whose progress is looked at without a pause, in some 3 ms, and in each second."""


@dataclass(eq=False)
class BatchRunner:
    """Tries to get the lease, and works on all batches while it has it.

    Args:
        may_lead: whether this ingress answers new requests.
        slots: how many sequences the engines may run now.
        unserved: models that nobody serves.
    """

    parts: BatchParts
    loops: Loops
    may_lead: Callable[[], bool]
    slots: Callable[[], int]
    most_in_flight: int
    unserved: Callable[[], Iterable[str]] = tuple
    jobs: dict[str, Job] = field(default_factory=dict)
    """By the id of the batch."""

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = self.loops.keep("batches", self._run)

    async def stop(self) -> None:
        """Stop working; another ingress goes on at once."""
        if self._task is not None:
            await self.loops.end(self._task)
        await self.parts.leading.stop()

    async def _run(self) -> None:
        outage = Outage(log, "batches: cannot get the lease")
        leading = self.parts.leading
        while True:
            try:
                if self.may_lead() and await leading.lead():
                    outage.over()
                    await self.lead()
            except RedisUnavailable as error:
                outage.failed(error)
            except Deposed as error:
                log.info("%s", error)
            await asyncio.sleep(jittered(timings.BATCH_RENEW_S))

    async def lead(self) -> None:
        """Work on all batches while the lease lasts; raises `Deposed` then."""
        log.info("batches: this ingress leads")
        deposed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew())
                tasks.create_task(self._feed())
                tasks.create_task(self._show())
                tasks.create_task(self._sweep())
                await self._listen(tasks)
        except* Deposed as errors:
            deposed = errors.exceptions[0]
        finally:
            self.jobs.clear()
            self.parts.telemetry.clear()
            with suppress(RedisUnavailable):
                await self.parts.leading.resign()
        raise Deposed(str(deposed))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(timings.BATCH_RENEW_S)
            with suppress(RedisUnavailable):  # every step looks whether the lease lasts
                if not self.may_lead() or not await self.parts.leading.lead(self.unserved()):
                    raise Deposed("batches: another ingress leads")

    # -- which batches there are ------------------------------------------------------------------

    async def _listen(self, tasks: asyncio.TaskGroup) -> None:
        """Begin jobs for all batches that are not over, and for new ones as soon as they come."""
        leading, look_s = self.parts.leading, self.parts.clock.local.monotonic_s
        outage, looked_s = Outage(log, "batches: cannot read the news"), None
        while True:
            try:
                if looked_s is None or look_s() - looked_s > timings.BATCH_LOOK_S:
                    async for page in leading.open():
                        self._know(tasks, page)
                    looked_s = look_s()
                if ids := await leading.news(timings.BATCH_TICK_S):
                    self._know(tasks, await leading.read(ids))
                outage.over()
            except RedisUnavailable as error:
                outage.failed(error)
                looked_s = None
                await asyncio.sleep(backoff(timings.BATCH_RETRY_S, 1))

    def _know(self, tasks: asyncio.TaskGroup, batches: list[Batch]) -> None:
        mine, now_ms = self.parts.leading.model, self.parts.clock.now_ms()
        for batch in batches:
            if batch.state.over or (batch.facts.model != mine and not batch.ends(now_ms)):
                continue  # its model may be served again
            job = self.jobs.get(batch.facts.id)
            if job is not None:
                job.told(batch)
                continue
            job = self.jobs[batch.facts.id] = Job(self.parts, batch, self._changed.set)
            tasks.create_task(self._work(job), name=batch.facts.id)

    async def _work(self, job: Job) -> None:
        try:
            await job.run()
        except (Deposed, asyncio.CancelledError):
            raise
        except Exception:  # a defect of ours harms no other batch; the next look begins it again
            log.exception("batch %s fails, and begins again", job.batch.facts.id)
            await asyncio.sleep(timings.BATCH_RETRY_S[-1])
        del self.jobs[job.batch.facts.id]

    # -- which line begins next -------------------------------------------------------------------

    @property
    def most(self) -> int:
        """Lines that may wait or run now: twice what the engines run, so that none of them ever
        waits for a line.
        """
        return min(max(_LEAST_IN_FLIGHT, 2 * self.slots()), self.most_in_flight)

    async def _feed(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(timings.BATCH_TICK_S):
                    await self._changed.wait()
            self._changed.clear()
            self.feed()
            await asyncio.sleep(len(self.jobs) / _JOBS_A_SECOND)

    def feed(self) -> None:
        """Begin as many lines as there are places."""
        running, wanting = Counter[str](), defaultdict[str, list[Job]](list)
        for job in sorted(self.jobs.values(), key=attrgetter("deadline_ms"), reverse=True):
            running[job.batch.facts.tenant] += len(job.running)
            if job.wants or job.refilling:
                wanting[job.batch.facts.tenant].append(job)
        free = self.most - running.total()
        turns = [(running[tenant], tenant) for tenant in wanting]
        heapify(turns)
        while free > 0 and turns:
            many, tenant = heappop(turns)
            jobs = wanting[tenant]
            if not jobs[-1].wants:
                break  # its lines are being read: the place is its own
            begun = jobs[-1].begin()
            free -= begun
            if not (jobs[-1].wants or jobs[-1].refilling):
                jobs.pop()
            if jobs:
                heappush(turns, (many + begun, tenant))

    # -- metrics ----------------------------------------------------------------------------------

    async def _show(self) -> None:
        while True:
            found = list[Progress]()
            for number, job in enumerate(list(self.jobs.values()), 1):
                progress = job.progress()
                found += [progress] if progress is not None else []
                if number % _JOBS_SHOWN == 0:
                    await asyncio.sleep(0)
            self.parts.telemetry.show(*shown(found))
            await asyncio.sleep(timings.BATCH_SHOW_S + len(found) / _SHOWN_A_SECOND)

    # -- rubbish ----------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Delete what is needed no more, or was written too late."""
        while True:
            await asyncio.sleep(jittered(timings.BATCH_RUBBISH_S))
            with suppress(RedisUnavailable, StorageUnavailable):
                await self.sweep()

    async def sweep(self) -> None:
        """Delete the segments of batches that ended a day ago: until then Redis may lose an end,
        which is made again of them. Others may be of another model.
        """
        before_s = self.parts.clock.now_s() - timings.UNKNOWN_OBJECT_S
        found = [path async for path in self.parts.storage.under(FOLDER, before_s)]
        ids = {path.split("/")[1] for path in found}
        kept = await self.parts.leading.over_since(sorted(ids), int(before_s * 1000))
        rubbish = [path for path in found if path.split("/")[1] not in kept]
        await self.parts.storage.delete(rubbish)
