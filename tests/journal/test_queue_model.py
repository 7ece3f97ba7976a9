"""The queue equals its model after any sequence of claims, cuts and take-overs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.policy.work import Work
from serve_app.redis.keyspace import QUEUE_GROUP
from serve_app.request_queue.abandoned import AbandonedClaims
from serve_app.request_queue.entry import QueueEntry, encode_entry
from serve_app.request_queue.queue import RequestQueue
from tests.journal.cable import UNANSWERED, UNSENT, Cable
from tests.journal.journal_helpers import World
from tests.journal.state_machines import MANY, LoopMachine, examples, in_the_loop, run_machine

CONSUMERS = ("ingress-1", "ingress-2", "ingress-3")
CONSUMER = st.sampled_from(CONSUMERS)
ACKNOWLEDGED = "acknowledged"
COMMANDS = st.sampled_from(["XREADGROUP", "XCLAIM", "XACK", "XDEL", "XPENDING", ""])


@dataclass
class Ingress:
    """One consumer: its connection to Redis, and the claims that it knows of."""

    cable: Cable
    world: World
    queue: RequestQueue
    abandoned: AbandonedClaims
    carried: dict[str, QueueEntry] = field(default_factory=dict)


class QueueMachine(LoopMachine):
    """Three ingresses on one queue; `owners`: which ingress has which entry ('' while it waits)."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self.owners: dict[str, str] = {}
        self.requests: list[str] = []
        self.known: dict[str, QueueEntry] = {}
        self.alive = set(CONSUMERS)
        super().__init__()

    async def start(self) -> None:
        namespace = f"t-model-{next(examples)}"
        self.world = World(self.redis_url, namespace)
        self.lines = self.world.queue()
        self.ingresses = {}
        for name in CONSUMERS:
            cable = await Cable(self.redis_url).start()
            its = World(cable.url, namespace)
            self.ingresses[name] = Ingress(cable, its, its.queue(name), its.abandoned(name))
        await self._enqueue("standard", "req_new")  # comes before anybody has made the groups

    async def stop(self) -> None:
        for ingress in self.ingresses.values():
            await ingress.world.stop()
        await self.world.stop()

    # -- rules ------------------------------------------------------------------------------------

    @rule(request_class=st.sampled_from(["realtime", "standard", "batch"]), many=MANY)
    @in_the_loop
    async def requests_come(self, request_class: str, many: int) -> None:
        for _ in range(many):
            self.requests.append(f"req_{len(self.requests)}")
            await self._enqueue(request_class, self.requests[-1])

    @rule(index=st.integers(0, 20))
    @in_the_loop
    async def a_request_is_enqueued_again(self, index: int) -> None:
        if self.requests:
            await self._enqueue("standard", self.requests[index % len(self.requests)])

    async def _enqueue(self, request_class: str, request_id: str) -> None:
        stream = self.lines.stream(request_class)
        entry = encode_entry(request_id, "tenant", "session", 123, Work(7))
        entry_id = (await self.world.redis.xadd(stream, {**entry})).decode()
        # Streams count for themselves: two classes may have given the same id.
        self._new(stream, entry_id)

    @rule(again=st.booleans())
    @in_the_loop
    async def a_request_is_admitted(self, again: bool) -> None:
        """Redis refuses a second first entry, yet a transaction goes on: the queue has it twice."""
        self.requests.append(f"req_{len(self.requests)}")
        await self.world.admit(self.requests[-1])
        if again:
            with pytest.raises(RedisUnavailable):
                await self.world.admit(self.requests[-1])
        stream = self.lines.stream("standard")
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
        """Cut it twice, because redis-py hides the first cut."""
        for _ in range(times):
            self.ingresses[name].cable.cut(word, how)

    @rule(name=CONSUMER, room=st.integers(1, 7))
    @in_the_loop
    async def one_claims(self, name: str, room: int) -> None:
        await self._claim(name, room)

    async def _claim(self, name: str, room: int) -> None:
        """Claim entries that wait, or that arrive now."""
        if "" not in self.owners.values():
            for request_class in ("standard", "batch"):
                await self._enqueue(request_class, "req_new")
        ingress = self.ingresses[name]
        ingress.cable.cuts.clear()
        before = dict(self.owners)
        try:
            claimed = await ingress.queue.claim(room)
        except RedisUnavailable:
            assert ingress.cable.cuts
            claimed = []
        assert len({_name(entry) for entry in claimed}) == len(claimed), "twice in one answer"
        self._take(name, claimed)
        for entry in claimed:
            assert before[_name(entry)] == "", "it did not wait"
        lost = await self._changed(name)
        assert not lost or (UNANSWERED, "XREADGROUP") in ingress.cable.cuts, (
            "claimed without being told"
        )
        assert all(before[entry] == "" for entry in lost)
        if not ingress.cable.cuts and "" in before.values():
            assert claimed, "something waited"

    def _take(self, name: str, taken: list[QueueEntry]) -> None:
        for entry in taken:
            assert self.owners[_name(entry)] != ACKNOWLEDGED, "it came back"
            self.owners[_name(entry)] = name
            self.ingresses[name].carried[_name(entry)] = self.known[_name(entry)] = entry

    async def _changed(self, name: str) -> list[str]:
        """Entries that an ingress got without knowing, because the answer was lost."""
        theirs = await self._pending()
        lost = [
            entry for entry, owner in theirs.items() if owner == name and self.owners[entry] != name
        ]
        self.owners |= dict.fromkeys(lost, name)
        return lost

    async def _pending(self) -> dict[str, str]:
        pending = {}
        for request_class in ("realtime", "standard", "batch"):
            stream = self.lines.stream(request_class)
            for item in await self.world.redis.xpending_range(
                stream, QUEUE_GROUP, "-", "+", 10_000
            ):
                pending[f"{stream} {item['message_id'].decode()}"] = item["consumer"].decode()
        return pending

    @rule(name=CONSUMER, room=st.integers(1, 7))
    @in_the_loop
    async def one_claims_and_is_not_told(self, name: str, room: int) -> None:
        """The second answer is lost too, because redis-py hides the first loss."""
        self.ingresses[name].cable.mend()
        for _ in range(2):
            self.ingresses[name].cable.cut("XREADGROUP", UNANSWERED)
        await self._claim(name, room)

    @rule(name=CONSUMER, index=st.integers(0, 20), times=st.integers(1, 2))
    @in_the_loop
    async def one_acknowledges(self, name: str, index: int, times: int) -> None:
        """An ingress acknowledges an entry that it works on, even if another has taken it over."""
        carried = self.ingresses[name].carried
        if not carried:
            await self._claim(name, 3)
        if carried:
            entry = carried.pop(list(carried)[index % len(carried)])
            for _ in range(times):
                await self._acknowledge(name, entry)

    @rule(name=CONSUMER, index=st.integers(0, 20))
    @in_the_loop
    async def somebody_acknowledges_again(self, name: str, index: int) -> None:
        done = [entry for entry in self.known.values() if self.owners[_name(entry)] == ACKNOWLEDGED]
        if done:
            await self._acknowledge(name, done[index % len(done)])

    async def _acknowledge(self, name: str, entry: QueueEntry) -> None:
        while True:
            try:
                await self.ingresses[name].queue.acknowledge(entry)
                break
            except RedisUnavailable:
                continue  # as an attempt does, until it is reached
        self.owners[_name(entry)] = ACKNOWLEDGED

    @rule(name=CONSUMER, sleeps=st.booleans())
    @in_the_loop
    async def one_loses_its_lease(self, name: str, sleeps: bool) -> None:
        """A paused ingress returns with the entries that it worked on; a dead one returns under its
        old name with none.
        """
        if not self.ingresses[name].carried:
            await self._claim(name, 3)
        if len(self.alive) > 1:
            self.alive.discard(name)
        if not sleeps:
            self.ingresses[name].carried.clear()

    @rule(name=CONSUMER)
    def one_comes_back(self, name: str) -> None:
        self.alive.add(name)

    @rule(
        index=st.integers(0, 2),
        cuts=st.lists(st.tuples(COMMANDS, st.sampled_from([UNSENT, UNANSWERED])), max_size=3),
    )
    @in_the_loop
    async def one_takes_over(self, index: int, cuts: list[tuple[str, str]]) -> None:
        names = sorted(self.alive)
        name = names[index % len(names)]
        ingress = self.ingresses[name]
        ingress.cable.mend()
        for cut in cuts:
            ingress.cable.cut(*cut)
        # The entries of dead ingresses, and those that this ingress has without knowing.
        mine = {entry for entry, owner in self.owners.items() if owner == name}
        due = self._of_the_dead() | (mine - set(ingress.carried))
        try:
            taken = await ingress.abandoned.take_over(sorted(self.alive), self._carried(name))
        except RedisUnavailable:
            assert ingress.cable.cuts
            changed = await self._changed(name)
            assert set(changed) <= due
            return
        assert {_name(entry) for entry in taken} == due
        assert all(entry.taken_over for entry in taken)
        self._take(name, taken)
        await self._each_is_with_one_living()

    def _of_the_dead(self) -> set[str]:
        dead = set(CONSUMERS) - self.alive
        return {entry for entry, owner in self.owners.items() if owner in dead}

    def _carried(self, name: str) -> list[QueueEntry]:
        return list(self.ingresses[name].carried.values())

    async def _each_is_with_one_living(self) -> None:
        for entry in self.known.values():
            for name, ingress in self.ingresses.items():
                ingress.cable.mend()
                (ours,) = await ingress.queue.are_ours([entry])
                assert ours == (self.owners[_name(entry)] == name)
                assert not ours or name in self.alive

    @rule(index=st.integers(0, 2))
    @in_the_loop
    async def two_take_over_at_once(self, index: int) -> None:
        if len(self.alive) < 2:
            return
        names = sorted(self.alive)
        one, another = names[index % len(names)], names[(index + 1) % len(names)]
        calls, dead = [], self._of_the_dead()
        for name in (one, another):
            self.ingresses[name].cable.mend()
            calls.append(
                self.ingresses[name].abandoned.take_over(sorted(self.alive), self._carried(name))
            )
        got = dict(zip((one, another), await asyncio.gather(*calls), strict=True))
        pending = await self._pending()
        for name, taken in got.items():
            self._take(name, taken)
        both = {name: {_name(entry) for entry in taken} for name, taken in got.items()}
        for entry in both[one] | both[another] | dead:
            # No limit of idleness here: one may get twice what it has just taken over, and both may
            # get the same. The last who claimed it has it, and is told so.
            assert pending[entry] in (one, another)
            assert entry in both[pending[entry]]
            self.owners[entry] = pending[entry]
        await self._each_is_with_one_living()

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    @in_the_loop
    async def nothing_is_lost_and_nothing_comes_back(self) -> None:
        held = set()
        for request_class, depth in (await self.world.depths()).items():
            stream = self.lines.stream(request_class)
            held |= {
                f"{stream} {entry_id.decode()}"
                for entry_id, _ in await self.world.redis.xrange(stream)
            }
            of_class = [
                owner for entry, owner in self.owners.items() if entry.startswith(f"{stream} ")
            ]
            assert depth.waiting == of_class.count("")
            assert depth.claimed == sum(owner in CONSUMERS for owner in of_class)
        assert held == {entry for entry, owner in self.owners.items() if owner != ACKNOWLEDGED}
        assert await self._pending() == {
            entry: owner for entry, owner in self.owners.items() if owner in CONSUMERS
        }


def _name(entry: QueueEntry) -> str:
    return f"{entry.stream} {entry.entry_id}"


def test_a_queue_is_what_its_model_says(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "TAKE_OVER_IDLE_MS", 0)
    monkeypatch.setattr(timings, "CLAIM_ANSWER_LOST_MS", 0)
    monkeypatch.setattr(timings, "CLAIM_BLOCK_MS", 1)
    run_machine(lambda: QueueMachine(redis_url), examples=25, steps=30)
