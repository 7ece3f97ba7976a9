"""The journal equals its model after any sequence of writers, readers and cuts.

The model knows the fate of each cut command, so it predicts exactly what Redis must contain
afterwards. The drawn steps never depend on who won a race.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from serve_app import timings
from serve_app.contract import Cause, Reason, State
from serve_app.errors import Fenced, RedisUnavailable
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import TERMINAL_ID, Entry
from serve_app.journal.events import SEPARATOR
from serve_app.journal.ledger import sums
from serve_app.journal.reader import JournalReader
from serve_app.policy.tenant_limits import Limits, Reserved
from serve_app.redis.keyspace import limits_key, running_key
from serve_app.requests.record import Record
from tests.journal.cable import HANGING, LATE, RETRIED, UNANSWERED, UNSENT, Cable, behind
from tests.journal.journal_helpers import FACTS, HEAD, OPENED, SUMMARY, World
from tests.transcripts import transcript
from tests.waiting import PATIENCE_S, eventually
from workers.journal_writer import JournalWriter
from workers.replay import recorded

LIMITED = replace(FACTS, reserved=Reserved(10, 0, 1))
LIMITS = Limits(concurrent_requests=10**6)
ENDS = replace(SUMMARY, request=LIMITED)
examples = itertools.count(1)


@dataclass
class Worker:
    """One worker process: its writer, and the cable between it and Redis."""

    cable: Cable
    writer: JournalWriter


@dataclass
class Held:
    """An attempt that its worker believes to be current; `events`: the number of events so far, as
    far as it knows.
    """

    attempt: AttemptLog
    worker: int
    events: int


@dataclass
class Journal:
    """The model of one request."""

    request_id: str
    accepted: list[bytes] = field(default_factory=list)
    fence: int = 0
    """The highest epoch that was opened in Redis."""
    ending: str = ""
    """The state of the first ending."""
    terminal: bool = False
    """Whether the terminal entry is written; then not even an opening can follow."""


async def booked(world: World) -> int:
    """How many endings are in the ledger; those of `ENDS` are of 1970."""
    now, namespace = int(time.time() * 1000) // timings.HOUR_MS, world.settings.namespace
    found = 0
    for hours in (range(1), range(now - 1, now + 1)):
        for period in await sums(world.link, namespace, hours, lambda _: "all"):
            found += sum(row.requests for row in period.values())
    return found


WORDS = st.sampled_from(["XADD", "XADD", "EVAL", "XREVRANGE", "XRANGE"])
CUTS = st.lists(st.tuples(WORDS, st.sampled_from([UNSENT, UNANSWERED, LATE, RETRIED])), max_size=2)
OPENING_CUTS = st.lists(st.tuples(WORDS, st.sampled_from([UNSENT, UNANSWERED, LATE])), max_size=1)
WORKER = st.integers(0, 2)
MANY = st.integers(1, 3)


def in_the_loop(step: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A step that is a coroutine, for `rule` and `invariant`. What it has started goes on in the
    steps after it.
    """

    @wraps(step)
    def run(machine: JournalWorld, **drawn: Any) -> None:
        machine.loop.run(asyncio.wait_for(step(machine, **drawn), PATIENCE_S))

    return run


class JournalWorld(RuleBasedStateMachine):
    """Three workers, a journal and its model: what the rules are made of, and what always holds."""

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.redis_url = redis_url
        self.namespace = f"t-model-{next(examples)}"
        self.numbers = itertools.count(1)
        self.model = Journal("")
        self.epochs = 0
        self.admitted = 0
        self.ended = 0
        """Requests before this one, which have all ended."""
        self.holder: Held | None = None
        self.zombies: list[Held] = []
        self.on_arrival: list[Callable[[], None]] = []
        self.stale: list[Entry] = []
        self.loop = asyncio.Runner()
        self.loop.run(self.start())

    def teardown(self) -> None:
        self.loop.run(self.stop())
        self.loop.close()

    async def start(self) -> None:
        self.world = World(self.redis_url, self.namespace)
        self.workers = []
        for _ in range(3):
            cable = await Cable(self.redis_url).start()
            self.workers.append(Worker(cable, await self._writer(cable)))
        self.ender = await Cable(self.redis_url).start()
        self.enders_world = World(self.ender.url, self.namespace)

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.writer.stop()
        await self.enders_world.stop()
        await self.world.stop()

    async def _writer(self, cable: Cable) -> JournalWriter:
        writer = JournalWriter(behind(cable, self.world.settings))
        await writer.start()
        return writer

    async def _admit(self) -> None:
        self.model = Journal(f"req_{next(self.numbers)}")
        self.epochs = 0
        self.holder, self.zombies = None, []
        self.admitted += 1
        now_ms = int(time.time() * 1000)
        facts = replace(LIMITED, admitted_ms=now_ms, deadline_ms=now_ms + 60_000)
        facts = replace(facts, wake_channel=self.world.channel)
        await self.world.accept(self.model.request_id, facts, limits=LIMITS)
        self.stale = await self._read()

    def _will_be_cut(self, worker: int, cuts: list[tuple[str, str]]) -> None:
        cable = self.workers[worker].cable
        cable.mend()
        for cut in cuts:
            cable.cut(*cut)

    async def _open(self, worker: int, cuts: list[tuple[str, str]]) -> None:
        self.epochs += 1
        self._will_be_cut(worker, cuts)
        terminal, fence = self.model.terminal, self.model.fence
        won = await self._open_epoch(worker, self.epochs)
        if not won and not self.workers[worker].cable.cuts:
            assert terminal or fence >= self.epochs, f"epoch {self.epochs} was free"

    async def _open_epoch(self, worker: int, epoch: int) -> bool:
        """Whether the worker got the epoch; a request that has ended is left alone, as in a
        replica.
        """
        model, cable = self.model, self.workers[worker].cable
        nonce = b"nonce-%d" % next(self.numbers)
        while True:
            try:
                attempt, entries = await self.workers[worker].writer.open(
                    model.request_id, epoch, nonce, OPENED
                )
                break
            except Fenced:
                return False
            except RedisUnavailable:
                if cable.cuts:
                    self._opening_cut(epoch, cable.cuts)
                    return False
                # A connection that was dropped before is noticed only now: the command has gone
                # nowhere.
        assert not model.terminal
        assert model.fence < epoch
        model.fence = epoch
        self._lose_the_holder()
        # Its own older attempt is closed by the writer: what was open here is no zombie but an end.
        for zombie in [zombie for zombie in self.zombies if zombie.worker == worker]:
            assert isinstance(zombie.attempt.closed.exception(), Fenced)
            self.zombies.remove(zombie)
        assert not model.ending
        part = recorded(entries)
        assert part.body == b"".join(model.accepted)
        assert part.events == len(model.accepted)
        if epoch > 1:
            attempt.continue_from(part.last, part.body, part.events, part.head)
        self.holder = Held(attempt, worker, part.events)
        return True

    async def _held(self) -> Held | None:
        """Who has the request: somebody takes it up, unless somebody has it or it has ended."""
        if self.holder is None and not self.model.ending:
            await self._open(self.epochs % 3, [])
        return self.holder

    def _opening_cut(self, epoch: int, cuts: list[tuple[str, str]]) -> None:
        """The worker does not know whether it has opened it, and leaves it to the next epoch."""
        model = self.model

        def opened() -> None:
            if model is self.model and not model.terminal and epoch > model.fence:
                model.fence = epoch
                self._lose_the_holder()

        how, word = cuts[-1]
        if (how == UNANSWERED and word == "XADD") or (
            how in (UNSENT, UNANSWERED, LATE) and word == "XRANGE"
        ):
            opened()
        elif how == LATE and word == "XADD":
            self.on_arrival.append(opened)

    def _lose_the_holder(self) -> None:
        if self.holder is not None:
            self.zombies.append(self.holder)
            self.holder = None

    def _produce(self, held: Held, many: int) -> list[bytes]:
        """One burst, hence one entry."""
        produced = []
        for _ in range(many):
            held.events += 1
            text = b"%d.%d" % (held.attempt.epoch, next(self.numbers))
            produced.append(b"id: %d\ndata: %b\n\n" % (held.events, text))
            head = HEAD if held.events == 1 else None
            output = [0, text.decode(), [held.events], None, None, None]
            held.attempt.append([output], [produced[-1]], held.events, head)
        return produced

    async def _settled(self, held: Held) -> None:
        await eventually(lambda: held.attempt.closed.done() or not held.attempt.pending)

    async def _arrive(self) -> None:
        for worker in self.workers:
            await worker.cable.arrive()
        # Effects exclude each other by epoch, so that they can be told in the order of the cuts.
        for effect in self.on_arrival:
            effect()
        self.on_arrival.clear()

    async def _read(self) -> list[Entry]:
        entries = await self.world.store.read(self.model.request_id)
        assert entries
        return entries

    @invariant()
    @in_the_loop
    async def the_journal_is_what_the_model_says(self) -> None:
        if not self.model.request_id:
            return
        entries, model = await self._read(), self.model
        ids = [entry.id for entry in entries]
        assert ids == sorted(set(ids))
        assert (TERMINAL_ID in ids) == model.terminal
        trimmed = ids == [TERMINAL_ID]
        epochs = [entry_id.epoch for entry_id in ids if entry_id != TERMINAL_ID]
        assert trimmed or max(epochs) == model.fence
        bodies = [entry.body for entry in entries if entry.id.epoch]
        whole = transcript(entries[-1])
        body = whole if trimmed and whole is not None else b"".join(bodies)
        parts = body.split(SEPARATOR)[:-1]
        numbers = [int(part.split(b"\n")[0].removeprefix(b"id: ")) for part in parts]
        assert numbers == list(range(1, len(model.accepted) + 1))
        assert body == b"".join(model.accepted)
        assert whole is None or whole == body
        self._one_ending_counts(entries)
        await self._the_record_says_the_same(entries)
        ended = self.ended + bool(model.ending)
        assert await booked(self.world) == ended
        of_limits = await self.world.redis.get(limits_key(self.namespace, LIMITED.tenant))
        assert int(of_limits.split()[5]) == self.admitted - ended
        running = running_key(self.namespace, LIMITED.tenant)
        assert await self.world.redis.zcard(running) == self.admitted - ended
        for seen in {0, len(model.accepted) // 2}:
            reader = JournalReader(seen=seen)
            for entry in entries:
                reader.feed(entry)
            assert reader.take() == b"".join(model.accepted[seen:])
            assert (reader.ending.state if reader.ending else "") == model.ending

    def _one_ending_counts(self, entries: list[Entry]) -> None:
        endings = [index for index, entry in enumerate(entries) if entry.ends]
        assert bool(endings) == bool(self.model.ending)
        if endings:
            first = entries[endings[0]]
            assert first.state == self.model.ending
            assert first.id == TERMINAL_ID

    async def _the_record_says_the_same(self, entries: list[Entry]) -> None:
        """As all entries together, in one read, without their bytes."""
        record, whole = await self.world.store.record(self.model.request_id), Record(entries)
        assert record is not None
        for name in ("state", "events", "attempts", "openings", "attempt", "summary", "used"):
            assert getattr(record, name) == getattr(whole, name), name
        assert record.last.id == whole.last.id
        assert not any(entry.body for entry in record.entries)

    @rule()
    @in_the_loop
    async def the_late_arrive(self) -> None:
        await self._arrive()


class JournalMachine(JournalWorld):
    """Processes that open attempts, write, read and end the request, in any order."""

    @initialize()
    @in_the_loop
    async def the_first_request(self) -> None:
        await self._admit()

    @rule()
    @in_the_loop
    async def the_next_request(self) -> None:
        if self.model.ending:
            await self._arrive()
            self.ended += 1
            await self._admit()

    @rule(worker=WORKER)
    @in_the_loop
    async def a_connection_is_cut(self, worker: int) -> None:
        self.workers[worker].cable.drop()

    @rule(worker=WORKER, cuts=OPENING_CUTS)
    @in_the_loop
    async def an_attempt_is_opened(self, worker: int, cuts: list[tuple[str, str]]) -> None:
        await self._open(worker, cuts)

    @rule(one=WORKER, another=WORKER)
    @in_the_loop
    async def two_open_the_same_epoch(self, one: int, another: int) -> None:
        if one == another or self.model.terminal:
            return
        for worker in (one, another):
            self.workers[worker].cable.mend()
        self.epochs += 1
        both = (self._open_epoch(worker, self.epochs) for worker in (one, another))
        assert sum(await asyncio.gather(*both)) == 1

    @rule(many=MANY, cuts=CUTS)
    @in_the_loop
    async def the_holder_appends(self, many: int, cuts: list[tuple[str, str]]) -> None:
        if held := await self._held():
            await self._append(held, many, cuts)

    async def _append(self, held: Held, many: int, cuts: list[tuple[str, str]]) -> None:
        self._will_be_cut(held.worker, cuts)
        self.model.accepted += self._produce(held, many)
        await self._settled(held)
        assert not held.attempt.closed.done()

    @rule(
        many=st.integers(0, 2),
        state=st.sampled_from([State.COMPLETED, State.COMPLETED, State.FAILED]),
        cuts=CUTS,
    )
    @in_the_loop
    async def the_holder_finishes(
        self, many: int, state: State, cuts: list[tuple[str, str]]
    ) -> None:
        if held := await self._held():
            self._will_be_cut(held.worker, cuts)
            self.model.accepted += self._produce(held, many)
            held.attempt.stop(state, None, ENDS, 1 if state is State.COMPLETED else None)
            await held.attempt.closed
            self.model.ending, self.model.terminal, self.holder = state, True, None

    @rule(many=st.integers(0, 2), cuts=CUTS)
    @in_the_loop
    async def the_holder_gives_up(self, many: int, cuts: list[tuple[str, str]]) -> None:
        if held := await self._held():
            self._will_be_cut(held.worker, cuts)
            self.model.accepted += self._produce(held, many)
            held.attempt.stop(Cause.ENGINE_FAILED)
            with pytest.raises(Fenced):
                await held.attempt.closed
            self.holder = None

    @rule(many=MANY, finishing=st.booleans())
    @in_the_loop
    async def the_holder_dies(self, many: int, finishing: bool) -> None:
        """The owner dies with a command in flight that reaches Redis later, or never."""
        if held := await self._held():
            await self._die(held, many, finishing)

    async def _die(self, held: Held, many: int, finishing: bool) -> None:
        model = self.model
        worker = self.workers[held.worker]
        worker.cable.mend()
        worker.cable.cut("EVAL" if finishing else "XADD", HANGING)
        produced = self._produce(held, many)
        if finishing:
            held.attempt.stop(State.COMPLETED, None, ENDS, 1)
        await worker.cable.hung.wait()
        await worker.writer.stop()
        self.holder = None
        self.zombies = [zombie for zombie in self.zombies if zombie.worker != held.worker]
        worker.cable.mend()
        worker.writer = await self._writer(worker.cable)

        def appended() -> None:
            over = model is not self.model or model.terminal or model.ending
            if not over and held.attempt.epoch == model.fence:
                model.accepted += produced
                model.ending = "completed" if finishing else ""
                model.terminal = finishing

        self.on_arrival.append(appended)

    @rule(index=st.integers(0, 5), many=MANY, finishing=st.booleans(), cuts=CUTS)
    @in_the_loop
    async def a_zombie_appends(
        self, index: int, many: int, finishing: bool, cuts: list[tuple[str, str]]
    ) -> None:
        if not self.zombies and (held := await self._held()):
            await self._open((held.worker + 1) % 3, [])
        if self.zombies:
            zombie = self.zombies.pop(index % len(self.zombies))
            self._will_be_cut(zombie.worker, cuts)
            await self._refused(zombie, many, finishing)

    async def _refused(self, zombie: Held, many: int, finishing: bool) -> None:
        self._produce(zombie, many)
        if finishing:
            zombie.attempt.stop(State.COMPLETED, None, ENDS, 1)
        with pytest.raises(Fenced):
            await zombie.attempt.closed

    @rule(
        how=st.sampled_from(["", "", UNSENT, UNANSWERED]),
        stale=st.booleans(),
    )
    @in_the_loop
    async def somebody_cancels(self, how: str, stale: bool) -> None:
        before = self.stale if stale else await self._read()
        if how:
            self.ender.cut("EVAL", how)
        cut = False
        while True:
            try:
                counts = await self.enders_world.endings.end(
                    self.model.request_id, Reason.CANCELLED, Record(before)
                )
                break
            except RedisUnavailable:
                # Asked again it may find its own entry, and say that somebody has ended it.
                cut = True
        self.ender.mend()
        assert not (counts and self.model.ending), f"it was {self.model.ending} before"
        assert counts or cut or self.model.ending
        # Whoever knows that it has ended leaves it as it is.
        self.model.terminal |= not before[-1].ends
        self.model.ending = self.model.ending or "cancelled"
        self._lose_the_holder()

    @rule(many=MANY, finishing=st.booleans())
    @in_the_loop
    async def the_holder_goes_on_while_somebody_cancels(self, many: int, finishing: bool) -> None:
        held, model = await self._held(), self.model
        if held is None:
            return
        before = await self._read()
        produced = self._produce(held, many)
        if finishing:
            held.attempt.stop(State.COMPLETED, None, ENDS, None)
        counts = await self.world.endings.end(model.request_id, Reason.CANCELLED, Record(before))
        await self._settled(held)
        stands = produced[0] in b"".join(entry.body for entry in await self._read())
        if finishing:
            assert stands != counts, "either the end or the cancelling came first"
        model.accepted += produced if stands else []
        model.ending, model.terminal = "cancelled" if counts else "completed", True
        self._lose_the_holder()
        if finishing:
            with suppress(Fenced):  # another has ended it
                await held.attempt.closed
            self.zombies.remove(held)

    @rule(forgotten=st.integers(1, 3))
    @in_the_loop
    async def redis_comes_back_a_little_older(self, forgotten: int) -> None:
        """Without the last entries, though nothing before the opening of the one who still knows
        them.
        """
        held = await self._held()
        if held is None:
            return
        entries = await self._read()
        lost = [entry for entry in entries[-forgotten:] if entry.id > (held.attempt.epoch, 0)]
        if not lost:
            return
        key = self.world.store.key(self.model.request_id)
        for worker in self.workers:
            worker.cable.drop()
        await self.world.redis.xdel(key, *(str(entry.id) for entry in lost))
        last = entries[-len(lost) - 1].id
        await self.world.operator.execute_command("XSETID", key, str(last))
        await self._append(held, 1, [])

    @rule(many=MANY, finishing=st.booleans(), cuts=CUTS)
    @in_the_loop
    async def the_journal_expires(
        self, many: int, finishing: bool, cuts: list[tuple[str, str]]
    ) -> None:
        if held := await self._held():
            await self.world.redis.unlink(self.world.store.key(self.model.request_id))
            self.model.terminal = True  # nothing can be opened, whatever arrives
            self._will_be_cut(held.worker, cuts)
            await self._refused(held, many, finishing)
            await self._arrive()
            assert not await self.world.store.read(self.model.request_id)
            await self._admit()

    @rule()
    @in_the_loop
    async def somebody_remembers_the_journal_as_it_is(self) -> None:
        self.stale = await self._read()


def test_a_journal_is_what_its_model_says(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "APPEND_RETRY_S", (0.001,))
    monkeypatch.setattr(timings, "PACK_AT_ONCE_BYTES", -1)  # all as long ones
    within = settings(
        max_examples=100,
        stateful_step_count=40,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(lambda: JournalMachine(redis_url), settings=within)  # type: ignore[arg-type] # it calls it
