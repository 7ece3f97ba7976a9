"""An ingress, a worker and its engine in this process, where running requests give their places to
others. The simulated engine writes as many tokens as the test allows, so that no request ends
before the test has done what it must not end before.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from serve_app.contract import Answer, State
from serve_app.journal.entries import has_ended, transcript
from serve_app.journal.facts import RequestFacts
from serve_app.processes.ingress import IngressProcess
from serve_app.processes.worker import WorkerProcess, make_engine
from tests.journal.in_process import WORKER, calling, ingress_process, worker_process
from tests.journal.journal_helpers import World, world
from tests.waiting import eventually
from workers.simulated_engine import SimulatedEngine

SLICE = 32
HOUR_S = 3600.0


class HeldEngine(SimulatedEngine):
    """A simulated engine whose requests stand still at a number of tokens until more are
    allowed.
    """

    most = math.inf
    """So many tokens may an answer have."""

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            self._progress.stepped()
            for running in self._batch:
                if running.steps < self.most:
                    running.steps += 1
                    running.ready.set()


class YieldingService:
    """An ingress and a worker whose engine runs one request at a time."""

    def __init__(self, w: World, worker: WorkerProcess, engine: Any) -> None:
        self.w = w
        self._call = calling(worker)
        self.engine = engine
        self.calls: list[tuple[str, int]] = []

    async def execute(self, request_id: str, epoch: int, session: str, cause: str) -> Answer:
        """Calls the worker as Ray does."""
        self.calls.append((request_id, epoch))
        return await self._call(request_id, epoch, session, cause)

    def ingress(self, name: str) -> AbstractAsyncContextManager[IngressProcess]:
        """An ingress that sees the worker."""
        return ingress_process(self.w.settings, self.execute, [WORKER], name)

    async def admit(
        self,
        name: str,
        tokens: int,
        request_class: str = "standard",
        timeout_s: float = HOUR_S,
        **more: Any,
    ) -> None:
        """Accept a request for so many tokens."""
        now_ms = int(time.time() * 1000)
        deadline_ms = now_ms + int(timeout_s * 1000)
        facts = RequestFacts(request_class, "t", "", "m", True, now_ms, deadline_ms, self.w.channel)
        body = {"messages": [{"role": "user", "content": "say"}], "stream": True}
        await self.w.accept(
            name, facts, json.dumps({**body, "max_tokens": tokens, **more}).encode()
        )

    async def epochs(self, name: str) -> int:
        """How many attempts a request has had that has ended."""
        (last,) = [entry for entry in await self.w.entries(name) if entry.terminal]
        assert last.summary is not None
        return last.summary.attempts

    async def text(self, name: str) -> list[str]:
        """The words of an answer that has ended, in order."""
        (last,) = [entry for entry in await self.w.entries(name) if entry.terminal]
        assert last.state is State.COMPLETED, (last.state, last.reason)
        body = transcript(last)
        assert body is not None
        events = [event for event in body.decode().split("\n\n") if event]
        assert [event.split("\n")[0] for event in events] == [
            f"id: {number}" for number in range(1, len(events) + 1)
        ]
        found = [json.loads(event.split("data: ", 1)[1]) for event in events[:-1]]
        finish = [one["choices"][0]["finish_reason"] for one in found if one["choices"]]
        assert [reason for reason in finish if reason] == ["length"]
        return [one["choices"][0]["delta"].get("content", "") for one in found if one["choices"]]


@asynccontextmanager
async def service(
    url: str, namespace: str, engine: dict[str, Any] | None = None, slots: int = 1
) -> AsyncIterator[YieldingService]:
    """`engine`: settings of another one than the `HeldEngine`."""
    settings = {
        "engine": engine or {"kind": "simulated"},
        "workers": {"max_running_requests": slots},
        "order": {"slice_tokens": SLICE},
    }
    async with world(url, namespace, **settings) as w:
        its_engine = make_engine(w.settings) if engine else HeldEngine(w.settings)
        async with worker_process(w.settings, its_engine) as worker:
            yield YieldingService(w, worker, its_engine)


async def ended(its: YieldingService, *names: str) -> None:
    for name in names:
        await eventually(partial(is_ended, its, name))


async def is_ended(its: YieldingService, name: str) -> bool:
    return has_ended(await its.w.entries(name))


async def begun(its: YieldingService, name: str) -> bool:
    return any(entry.outputs for entry in await its.w.entries(name))


async def has_output(its: YieldingService, name: str, epoch: int) -> bool:
    return any(one.id.epoch == epoch and one.outputs for one in await its.w.entries(name))
