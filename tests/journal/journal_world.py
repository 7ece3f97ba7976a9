"""The journal's model and the real journal side by side: three workers, each behind a cable."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve_app.errors import Fenced, RedisUnavailable
from serve_app.journal.attempt import Attempt
from serve_app.journal.entries import Entry, has_ended, transcript
from serve_app.journal.events import SEPARATOR
from serve_app.journal.ids import TERMINAL_ID, seal_id
from serve_app.journal.reader import JournalReader
from serve_app.journal.store import JournalStore
from serve_app.journal.writer import JournalWriter
from serve_app.redis.connection import RespConnection
from serve_app.redis.link import RedisLink
from serve_app.settings import Settings
from tests.journal.cable import LATE, RETRIED, UNANSWERED, UNSENT, Cable, behind
from tests.journal.journal_helpers import HEAD, OPENED, World
from tests.journal.state_machines import LoopThread, examples
from workers.replay import recorded


class ToldWriter(JournalWriter):
    """A writer that announces each completed turn, so that tests need not poll."""

    def __init__(self, its_settings: Settings) -> None:
        super().__init__(its_settings)
        self.turned = asyncio.Event()

    async def _flush(self, connection: RespConnection) -> str:
        try:
            return await super()._flush(connection)
        finally:
            self.turned.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, for one or more turns."""
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
    """An attempt that its worker believes to be current; `events`: the number of events so far, as
    far as it knows.
    """

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
    """Whether the terminal entry is written; then not even an opening can follow."""


@dataclass
class Client:
    """A connected reader, with everything it received after its `Last-Event-ID`."""

    reader: JournalReader
    seen: int
    got: bytes = b""


WORDS = st.sampled_from(["XADD", "XADD", "XREVRANGE", "XRANGE"])
CUTS = st.lists(st.tuples(WORDS, st.sampled_from([UNSENT, UNANSWERED, LATE, RETRIED])), max_size=2)
OPENING_CUTS = st.lists(st.tuples(WORDS, st.sampled_from([UNSENT, UNANSWERED, LATE])), max_size=1)
WORKER = st.integers(0, 2)


class JournalWorld(RuleBasedStateMachine):
    """Three workers, a journal and its model: what the rules are made of, and what always holds."""

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.thread = LoopThread()
        self.redis_url = redis_url
        self.namespace = f"t-model-{next(examples)}"
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
        self.world = World(self.redis_url, self.namespace)
        self.workers = []
        for _ in range(3):
            cable = await Cable(self.redis_url).start()
            self.workers.append(Worker(cable, await self._writer(cable)))
        self.ender = await Cable(self.redis_url).start()
        at_ender = behind(self.ender, self.world.settings)
        self.ender_link = RedisLink(at_ender.redis)
        self.ender_store = JournalStore(at_ender, self.ender_link)

    async def _writer(self, cable: Cable) -> ToldWriter:
        writer = ToldWriter(behind(cable, self.world.settings))
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
        writer, attempt = self.workers[held.worker].writer, held.attempt
        await writer.until(lambda: attempt.closed.done() or not attempt.pending)

    async def _arrive(self) -> None:
        for worker in self.workers:
            await worker.cable.arrive()
        # Effects exclude each other by epoch, so that they can be told in the order of the cuts.
        for effect in self.on_arrival:
            effect()
        self.on_arrival.clear()

    def _has_what_counts(self, client: Client) -> None:
        assert client.got == b"".join(self.model.accepted[client.seen :])
        ending = client.reader.ending
        assert (ending.state if ending else "") == self.model.ending

    async def _read(self) -> list[Entry]:
        entries = await self.world.store.read(self.model.request_id)
        assert entries
        return entries

    def _entries(self) -> list[Entry]:
        return self.thread.run(self._read())

    @invariant()
    def the_journal_is_what_the_model_says(self) -> None:
        if not self.model.request_id:
            return
        entries, model = self._entries(), self.model
        ids = [entry.id for entry in entries]
        assert ids == sorted(set(ids))
        assert (TERMINAL_ID in ids) == model.terminal
        trimmed = ids == [TERMINAL_ID]
        assert (
            trimmed
            or max([entry_id.epoch for entry_id in ids if entry_id != TERMINAL_ID]) == model.fence
        )
        bodies = [entry.body for entry in entries if entry.id.epoch]
        whole = transcript(entries[-1])
        body = whole if trimmed and whole is not None else b"".join(bodies)
        numbers = [
            int(part.split(b"\n")[0].removeprefix(b"id: ")) for part in body.split(SEPARATOR)[:-1]
        ]
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
            for later in entries[
                endings[0] + 1 :
            ]:  # openings, which find it ended, and what closes the journal
                assert not later.body
                assert later.id.seq == 0 or later.id == TERMINAL_ID

    @rule()
    def the_late_arrive(self) -> None:
        self.thread.run(self._arrive())
