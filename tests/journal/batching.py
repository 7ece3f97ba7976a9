"""Batches at a real ingress, on a real Redis, with a folder and a worker that answers at once or on
the test's command.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from serve_app.batches.check import Checks
from serve_app.batches.job import BatchParts
from serve_app.batches.leading import Leading
from serve_app.batches.line_requests import LineRequests
from serve_app.batches.record import Batch, Batches, BatchFacts, BatchState, new_batch_id
from serve_app.batches.runner import BatchRunner
from serve_app.cluster.leases import Membership
from serve_app.contract import (
    CHATS,
    AttemptResult,
    CallResult,
    CompletionStats,
    Reason,
    State,
    WorkerLost,
)
from serve_app.errors import Fenced, RedisUnavailable
from serve_app.files.files import File, Files
from serve_app.files.storage import Storage
from serve_app.journal.entries import Head, RequestFacts, Summary, decode_facts
from serve_app.journal.usage import Usage
from serve_app.loops import ended
from serve_app.observability.ingress_metrics import BatchTelemetry
from serve_app.policy.tenant_limits import NO_LIMITS, Limits
from serve_app.policy.tenants import Tenant
from serve_app.processes import IngressProcess
from serve_app.redis.keyspace import batch_leader_key
from serve_app.redis.link import RedisLink
from tests.journal.in_process import ingress_process
from tests.journal.journal_helpers import OPENED, World
from tests.waiting import eventually
from workers.journal_writer import JournalWriter

REPLICA = OPENED.replica
STILL: dict[str, Any] = {"ingress": {"disconnect_grace_s": 1e6, "lost_reader_grace_s": 0}}
"""Nobody cancels what a killed leader has submitted: it is dead."""
JSON = Head(200, [("content-type", "application/json")])
_of_a_leader: ContextVar[Knife | None] = ContextVar("of_a_leader", default=None)


class LineWorker:
    """Answers each line with its own prompt, once."""

    def __init__(self, w: World, writer: JournalWriter) -> None:
        self._w, self._writer = w, writer
        self.calls: list[tuple[str, int]] = []
        self.prompts: list[str] = []
        """Of the requests that were computed to their end."""
        self.begun: list[str] = []
        """Of those that were begun."""
        self.held: dict[str, asyncio.Event] = {}
        """Prompts that are answered only after their event is set."""
        self.fails: dict[str, Reason] = {}
        """Prompts whose next request fails."""
        self.deadly: set[str] = set()
        """Prompts with whose next request the worker dies."""

    async def execute(self, request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
        """See `WorkerReplica.execute`."""
        self.calls.append((request_id, epoch))
        try:
            nonce = secrets.token_bytes(8)
            attempt, entries = await self._writer.open(request_id, epoch, nonce, OPENED)
        except Fenced:
            return AttemptResult(CallResult.FENCED)
        body = await self._w.redis.get(self._w.store.body_key(request_id))
        prompt = json.loads(body)["messages"][0]["content"] if body else ""
        self.begun.append(prompt)
        if prompt in self.deadly:
            self.deadly.discard(prompt)
            raise WorkerLost
        held = self.held.get(prompt)
        while held is not None and not held.is_set() and not attempt.closed.done():
            await asyncio.wait([attempt.closed], timeout=0.01)
        reason = self.fails.pop(prompt, None)
        answer = msgspec.json.encode({"choices": [{"message": {"content": prompt}}]})
        used = Usage(prompt=3, output=5)
        if reason is None:
            attempt.append([], [answer], 0, JSON, used)
        facts = decode_facts(entries[0], RequestFacts)
        summary = Summary(facts, OPENED, epoch, self._w.store.clock.now_ms(), began_ms=1)
        state = State.COMPLETED if reason is None else State.FAILED
        attempt.stop(state, reason, summary, 1)
        with suppress(Fenced):
            await attempt.closed
            self.prompts.append(prompt)
        return AttemptResult(CallResult.ENDED, CompletionStats(5))


@dataclass(eq=False)
class Knife:
    """Kills a leader at its n-th command or write: from then on nothing that it does is executed.

    Args:
        at: the number of that command; 0: it lives.
        after: whether that one is executed, and its answer lost.
        lives: whether only that answer is lost.
    """

    at: int = 0
    after: bool = False
    lives: bool = False
    commands: int = 0
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    async def around(self, run: Callable[[], Awaitable[Any]]) -> Any:
        self.commands += 1
        if self.dead.is_set() and not self.lives:
            raise RedisUnavailable("killed")
        if self.commands != self.at:
            return await run()
        self.dead.set()
        if self.after:
            await run()
        raise RedisUnavailable("killed")


class CutStorage(Storage):
    """The writes of a leader that may be killed between them."""

    async def put(self, path: str, pieces: AsyncIterator[bytes]) -> int:
        return int(await _cut(lambda: super(CutStorage, self).put(path, pieces)))

    async def delete(self, paths: Sequence[str]) -> None:
        await _cut(lambda: super(CutStorage, self).delete(paths))


async def _cut(run: Callable[[], Awaitable[Any]]) -> Any:
    knife = _of_a_leader.get()
    return await (run() if knife is None else knife.around(run))


@dataclass(eq=False)
class Bench:
    """An ingress with a worker, and what leads there."""

    w: World
    ingress: IngressProcess
    worker: LineWorker
    folder: Path
    accepted: Counter[str] = field(default_factory=Counter)
    """How many requests were accepted for each line: by its key."""
    tenants: dict[str, Tenant] = field(default_factory=dict)
    slots: int = 8

    def __post_init__(self) -> None:
        base = self.ingress.base
        self.storage = CutStorage(str(self.folder))
        self.files = Files(base.link, base.clock, self.w.settings, self.storage)
        self.batches = Batches(base.link, self.w.settings, base.clock)
        call, submit = base.link.call, self.ingress.exchanges.admission.submit

        async def cut(commands: Any, large: bool = False) -> Any:
            return await _cut(lambda: call(commands, large))

        async def counted(submission: Any) -> Any:
            receipt = await submit(submission)
            self.accepted[submission.idempotency_key] += not receipt.repeat
            return receipt

        base.link.call = cut  # type: ignore[method-assign]
        self.ingress.exchanges.admission.submit = counted  # type: ignore[method-assign]

    def runner(self) -> BatchRunner:
        """Another ingress's, as far as Redis can see."""
        ingress, settings = self.ingress, self.w.settings
        base = ingress.base
        validator = ingress._validator

        def tenant_of(tenant: str) -> Tenant:
            return self.tenants.get(tenant, Tenant(tenant))

        requests = LineRequests(
            settings,
            ingress.exchanges,
            ingress.submissions,
            validator,
            ingress.endings,
            base.link,
            base.store,
            tenant_of,
        )
        waiting = RedisLink(settings.redis)
        leading = Leading(base.link, waiting, settings, base.clock)
        checks = Checks(self.storage, validator, settings.ingress.max_body_bytes, tenant_of)
        telemetry = BatchTelemetry(CollectorRegistry())
        shared = leading, self.storage, self.files, checks, requests, base.clock
        parts = BatchParts(*shared, telemetry)
        return BatchRunner(
            parts,
            base.loops,
            lambda: True,
            lambda: self.slots,
            settings.batches.max_in_flight,
            lambda: ingress.entrance.unserved,
        )

    @asynccontextmanager
    async def leader(self, knife: Knife | None = None) -> AsyncIterator[BatchRunner]:
        """One that works on the batches; without a resignation at its end, as if it were killed."""
        runner = self.runner()
        _of_a_leader.set(knife)
        task = asyncio.create_task(runner._run())
        _of_a_leader.set(None)
        try:
            yield runner
        finally:
            await ended([task])
            await runner.parts.leading.stop()
            await self.depose()

    async def create(
        self,
        prompts: Sequence[str],
        tenant: str = "t",
        window_s: float = 3_600.0,
        limits: Limits = NO_LIMITS,
        key: str = "",
        tokens: int = 0,
        body: Mapping[str, dict[str, Any]] = MappingProxyType({}),
        recorded: bool = False,
        **facts: Any,
    ) -> Batch:
        """A batch with a line for each prompt, which is its `custom_id`, too. `body`: more fields
        of some prompts' requests. `recorded`: Redis knows its file, which is not so of one that
        was deleted.
        """
        lines = [
            {
                "custom_id": prompt,
                "method": "POST",
                "url": CHATS,
                "body": {
                    "model": self.w.settings.model.name,
                    "messages": [{"role": "user", "content": prompt}],
                    **body.get(prompt, {}),
                },
            }
            for prompt in prompts
        ]
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        path = f"files/in/{secrets.token_hex(8)}"
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(text)
        now_ms = self.ingress.base.clock.now_ms()
        if recorded:
            file = File(
                path.rpartition("/")[2], tenant, len(text), now_ms // 1000, "", "batch", path
            )
            await self.files.add(file)
        made = BatchFacts(
            new_batch_id(tenant, key),
            tenant,
            "",
            self.w.settings.model.name,
            CHATS,
            "file-in",
            path,
            len(text),
            now_ms,
            now_ms + int(window_s * 1000),
            "1h",
            **facts,
        )
        return await self.batches.create(made, limits, tokens)

    def tenant(self, limits: Limits) -> Tenant:
        """One with these limits."""
        return Tenant("t", limits=limits)

    async def batch_is(self, batch: Batch, state: BatchState) -> bool:
        return (await self.now(batch)).state is state

    async def depose(self) -> None:
        """The lease of who leads has ended."""
        namespace, model = self.w.settings.namespace, self.w.settings.model.name
        await self.w.operator.delete(batch_leader_key(namespace, model))

    async def now(self, batch: Batch) -> Batch:
        found = await self.batches.get(batch.facts.tenant, batch.facts.id)
        assert found is not None
        return found

    async def over(self, batch: Batch) -> Batch:
        """It, once it is over."""

        async def ended() -> Batch | None:
            found = await self.now(batch)
            return found if found.state.over else None

        found = await eventually(ended)
        assert isinstance(found, Batch)
        return found

    async def remember(self) -> dict[bytes, tuple[bytes, int]]:
        """All that Redis has now, and its lifetimes (ms; negative: none), for `roll_back`."""
        operator = self.w.operator
        keys = [key async for key in operator.scan_iter(f"{self.w.settings.namespace}:*")]
        found = {key: (await operator.dump(key), await operator.pttl(key)) for key in keys}
        return {key: its for key, its in found.items() if its[0] is not None}

    async def roll_back(self, to: Mapping[bytes, tuple[bytes, int]]) -> None:
        """Redis has lost all that came since, as after a power cut or a failover."""
        async with self.w.operator.pipeline(transaction=True) as pipe:
            for key in {*await self.remember(), *to}:
                pipe.delete(key)
            for key, (value, lifetime_ms) in to.items():
                pipe.restore(key, max(0, lifetime_ms), value)
            await pipe.execute()

    async def lines(self, file_id: str, tenant: str = "t") -> list[dict[str, Any]]:
        """Those of an output file; none if there is no file."""
        if not file_id:
            return []
        file = await self.files.get(tenant, file_id)
        assert file is not None
        text = (self.folder / file.path).read_bytes()
        assert len(text) == file.bytes
        return [json.loads(line) for line in text.splitlines()]

    async def keys(self) -> list[str]:
        """What Redis has of requests and of batches that are not over."""
        found = [key.decode() async for key in self.w.operator.scan_iter("*")]
        namespace = self.w.settings.namespace
        names = ("j:", "b:", "i:", "m:", "batch_lines:", "batch_segments:", "open_batches:")
        return [key for key in found if key.startswith(tuple(f"{namespace}:{n}" for n in names))]


@asynccontextmanager
async def bench(
    w: World, folder: Path, capacity: int = 8, name: str = "ingress-1", replica: str = REPLICA
) -> AsyncIterator[Bench]:
    """An ingress and a worker with so many slots."""
    worker = LineWorker(w, await w.writer())
    membership = Membership(w.link, w.settings.namespace)
    await membership.join_as_worker(replica, lambda _: capacity)
    try:
        async with ingress_process(w.settings, worker.execute, [replica], name) as ingress:
            await eventually(lambda: ingress.limits.memory.seen)
            yield Bench(w, ingress, worker, folder)
    finally:
        await membership.leave()
