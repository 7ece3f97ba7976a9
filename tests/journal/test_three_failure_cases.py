"""The three failure cases that Ray Serve's guide to asynchronous inference asks its user to verify:
a worker dies behind a commit, or behind the result and before its acknowledgement, or runs on after
another has taken over. Here a commit is an append to the journal, the token is the attempt's epoch,
and the result is the terminal entry.

Source: https://docs.ray.io/en/latest/serve/asynchronous-inference.html
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import msgspec

from serve_app.contract import AttemptResult, CallResult, WorkerLost
from serve_app.journal.usage import Usage
from serve_app.settings import Settings
from tests.journal.cable import Cable, behind
from tests.journal.in_process import (
    calling,
    door_of,
    ingress_process,
    settings_of,
    worker_process,
)
from tests.journal.journal_helpers import World
from tests.waiting import eventually
from workers.simulated_engine import Batch, SimulatedEngine, text_of

OLD, NEW = "worker-1", "worker-2"
COMMITTED, WHOLE = 5, 40
"""Tokens: those that the old worker has committed before its end, and the whole answer."""
PROMPT = "Tell me"
TEXT = "".join(islice(text_of(msgspec.json.encode(PROMPT)), WHOLE))


class SteppedBatch(Batch):
    """It makes as many tokens of its only request as it is told to."""

    steps: asyncio.Semaphore
    made = 0

    async def _step(self) -> None:
        while True:
            self._work.clear()
            if not self._members:
                await self._work.wait()
            await self.steps.acquire()
            members: list[Any] = list(self._members)
            for running in members:
                running.step()
                self.made += running._left >= 0
            self._stepped()
            await asyncio.sleep(0)


class SteppedEngine(SimulatedEngine):
    def __init__(self, settings: Settings, tokens: int) -> None:
        super().__init__(settings)
        self._batch: SteppedBatch = SteppedBatch(self._arguments, self.progress.stepped)
        self.steps = self._batch.steps = asyncio.Semaphore(tokens)

    @property
    def made(self) -> int:
        return self._batch.made

    def go_on(self) -> None:
        for _ in range(WHOLE):
            self.steps.release()


class Pair:
    """Two workers and their ingress. The first attempt is the old worker's, the others are the
    new one's.
    """

    def __init__(self, w: World, old_tokens: int, new_tokens: int) -> None:
        self._w = w
        self._settings = settings_of(
            w.settings.redis.url, w.settings.namespace, workers={"engine_stall_timeout_s": 3600}
        )
        self.cable = Cable(w.settings.redis.url)
        """The old worker's connections to Redis."""
        self.old = SteppedEngine(self._settings, old_tokens)
        self.new = SteppedEngine(self._settings, new_tokens)
        self.called: list[tuple[str, int]] = []
        self.dies = asyncio.Event()
        """Set when the old worker has died: its answer does not come."""
        self.attempt: asyncio.Task[AttemptResult]
        """The old worker's."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self.cable,
            worker_process(behind(self.cable, self._settings), self.old, OLD) as old,
            worker_process(self._settings, self.new, NEW) as new,
        ):
            self._calls = {OLD: calling(old), NEW: calling(new)}
            async with (
                ingress_process(self._settings, self._execute, [OLD, NEW]) as self.ingress,
                door_of(self.ingress) as self._door,
            ):
                await eventually(lambda: self.ingress.readiness.report()[0])
                nodes = iter([OLD])  # for the first attempt, and the new one for all others
                self.ingress._replicas.placement.choose = (  # type: ignore[method-assign]
                    lambda *_: next(nodes, NEW)
                )
                try:
                    yield
                finally:
                    self.cable.revive()  # so that it can leave

    async def _execute(
        self, request_id: str, epoch: int, replica: str, cause: str
    ) -> AttemptResult:
        self.called.append((replica, epoch))
        call = asyncio.ensure_future(self._calls[replica](request_id, epoch, replica, cause))
        if replica == NEW:
            return await call
        self.attempt = call
        await self.dies.wait()
        raise WorkerLost("it died")

    def lose_lease(self) -> None:
        """The old worker's lease ends, as the ingress sees it; the worker does not know."""
        self.ingress._replicas.leased([NEW])

    def ask(self) -> asyncio.Task[str]:
        """The text that a client of the one request reads."""
        return asyncio.create_task(self._ask())

    async def _ask(self) -> str:
        body = {"model": "hermes-tiny", "prompt": PROMPT, "max_tokens": WHOLE, "stream": True}
        key = {"idempotency-key": "one"}
        answer = await self._door.http.post("/v1/completions", json=body, headers=key)
        assert answer.status_code == 200
        *events, done = (
            line.removeprefix("data: ")
            for line in answer.text.splitlines()
            if line.startswith("data: ")
        )
        assert done == "[DONE]"
        return "".join(msgspec.json.decode(event)["choices"][0]["text"] for event in events)

    async def has_committed(self, tokens: int) -> None:
        """Wait until the journal has so many tokens."""

        async def reached() -> bool:
            entries = [
                one for name in await self._w.journals() for one in await self._w.entries(name)
            ]
            return any(one.used and Usage.decode(one.used).output == tokens for one in entries)

        await eventually(reached)

    async def is_booked_once(self) -> None:
        """One request with one answer is in the ledger, and no queue entry is left."""
        await eventually(self._nothing_queued)
        buckets = (await self._door.http.get("/v1/usage")).json()["data"]
        (booked,) = (one for bucket in buckets for one in bucket["results"])
        assert (booked["num_model_requests"], booked["states"]["completed"]) == (1, 1)
        assert booked["output_tokens"] == WHOLE

    async def _nothing_queued(self) -> bool:
        depths = (await self._w.depths()).values()
        return not any(depth.waiting + depth.claimed for depth in depths)

    async def queue_entry(self) -> Any:
        """What the queue has of the request."""
        ((_, fields),) = await self._w.redis.xrange(self._stream)
        return fields

    async def deliver_again(self, fields: Any) -> None:
        """Another delivery of the request, as a queue makes it that has heard of no end."""
        called = len(self.called)
        await self._w.operator.xadd(self._stream, fields)
        await eventually(lambda: len(self.called) > called)

    @property
    def _stream(self) -> str:
        return self._w.stream("standard")


async def test_a_worker_dies_after_it_has_committed(w: World) -> None:
    """The next one goes on behind the last commit, in an attempt of its own."""
    p = Pair(w, COMMITTED, WHOLE)
    async with p.running():
        text = p.ask()
        await p.has_committed(COMMITTED)
        p.cable.dead = True
        p.dies.set()
        assert await text == TEXT
        assert p.called == [(OLD, 1), (NEW, 2)]
        assert (p.old.made, p.new.made) == (COMMITTED, WHOLE - COMMITTED)
        await p.is_booked_once()


async def test_a_worker_dies_after_its_result_and_before_the_acknowledgement(w: World) -> None:
    """Nobody computes it again, neither for a second delivery nor for a second request by the same
    key.
    """
    p = Pair(w, COMMITTED, 0)
    async with p.running():
        text = p.ask()
        await p.has_committed(COMMITTED)
        delivered = await p.queue_entry()
        p.old.go_on()
        assert await text == TEXT
        p.cable.dead = True
        p.dies.set()
        await p.deliver_again(delivered)
        assert await p.ask() == TEXT
        assert (p.old.made, p.new.made) == (WHOLE, 0)
        await p.is_booked_once()


async def test_an_old_worker_runs_on_after_its_lease_was_lost(w: World) -> None:
    """It can append nothing more, neither while the next one works nor afterwards."""
    p = Pair(w, COMMITTED, COMMITTED)
    async with p.running():
        text = p.ask()
        await p.has_committed(COMMITTED)
        p.lose_lease()
        await p.has_committed(2 * COMMITTED)
        p.old.go_on()
        assert (await p.attempt).outcome is CallResult.FENCED
        p.new.go_on()
        assert await text == TEXT
        assert p.called == [(OLD, 1), (NEW, 2)]
        assert p.new.made == WHOLE - COMMITTED
        await p.is_booked_once()
