"""The journal and the queue against simple models of them, on a real Redis: sequences that nobody thought of.

Every client of Redis is joined to it by a `Cable`, which can be cut between any two commands, with the command on its
way lost, carried out without an answer, or carried out much later. The models know which of these happened, so they
say exactly what must stand in Redis afterwards. What is drawn never depends on who won a race.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import hiredis
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
from journal_helpers import HEAD, OPENED, PATIENCE_S, SUMMARY, World, add, finish, world
from redis.asyncio import Redis

from serve_app.errors import Fenced, JournalUnavailable, Reason
from serve_app.journal import writer as writer_module
from serve_app.journal.attempt import Attempt
from serve_app.journal.client import connect_redis
from serve_app.journal.connection import RedisLink, RespConnection
from serve_app.journal.entries import TERMINAL_ID, Entry, has_ended, seal_id, transcript
from serve_app.journal.events import SEPARATOR
from serve_app.journal.reader import JournalReader
from serve_app.journal.store import JournalStore
from serve_app.journal.writer import JournalWriter
from serve_app.request_queue import queue as queue_module
from serve_app.request_queue.queue import GROUP, QueueEntry, RequestQueue
from serve_app.settings import Settings
from workers.replay import recorded

T = TypeVar("T")

UNSENT, UNANSWERED, LATE, RETRIED, HANGING = "unsent", "unanswered", "late", "retried", "hanging"

_examples = itertools.count(1)


def _redis(url: str) -> dict[str, Any]:
    """A machine that is slow for a while must not look like a Redis that is away: only cables are cut here."""
    return {"url": url, "connect_timeout_s": PATIENCE_S, "response_timeout_s": PATIENCE_S}


def _at(cable: Cable, namespace: str) -> Settings:
    return Settings.model_validate({"namespace": namespace, "redis": _redis(cable.url)})


class LoopThread:
    """One event loop in a thread of its own: what the machine's steps start goes on between them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that ends in bounded time."""

        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()

    def end(self) -> None:
        """Cancel what is left and end the thread."""
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class Cable:
    """A client's way to Redis: passes on one command at a time, and can be cut at any of them."""

    def __init__(self, redis_url: str) -> None:
        self._redis = urlsplit(redis_url)
        self._plans: deque[tuple[bytes, str, int]] = deque()
        self._held: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._before_the_retry: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._carrying: set[asyncio.Task[None]] = set()
        self.hung = asyncio.Event()
        self.cuts: list[tuple[str, str]] = []
        """What has been cut: how, and the command's first word."""

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        login = self._redis.netloc.rpartition("@")[0]
        self.url = self._redis._replace(netloc=f"{login}@127.0.0.1:{port}").geturl()

    def cut(self, word: str, how: str, after: int = 0) -> None:
        """At the next command (but so many) that begins with `word`; empty for any."""
        self._plans.append((word.encode(), how, after))

    def mend(self) -> None:
        """Forget cuts that nothing has come to; the next connection passes all."""
        self._plans.clear()
        self.cuts.clear()
        self.hung.clear()

    def drop(self) -> None:
        """End the connections that are open."""
        for task in self._carrying:
            task.cancel()

    async def arrive(self) -> None:
        """Give Redis the commands that were held, whose senders have long given them up."""
        held, self._held = self._held, []
        await self._arrive_before_the_retry()
        await self._give(held)

    async def _arrive_before_the_retry(self) -> None:
        held, self._before_the_retry = self._before_the_retry, []
        await self._give(held)

    async def _give(self, held: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
        for command, reader, writer in held:
            await self._ask(command, reader, writer, hiredis.Reader())
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        up = await asyncio.open_connection(self._redis.hostname, self._redis.port)
        kept = False
        try:
            kept = await self._carry(reader, writer, *up)
        except (OSError, asyncio.CancelledError):
            pass  # the client has gone, or the cable was dropped
        finally:
            self._carrying.discard(task)
            writer.transport.abort()
            if not kept:
                up[1].close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *up: Any) -> bool:
        """Until either end goes or a cut is due. Returns whether the connection to Redis is needed for later."""
        commands, replies = hiredis.Reader(), hiredis.Reader()
        while data := await reader.read(1 << 16):
            commands.feed(data)
            while (command := commands.gets()) is not False:
                how = self._fate(command)
                if how == UNSENT:
                    return False
                if how in (LATE, RETRIED, HANGING):
                    (self._before_the_retry if how == RETRIED else self._held).append((command, *up))
                    self.hung.set()
                    while how == HANGING and await reader.read(1 << 16):
                        pass
                    return True
                if command[0] == b"XADD" and self._before_the_retry:
                    await self._arrive_before_the_retry()
                answer = await self._ask(command, *up, replies)
                if how == UNANSWERED:
                    return False
                writer.write(answer)
        return False

    def _fate(self, command: list[bytes]) -> str:
        greeting = command[0] in (b"AUTH", b"SELECT", b"CLIENT")
        if greeting or not self._plans or not command[0].startswith(self._plans[0][0]):
            return ""
        word, how, after = self._plans.popleft()
        if after:
            self._plans.appendleft((word, how, after - 1))
            return ""
        self.cuts.append((how, command[0].decode()))
        return how

    @staticmethod
    async def _ask(
        command: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: hiredis.Reader
    ) -> bytes:
        writer.write(hiredis.pack_command(tuple(command)))
        answer = b""
        while replies.gets() is False:
            data = await reader.read(1 << 16)
            if not data:
                raise ConnectionError("Redis has closed the connection")
            replies.feed(data)
            answer += data
        return answer


# -- the journal ---------------------------------------------------------------------------------------------


class ToldWriter(JournalWriter):
    """A writer that says when it has done a turn, so that nobody has to look again and again."""

    def __init__(self, its_settings: Settings) -> None:
        super().__init__(its_settings)
        self.turned = asyncio.Event()

    async def _flush(self, connection: RespConnection) -> bool:
        try:
            return await super()._flush(connection)
        finally:
            self.turned.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until it holds, which takes a turn or several."""
        while not condition():
            self.turned.clear()
            await self.turned.wait()


@dataclass
class Worker:
    """One worker process: its writer, and the cable between it and Redis."""

    cable: Cable
    writer: ToldWriter


@dataclass
class Held:
    """An attempt that its worker believes in; `events`: how many the response has as far as it knows."""

    attempt: Attempt
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
    """Whether the terminal entry stands there: not even an opening can follow."""


@dataclass
class Client:
    """A reader that stays, with what it got from its `Last-Event-ID` on."""

    reader: JournalReader
    seen: int
    got: bytes = b""


WORDS = st.sampled_from(["XADD", "XADD", "XREVRANGE", "XRANGE"])
CUTS = st.lists(st.tuples(WORDS, st.sampled_from([UNSENT, UNANSWERED, LATE, RETRIED])), max_size=2)
OPENING_CUTS = st.lists(st.tuples(WORDS, st.sampled_from([UNSENT, UNANSWERED, LATE])), max_size=1)
MANY = st.integers(1, 3)
WORKER = st.integers(0, 2)


class JournalMachine(RuleBasedStateMachine):
    """Three workers, a journal, those who read it and those who end it."""

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.thread = LoopThread()
        self.redis_url = redis_url
        self.namespace = f"t-model-{next(_examples)}"
        self.numbers = itertools.count(1)
        self.model = Journal("")
        self.epochs = 0
        self.holder: Held | None = None
        self.zombies: list[Held] = []
        self.clients: list[Client] = []
        self.on_arrival: list[Callable[[], None]] = []
        self.stale: list[Entry] = []
        self.thread.run(self._start())

    async def _start(self) -> None:
        self.world = World(self.redis_url, self.namespace, redis=_redis(self.redis_url))
        self.workers = []
        for _ in range(3):
            cable = Cable(self.redis_url)
            await cable.start()
            self.workers.append(Worker(cable, await self._writer(cable)))
        self.ender = Cable(self.redis_url)
        await self.ender.start()
        at_ender = _at(self.ender, self.namespace)
        self.ender_link = RedisLink(at_ender.redis)
        self.ender_store = JournalStore(at_ender, self.ender_link)

    async def _writer(self, cable: Cable) -> ToldWriter:
        writer = ToldWriter(_at(cable, self.namespace))
        await writer.start()
        return writer

    def teardown(self) -> None:
        self.thread.run(self._stop())
        self.thread.end()

    async def _stop(self) -> None:
        for worker in self.workers:
            await worker.writer.stop()
        await self.ender_link.close()
        await self.world.stop()

    # -- rules -------------------------------------------------------------------------------------------------

    @initialize()
    def the_first_request(self) -> None:
        self._admit()

    @rule()
    def the_next_request(self) -> None:
        if self.model.ending:
            self.the_late_arrive()
            self._admit()

    def _admit(self) -> None:
        self.model = Journal(f"req_{next(self.numbers)}")
        self.epochs = 0
        self.holder, self.zombies, self.clients = None, [], []
        self.thread.run(self.world.admit(self.model.request_id))
        self.stale = self._entries()

    def _will_be_cut(self, worker: int, cuts: list[tuple[str, str]]) -> None:
        cable = self.workers[worker].cable
        cable.mend()
        for cut in cuts:
            cable.cut(*cut)

    @rule(worker=WORKER)
    def a_connection_is_cut(self, worker: int) -> None:
        self.thread.run(self._drop(worker))

    async def _drop(self, worker: int) -> None:
        self.workers[worker].cable.drop()

    @rule(worker=WORKER, cuts=OPENING_CUTS)
    def an_attempt_is_opened(self, worker: int, cuts: list[tuple[str, str]]) -> None:
        self.thread.run(self._open(worker, cuts))

    async def _open(self, worker: int, cuts: list[tuple[str, str]]) -> None:
        self.epochs += 1
        self._will_be_cut(worker, cuts)
        terminal, fence = self.model.terminal, self.model.fence
        won = await self._open_epoch(worker, self.epochs)
        if not won and not self.workers[worker].cable.cuts:
            assert terminal or fence >= self.epochs, f"epoch {self.epochs} was free"

    async def _open_epoch(self, worker: int, epoch: int) -> bool:
        """Whether it was given the epoch; a request that is found ended is let be, as a replica does."""
        model, cable = self.model, self.workers[worker].cable
        nonce = b"nonce-%d" % next(self.numbers)
        while True:
            try:
                attempt, entries = await self.workers[worker].writer.open(model.request_id, epoch, nonce, OPENED)
                break
            except Fenced:
                return False
            except JournalUnavailable:
                if cable.cuts:
                    self._opening_cut(epoch, cable.cuts)
                    return False
                # A connection that was dropped before is noticed only now: the command has gone nowhere.
        assert not model.terminal
        assert model.fence < epoch
        model.fence = epoch
        self._lose_the_holder()
        # Its own older attempt is closed by the writer: what was open here is no zombie but an end.
        for zombie in [zombie for zombie in self.zombies if zombie.worker == worker]:
            assert isinstance(zombie.attempt.closed.exception(), Fenced)
            self.zombies.remove(zombie)
        assert has_ended(entries) == bool(model.ending)
        if model.ending:
            self.workers[worker].writer.abandon(attempt)
            return True
        part = recorded(entries)
        assert part.body == b"".join(model.accepted)
        assert part.events == len(model.accepted)
        if epoch > 1:
            attempt.continue_from(part.last, part.body, part.events, part.head)
        self.holder = Held(attempt, worker, part.events)
        return True

    def _is_held(self) -> bool:
        """Somebody takes the request up, unless somebody has it or it has ended."""
        if self.holder is None and not self.model.ending:
            self.thread.run(self._open(self.epochs % 3, []))
        return self.holder is not None

    def _opening_cut(self, epoch: int, cuts: list[tuple[str, str]]) -> None:
        """The worker does not know whether it has opened it, and leaves it to the next epoch."""
        model = self.model

        def opened() -> None:
            if model is self.model and not model.terminal and epoch > model.fence:
                model.fence = epoch
                self._lose_the_holder()

        how, word = cuts[-1]
        if (how == UNANSWERED and word == "XADD") or (how in (UNSENT, UNANSWERED, LATE) and word == "XRANGE"):
            opened()
        elif how == LATE and word == "XADD":
            self.on_arrival.append(opened)

    def _lose_the_holder(self) -> None:
        if self.holder is not None:
            self.zombies.append(self.holder)
            self.holder = None

    @rule(one=WORKER, another=WORKER)
    def two_open_the_same_epoch(self, one: int, another: int) -> None:
        if one != another and not self.model.terminal:
            self.thread.run(self._two_open(one, another))

    async def _two_open(self, one: int, another: int) -> None:
        for worker in (one, another):
            self.workers[worker].cable.mend()
        self.epochs += 1
        won = await asyncio.gather(*(self._open_epoch(worker, self.epochs) for worker in (one, another)))
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
        writer, attempt = self.workers[held.worker].writer, held.attempt
        await writer.until(lambda: attempt.closed.done() or not attempt.pending)

    @rule(many=st.integers(0, 2), state=st.sampled_from(["completed", "completed", "failed"]), cuts=CUTS)
    def the_holder_finishes(self, many: int, state: str, cuts: list[tuple[str, str]]) -> None:
        if self._is_held():
            self.thread.run(self._finish(many, state, cuts))

    async def _finish(self, many: int, state: str, cuts: list[tuple[str, str]]) -> None:
        assert self.holder is not None
        self._will_be_cut(self.holder.worker, cuts)
        self.model.accepted += self._produce(self.holder, many)
        self.holder.attempt.finish(state, "", SUMMARY, 1 if state == "completed" else None)
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
        self.holder.attempt.quit("engine_failed")
        with pytest.raises(Fenced):
            await self.holder.attempt.closed
        self.holder = None

    @rule(many=MANY, finishing=st.booleans(), appends=st.integers(0, 1))
    def the_holder_dies(self, many: int, finishing: bool, appends: int) -> None:
        """With a command on its way that reaches Redis later, or never."""
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
            held.attempt.finish("completed", "", SUMMARY, 1)
        await worker.cable.hung.wait()
        await worker.writer.stop()
        self.holder = None
        self.zombies = [zombie for zombie in self.zombies if zombie.worker != held.worker]
        worker.cable.mend()
        worker.writer = await self._writer(worker.cable)

        def appended() -> None:
            if model is self.model and not model.terminal and not model.ending and held.attempt.epoch == model.fence:
                model.accepted += produced
                model.ending = "completed" if finishing else ""

        def closed() -> None:
            model.terminal = True

        if appends:  # the seal is there, the terminal entry is not
            appended()
            self.on_arrival.append(closed)
        else:
            self.on_arrival.append(appended)

    @rule()
    def the_late_arrive(self) -> None:
        self.thread.run(self._arrive())

    async def _arrive(self) -> None:
        for worker in self.workers:
            await worker.cable.arrive()
        # Effects exclude each other by epoch, so that they can be told in the order of the cuts.
        for effect in self.on_arrival:
            effect()
        self.on_arrival.clear()

    @rule(index=st.integers(0, 5), many=MANY, finishing=st.booleans(), cuts=CUTS)
    def a_zombie_appends(self, index: int, many: int, finishing: bool, cuts: list[tuple[str, str]]) -> None:
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
            zombie.attempt.finish("completed", "", SUMMARY, 1)
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
                counts = await self.ender_store.end(self.model.request_id, "cancelled", Reason.CANCELLED, before)
                break
            except JournalUnavailable:
                cut = True  # asked again it may find its own entry, and say that somebody has ended it
        self.ender.mend()
        assert not (counts and self.model.ending), f"it was {self.model.ending} before"
        assert counts or cut or self.model.ending
        self.model.terminal |= not has_ended(before)  # whoever knows that it has ended leaves it as it is
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
            held.attempt.finish("completed", "", SUMMARY, None)
        counts = await self.world.store.end(model.request_id, "cancelled", Reason.CANCELLED, before)
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
        """Without the last entries, though nothing before the opening of the one who still knows them."""
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

    # -- reading -------------------------------------------------------------------------------------------------

    @rule(seen=st.integers(0, 8))
    def a_client_comes(self, seen: int) -> None:
        if len(self.clients) < 4:
            self.clients.append(Client(JournalReader(seen=seen), seen))

    @rule()
    def the_clients_read_on(self) -> None:
        for client in self.clients:
            for entry in self.thread.run(self.world.store.read(self.model.request_id, client.reader.position)) or ():
                client.reader.feed(entry)
            client.got += client.reader.take()
            self._has_what_counts(client)

    def _has_what_counts(self, client: Client) -> None:
        assert client.got == b"".join(self.model.accepted[client.seen :])
        ending = client.reader.ending
        assert (ending.state if ending else "") == self.model.ending

    @rule()
    def somebody_remembers_the_journal_as_it_is(self) -> None:
        self.stale = self._entries()

    async def _read(self) -> list[Entry]:
        entries = await self.world.store.read(self.model.request_id)
        assert entries
        return entries

    def _entries(self) -> list[Entry]:
        return self.thread.run(self._read())

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def the_journal_is_what_the_model_says(self) -> None:
        if not self.model.request_id:
            return
        entries, model = self._entries(), self.model
        ids = [entry.id for entry in entries]
        assert ids == sorted(set(ids))
        assert (TERMINAL_ID in ids) == model.terminal
        trimmed = ids == [TERMINAL_ID]
        assert trimmed or max([entry_id.epoch for entry_id in ids if entry_id != TERMINAL_ID]) == model.fence
        bodies = [entry.body for entry in entries if entry.id.epoch]
        whole = transcript(entries[-1])
        body = whole if trimmed and whole is not None else b"".join(bodies)
        numbers = [int(part.split(b"\n")[0].removeprefix(b"id: ")) for part in body.split(SEPARATOR)[:-1]]
        assert numbers == list(range(1, len(model.accepted) + 1))
        assert body == b"".join(model.accepted)
        assert whole is None or whole == body
        self._one_ending_counts(entries)
        for seen in {0, len(model.accepted) // 2}:
            reader = JournalReader(seen=seen)
            for entry in entries:
                reader.feed(entry)
            self._has_what_counts(Client(reader, seen, reader.take()))

    def _one_ending_counts(self, entries: list[Entry]) -> None:
        endings = [index for index, entry in enumerate(entries) if entry.ends]
        assert bool(endings) == bool(self.model.ending)
        if endings:
            first = entries[endings[0]]
            assert first.state == self.model.ending
            assert first.id == TERMINAL_ID or first.id == seal_id(first.id.epoch)
            for later in entries[endings[0] + 1 :]:  # openings, which find it ended, and what closes the journal
                assert not later.body
                assert later.id.seq == 0 or later.id == TERMINAL_ID


# -- the queue -----------------------------------------------------------------------------------------------

CONSUMERS = ("ingress-1", "ingress-2", "ingress-3")
CONSUMER = st.sampled_from(CONSUMERS)
ACKNOWLEDGED = "acknowledged"
COMMANDS = st.sampled_from(["XREADGROUP", "XCLAIM", "XACK", "XDEL", "XPENDING", ""])


@dataclass
class Ingress:
    """One consumer: its way to Redis, and the claims that it knows of."""

    cable: Cable
    redis: Redis
    link: RedisLink
    queue: RequestQueue
    carried: dict[str, QueueEntry] = field(default_factory=dict)


class QueueMachine(RuleBasedStateMachine):
    """Three ingresses at one queue; `owners`: who has which entry ('' while it waits)."""

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.thread = LoopThread()
        self.redis_url = redis_url
        self.owners: dict[str, str] = {}
        self.classes: dict[str, str] = {}
        self.requests: list[str] = []
        self.known: dict[str, QueueEntry] = {}
        self.alive = set(CONSUMERS)
        self.thread.run(self._start())

    async def _start(self) -> None:
        self.world = World(self.redis_url, f"t-model-{next(_examples)}", redis=_redis(self.redis_url))
        self.lines = self.world.queue()
        self.ingresses = {}
        for name in CONSUMERS:
            cable = Cable(self.redis_url)
            await cable.start()
            its = _at(cable, self.world.settings.namespace)
            client, link = connect_redis(its.redis), RedisLink(its.redis)
            queue = RequestQueue(client, link, its.namespace, its.model.name, name)
            self.ingresses[name] = Ingress(cable, client, link, queue)
        await self._enqueue("standard", "req_new")  # comes before anybody has made the groups

    def teardown(self) -> None:
        self.thread.run(self._stop())
        self.thread.end()

    async def _stop(self) -> None:
        for ingress in self.ingresses.values():
            await ingress.link.close()
            await ingress.redis.aclose()
        await self.world.stop()

    # -- rules -------------------------------------------------------------------------------------------------

    @rule(request_class=st.sampled_from(["realtime", "standard", "batch"]), many=MANY)
    def requests_come(self, request_class: str, many: int) -> None:
        for _ in range(many):
            self.requests.append(f"req_{len(self.requests)}")
            self.thread.run(self._enqueue(request_class, self.requests[-1]))

    @rule(index=st.integers(0, 20))
    def a_request_is_enqueued_again(self, index: int) -> None:
        if self.requests:
            self.thread.run(self._enqueue("standard", self.requests[index % len(self.requests)]))

    async def _enqueue(self, request_class: str, request_id: str) -> None:
        stream = self.lines.stream(request_class)
        entry = self.lines.fields(request_id, "tenant", "session", 123, 7)
        entry_id = (await self.world.redis.xadd(stream, {**entry})).decode()
        # Streams count for themselves: two classes may have given the same id.
        self._new(stream, entry_id)

    @rule()
    def a_request_is_admitted(self) -> None:
        self.requests.append(f"req_{len(self.requests)}")
        self.thread.run(self._admit(self.requests[-1], again=False))

    @rule()
    def a_request_is_admitted_again(self) -> None:
        """Redis refuses the second first entry, yet a transaction goes on: the queue has it twice."""
        self.requests.append(f"req_{len(self.requests)}")
        self.thread.run(self._admit(self.requests[-1], again=True))

    async def _admit(self, request_id: str, again: bool) -> None:
        stream = self.lines.stream("standard")
        await self.world.admit(request_id)
        if again:
            with pytest.raises(JournalUnavailable):
                await self.world.admit(request_id)
        for entry_id, _ in await self.world.redis.xrevrange(stream, count=2 if again else 1):
            self._new(stream, entry_id.decode())

    def _new(self, stream: str, entry_id: str) -> None:
        name = f"{stream} {entry_id}"
        assert name not in self.owners
        self.owners[name] = ""

    @rule(
        name=CONSUMER,
        word=COMMANDS,
        how=st.sampled_from([UNSENT, UNANSWERED]),
        times=st.integers(1, 2),
    )
    def a_connection_will_be_cut(self, name: str, word: str, how: str, times: int) -> None:
        """Twice, since redis-py hides the first."""
        for _ in range(times):
            self.ingresses[name].cable.cut(word, how)

    @rule(name=CONSUMER, room=st.integers(1, 7))
    def one_claims(self, name: str, room: int) -> None:
        self.thread.run(self._claim(name, room))

    async def _claim(self, name: str, room: int) -> None:
        """Of what waits, or of what comes now."""
        if "" not in self.owners.values():
            for request_class in ("standard", "batch"):
                await self._enqueue(request_class, "req_new")
        ingress = self.ingresses[name]
        ingress.cable.cuts.clear()
        before = dict(self.owners)
        try:
            claimed = await ingress.queue.claim(room)
        except JournalUnavailable:
            assert ingress.cable.cuts
            claimed = []
        assert len({_name(entry) for entry in claimed}) == len(claimed), "twice in one answer"
        self._take(name, claimed)
        for entry in claimed:
            assert before[_name(entry)] == "", "it did not wait"
        lost = await self._changed(name)
        assert not lost or (UNANSWERED, "XREADGROUP") in ingress.cable.cuts, "claimed without being told"
        assert all(before[entry] == "" for entry in lost)
        if not ingress.cable.cuts and "" in before.values():
            assert claimed, "something waited"

    def _take(self, name: str, taken: list[QueueEntry]) -> None:
        for entry in taken:
            assert self.owners[_name(entry)] != ACKNOWLEDGED, "it came back"
            self.owners[_name(entry)] = name
            self.ingresses[name].carried[_name(entry)] = self.known[_name(entry)] = entry

    async def _changed(self, name: str) -> list[str]:
        """Entries that one was given without knowing, by an answer that was lost."""
        theirs = await self._pending()
        lost = [entry for entry, owner in theirs.items() if owner == name and self.owners[entry] != name]
        self.owners |= dict.fromkeys(lost, name)
        return lost

    async def _pending(self) -> dict[str, str]:
        pending = {}
        for request_class in ("realtime", "standard", "batch"):
            stream = self.lines.stream(request_class)
            for item in await self.world.redis.xpending_range(stream, GROUP, "-", "+", 10_000):
                pending[f"{stream} {item['message_id'].decode()}"] = item["consumer"].decode()
        return pending

    @rule(name=CONSUMER, room=st.integers(1, 7))
    def one_claims_and_is_not_told(self, name: str, room: int) -> None:
        """The second answer is lost too, since redis-py hides the first."""
        self.ingresses[name].cable.mend()
        for _ in range(2):
            self.ingresses[name].cable.cut("XREADGROUP", UNANSWERED)
        self.thread.run(self._claim(name, room))

    @rule(name=CONSUMER, index=st.integers(0, 20), times=st.integers(1, 2))
    def one_acknowledges(self, name: str, index: int, times: int) -> None:
        """What it carries, be it still its own or taken over meanwhile."""
        carried = self.ingresses[name].carried
        if not carried:
            self.thread.run(self._claim(name, 3))
        if carried:
            entry = carried.pop(list(carried)[index % len(carried)])
            for _ in range(times):
                self.thread.run(self._acknowledge(name, entry))

    @rule(name=CONSUMER, index=st.integers(0, 20))
    def somebody_acknowledges_again(self, name: str, index: int) -> None:
        done = [entry for entry in self.known.values() if self.owners[_name(entry)] == ACKNOWLEDGED]
        if done:
            entry = done[index % len(done)]
            self.thread.run(self._acknowledge(name, entry))

    async def _acknowledge(self, name: str, entry: QueueEntry) -> None:
        while True:
            try:
                await self.ingresses[name].queue.acknowledge(entry)
                break
            except JournalUnavailable:
                continue  # as the carrier does, until it is reached
        self.owners[_name(entry)] = ACKNOWLEDGED

    @rule(name=CONSUMER, sleeps=st.booleans())
    def one_loses_its_lease(self, name: str, sleeps: bool) -> None:
        """Who slept comes back with what it carried, who died under its old name with nothing."""
        if not self.ingresses[name].carried:
            self.thread.run(self._claim(name, 3))
        if len(self.alive) > 1:
            self.alive.discard(name)
        if not sleeps:
            self.ingresses[name].carried.clear()

    @rule(name=CONSUMER)
    def one_comes_back(self, name: str) -> None:
        self.alive.add(name)

    @rule(
        index=st.integers(0, 2), cuts=st.lists(st.tuples(COMMANDS, st.sampled_from([UNSENT, UNANSWERED])), max_size=3)
    )
    def one_takes_over(self, index: int, cuts: list[tuple[str, str]]) -> None:
        names = sorted(self.alive)
        name = names[index % len(names)]
        self.ingresses[name].cable.mend()
        for cut in cuts:
            self.ingresses[name].cable.cut(*cut)
        self.thread.run(self._take_over(name))

    async def _take_over(self, name: str) -> None:
        ingress = self.ingresses[name]
        ingress.cable.cuts.clear()
        due = self._due(name)
        try:
            taken = await ingress.queue.take_over(sorted(self.alive), self._ids(name))
        except JournalUnavailable:
            assert ingress.cable.cuts
            changed = await self._changed(name)
            assert set(changed) <= due
            return
        assert {_name(entry) for entry in taken} == due
        assert all(entry.taken_over for entry in taken)
        self._take(name, taken)
        await self._each_is_with_one_living()

    def _due(self, name: str) -> set[str]:
        """What the dead have, and what this one has without knowing."""
        ids = self._ids(name)
        return {
            entry
            for entry, owner in self.owners.items()
            if (owner in CONSUMERS and owner not in self.alive)
            or (owner == name and entry.partition(" ")[2] not in ids)
        }

    def _ids(self, name: str) -> set[str]:
        return {entry.entry_id for entry in self.ingresses[name].carried.values()}

    async def _each_is_with_one_living(self) -> None:
        for entry in self.known.values():
            for name, ingress in self.ingresses.items():
                ingress.cable.mend()
                (ours,) = await ingress.queue.are_ours([entry])
                assert ours == (self.owners[_name(entry)] == name)
                assert not ours or name in self.alive

    @rule(index=st.integers(0, 2))
    def two_take_over_at_once(self, index: int) -> None:
        if len(self.alive) > 1:
            names = sorted(self.alive)
            self.thread.run(self._two_take_over(names[index % len(names)], names[(index + 1) % len(names)]))

    async def _two_take_over(self, one: str, another: str) -> None:
        calls = []
        dead = {entry for entry, owner in self.owners.items() if owner in CONSUMERS and owner not in self.alive}
        for name in (one, another):
            self.ingresses[name].cable.mend()
            calls.append(self.ingresses[name].queue.take_over(sorted(self.alive), self._ids(name)))
        got = dict(zip((one, another), await asyncio.gather(*calls), strict=True))
        pending = await self._pending()
        for name, taken in got.items():
            self._take(name, taken)
        both = {name: {_name(entry) for entry in taken} for name, taken in got.items()}
        for entry in both[one] | both[another] | dead:
            # No limit of idleness here: one may get twice what it has just taken over, and both may get the same.
            # The last who claimed it has it, and is told so.
            assert pending[entry] in (one, another)
            assert entry in both[pending[entry]]
            self.owners[entry] = pending[entry]
        await self._each_is_with_one_living()

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_and_nothing_comes_back(self) -> None:
        self.thread.run(self._compare())

    async def _compare(self) -> None:
        held = set()
        for request_class, depth in (await self.lines.depths()).items():
            stream = self.lines.stream(request_class)
            held |= {f"{stream} {entry_id.decode()}" for entry_id, _ in await self.world.redis.xrange(stream)}
            of_class = [owner for entry, owner in self.owners.items() if entry.startswith(f"{stream} ")]
            assert depth.waiting == of_class.count("")
            assert depth.claimed == sum(owner in CONSUMERS for owner in of_class)
        assert held == {entry for entry, owner in self.owners.items() if owner != ACKNOWLEDGED}
        assert await self._pending() == {entry: owner for entry, owner in self.owners.items() if owner in CONSUMERS}


def _name(entry: QueueEntry) -> str:
    return f"{entry.stream} {entry.entry_id}"


# -- what they have found ----------------------------------------------------------------------------------------


def test_a_connection_cut_while_a_refusal_is_read_back_leaves_nobody_waiting(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w, asyncio.timeout(PATIENCE_S):
            cable = Cable(redis_url)
            await cable.start()
            writer = JournalWriter(_at(cable, namespace))
            await writer.start()
            before = await w.admit()
            fenced, _ = await writer.open(before, 1, b"nonce-1", OPENED)
            whole, _ = await writer.open(await w.admit("req_2"), 1, b"nonce-2", OPENED)
            assert await w.store.end(before, "cancelled", Reason.CANCELLED, await w.entries())
            cable.cut("XRANGE", UNANSWERED)
            for attempt in (fenced, whole):  # one flush: what Redis accepted of it is not known before the other is
                add(attempt, 1)
                finish(attempt)
            with pytest.raises(Fenced):
                await fenced.closed
            await whole.closed
            await writer.stop()

    asyncio.run(main())


def test_who_gives_up_and_is_not_answered_is_let_go(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w, asyncio.timeout(PATIENCE_S):
            cable = Cable(redis_url)
            await cable.start()
            writer = JournalWriter(_at(cable, namespace))
            await writer.start()
            attempt, _ = await writer.open(await w.admit(), 1, b"nonce-1", OPENED)
            cable.cut("XADD", UNANSWERED)
            attempt.quit("engine_failed")
            with pytest.raises(Fenced):
                await attempt.closed
            await writer.stop()

    asyncio.run(main())


def test_a_journal_that_was_compacted_cannot_be_ended_again(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            attempt, _ = await (await w.writer()).open(await w.admit(), 1, b"nonce-1", OPENED)
            add(attempt, 1)
            finish(attempt)
            await attempt.closed
            while len(entries := await w.entries()) > 1:
                await asyncio.sleep(0)
            assert not await w.store.end("req_1", "expired", Reason.DEADLINE, entries)

    asyncio.run(main())


def test_an_ending_does_not_count_although_the_seal_before_it_is_not_the_last(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            before = await w.entries()
            seal = {b"n": b"nonce-1", b"e": b"0", b"k": b"completed", b"w": b""}
            await w.redis.xadd(w.store.key("req_1"), {**seal}, id=str(seal_id(1)))
            await w.opened(await w.writer(), 2, b"nonce-2")  # by who finds it ended
            assert not await w.store.end("req_1", "cancelled", Reason.CANCELLED, before)

    asyncio.run(main())


# -- the tests -----------------------------------------------------------------------------------------------


def _run(machine: Callable[[], RuleBasedStateMachine], examples: int, steps: int) -> None:
    within = settings(
        max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck), print_blob=False
    )
    run_state_machine_as_test(machine, settings=within)


def test_a_journal_is_what_its_model_says(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", (0.001,))
    _run(lambda: JournalMachine(redis_url), examples=100, steps=40)


def test_a_queue_is_what_its_model_says(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "_TAKEN_MS", 0)
    monkeypatch.setattr(queue_module, "_ANSWER_LOST_MS", 0)
    monkeypatch.setattr(queue_module, "_BLOCK_MS", 1)
    _run(lambda: QueueMachine(redis_url), examples=25, steps=30)
