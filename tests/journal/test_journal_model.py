"""The journal equals its model after any sequence of writers, readers and cuts.

The model knows the fate of each cut command, so it predicts exactly what Redis must contain
afterwards. The drawn steps never depend on who won a race.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from serve_app import timings
from serve_app.contract import Cause, Reason, State
from serve_app.errors import Fenced, RedisUnavailable
from serve_app.journal.entries import has_ended
from serve_app.journal.reader import JournalReader
from tests.journal.cable import HANGING, UNANSWERED, UNSENT
from tests.journal.journal_helpers import SUMMARY
from tests.journal.journal_world import CUTS, OPENING_CUTS, WORKER, Client, Held, JournalWorld
from tests.journal.state_machines import MANY, run_machine


class JournalMachine(JournalWorld):
    """Processes that open attempts, write, read and end the request, in any order."""

    @initialize()
    def the_first_request(self) -> None:
        self._admit()

    @rule()
    def the_next_request(self) -> None:
        if self.model.ending:
            self.the_late_arrive()
            self._admit()

    @rule(worker=WORKER)
    def a_connection_is_cut(self, worker: int) -> None:
        self.thread.run(self._drop(worker))

    async def _drop(self, worker: int) -> None:
        self.workers[worker].cable.drop()

    @rule(worker=WORKER, cuts=OPENING_CUTS)
    def an_attempt_is_opened(self, worker: int, cuts: list[tuple[str, str]]) -> None:
        self.thread.run(self._open(worker, cuts))

    @rule(one=WORKER, another=WORKER)
    def two_open_the_same_epoch(self, one: int, another: int) -> None:
        if one != another and not self.model.terminal:
            self.thread.run(self._two_open(one, another))

    async def _two_open(self, one: int, another: int) -> None:
        for worker in (one, another):
            self.workers[worker].cable.mend()
        self.epochs += 1
        won = await asyncio.gather(
            *(self._open_epoch(worker, self.epochs) for worker in (one, another))
        )
        assert sum(won) == 1

    @rule(many=MANY, cuts=CUTS)
    def the_holder_appends(self, many: int, cuts: list[tuple[str, str]]) -> None:
        if self._is_held():
            self.thread.run(self._append(many, cuts))

    async def _append(self, many: int, cuts: list[tuple[str, str]]) -> None:
        assert self.holder is not None
        self._will_be_cut(self.holder.worker, cuts)
        self.model.accepted += self._produce(self.holder, many)
        await self._settled(self.holder)
        assert not self.holder.attempt.closed.done()

    @rule(
        many=st.integers(0, 2),
        state=st.sampled_from([State.COMPLETED, State.COMPLETED, State.FAILED]),
        cuts=CUTS,
    )
    def the_holder_finishes(self, many: int, state: State, cuts: list[tuple[str, str]]) -> None:
        if self._is_held():
            self.thread.run(self._finish(many, state, cuts))

    async def _finish(self, many: int, state: State, cuts: list[tuple[str, str]]) -> None:
        assert self.holder is not None
        self._will_be_cut(self.holder.worker, cuts)
        self.model.accepted += self._produce(self.holder, many)
        self.holder.attempt.finish(state, None, SUMMARY, 1 if state is State.COMPLETED else None)
        await self.holder.attempt.closed
        self.model.ending, self.model.terminal, self.holder = state, True, None

    @rule(many=st.integers(0, 2), cuts=CUTS)
    def the_holder_gives_up(self, many: int, cuts: list[tuple[str, str]]) -> None:
        if self._is_held():
            self.thread.run(self._quit(many, cuts))

    async def _quit(self, many: int, cuts: list[tuple[str, str]]) -> None:
        assert self.holder is not None
        self._will_be_cut(self.holder.worker, cuts)
        self.model.accepted += self._produce(self.holder, many)
        self.holder.attempt.quit(Cause.ENGINE_FAILED)
        with pytest.raises(Fenced):
            await self.holder.attempt.closed
        self.holder = None

    @rule(many=MANY, finishing=st.booleans(), appends=st.integers(0, 1))
    def the_holder_dies(self, many: int, finishing: bool, appends: int) -> None:
        """The owner dies with a command in flight that reaches Redis later, or never."""
        if self._is_held():
            self.thread.run(self._die(many, finishing, appends if finishing else 0))

    async def _die(self, many: int, finishing: bool, appends: int) -> None:
        held, model = self.holder, self.model
        assert held is not None
        worker = self.workers[held.worker]
        worker.cable.mend()
        worker.cable.cut("XADD", HANGING, appends)
        produced = self._produce(held, many)
        if finishing:
            held.attempt.finish(State.COMPLETED, None, SUMMARY, 1)
        await worker.cable.hung.wait()
        await worker.writer.stop()
        self.holder = None
        self.zombies = [zombie for zombie in self.zombies if zombie.worker != held.worker]
        worker.cable.mend()
        worker.writer = await self._writer(worker.cable)

        def appended() -> None:
            if (
                model is self.model
                and not model.terminal
                and not model.ending
                and held.attempt.epoch == model.fence
            ):
                model.accepted += produced
                model.ending = "completed" if finishing else ""

        def closed() -> None:
            model.terminal = True

        if appends:  # the seal is there, the terminal entry is not
            appended()
            self.on_arrival.append(closed)
        else:
            self.on_arrival.append(appended)

    @rule(index=st.integers(0, 5), many=MANY, finishing=st.booleans(), cuts=CUTS)
    def a_zombie_appends(
        self, index: int, many: int, finishing: bool, cuts: list[tuple[str, str]]
    ) -> None:
        if not self.zombies and self._is_held():
            assert self.holder is not None
            self.thread.run(self._open((self.holder.worker + 1) % 3, []))
        if self.zombies:
            zombie = self.zombies.pop(index % len(self.zombies))
            self._will_be_cut(zombie.worker, cuts)
            self.thread.run(self._refused(zombie, many, finishing))

    async def _refused(self, zombie: Held, many: int, finishing: bool) -> None:
        self._produce(zombie, many)
        if finishing:
            zombie.attempt.finish(State.COMPLETED, None, SUMMARY, 1)
        with pytest.raises(Fenced):
            await zombie.attempt.closed

    @rule(
        how=st.sampled_from(["", "", UNSENT, UNANSWERED]),
        word=st.sampled_from(["XADD", "XRANGE", "PEXPIRE"]),
        stale=st.booleans(),
    )
    def somebody_cancels(self, how: str, word: str, stale: bool) -> None:
        self.thread.run(self._cancel(how, word, stale))

    async def _cancel(self, how: str, word: str, stale: bool) -> None:
        before = self.stale if stale else await self._read()
        if how:
            self.ender.cut(word, how)
        cut = False
        while True:
            try:
                counts = await self.ender_store.end(
                    self.model.request_id, State.CANCELLED, Reason.CANCELLED, before
                )
                break
            except RedisUnavailable:
                # Asked again it may find its own entry, and say that somebody has ended it.
                cut = True
        self.ender.mend()
        assert not (counts and self.model.ending), f"it was {self.model.ending} before"
        assert counts or cut or self.model.ending
        self.model.terminal |= not has_ended(
            before
        )  # whoever knows that it has ended leaves it as it is
        self.model.ending = self.model.ending or "cancelled"
        self._lose_the_holder()

    @rule(many=MANY, finishing=st.booleans())
    def the_holder_goes_on_while_somebody_cancels(self, many: int, finishing: bool) -> None:
        if self._is_held():
            self.thread.run(self._race(many, finishing))

    async def _race(self, many: int, finishing: bool) -> None:
        held, model = self.holder, self.model
        assert held is not None
        before = await self._read()
        produced = self._produce(held, many)
        if finishing:
            held.attempt.finish(State.COMPLETED, None, SUMMARY, None)
        ended = await self.world.store.end(
            model.request_id, State.CANCELLED, Reason.CANCELLED, before
        )
        counts = ended is not None
        await self._settled(held)
        stands = produced[0] in b"".join(entry.body for entry in await self._read())
        if finishing:
            assert stands != counts, "either the seal or the cancelling came first"
        model.accepted += produced if stands else []
        model.ending, model.terminal = "cancelled" if counts else "completed", True
        self._lose_the_holder()
        if finishing:
            with suppress(Fenced):  # its seal counts, but another's entry closed the journal
                await held.attempt.closed
            self.zombies.remove(held)

    @rule(forgotten=st.integers(1, 3))
    def redis_comes_back_a_little_older(self, forgotten: int) -> None:
        if self._is_held():
            self.thread.run(self._older(forgotten))

    async def _older(self, forgotten: int) -> None:
        """Without the last entries, though nothing before the opening of the one who still knows
        them.
        """
        held = self.holder
        assert held is not None
        entries = await self._read()
        lost = [entry for entry in entries[-forgotten:] if entry.id > (held.attempt.epoch, 0)]
        if not lost:
            return
        key = self.world.store.key(self.model.request_id)
        for worker in self.workers:
            worker.cable.drop()
        await self.world.redis.xdel(key, *(str(entry.id) for entry in lost))
        last = entries[-len(lost) - 1].id
        await self.world.redis.execute_command("XSETID", key, str(last))
        await self._append(1, [])

    @rule(many=MANY, finishing=st.booleans(), cuts=CUTS)
    def the_journal_expires(self, many: int, finishing: bool, cuts: list[tuple[str, str]]) -> None:
        if self._is_held():
            self.thread.run(self._expire(many, finishing, cuts))
            self.the_late_arrive()
            assert not self.thread.run(self.world.store.read(self.model.request_id))
            self._admit()

    async def _expire(self, many: int, finishing: bool, cuts: list[tuple[str, str]]) -> None:
        assert self.holder is not None
        await self.world.redis.delete(self.world.store.key(self.model.request_id))
        self.model.terminal = True  # nothing can be opened, whatever arrives
        self._will_be_cut(self.holder.worker, cuts)
        await self._refused(self.holder, many, finishing)

    @rule(seen=st.integers(0, 8))
    def a_client_comes(self, seen: int) -> None:
        if len(self.clients) < 4:
            self.clients.append(Client(JournalReader(seen=seen), seen))

    @rule()
    def the_clients_read_on(self) -> None:
        for client in self.clients:
            for entry in (
                self.thread.run(
                    self.world.store.read(self.model.request_id, client.reader.position)
                )
                or ()
            ):
                client.reader.feed(entry)
            client.got += client.reader.take()
            self._has_what_counts(client)

    @rule()
    def somebody_remembers_the_journal_as_it_is(self) -> None:
        self.stale = self._entries()


def test_a_journal_is_what_its_model_says(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "APPEND_RETRY_S", (0.001,))
    run_machine(lambda: JournalMachine(redis_url), examples=100, steps=40)
