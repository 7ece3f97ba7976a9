"""A client whose ingress has died sends its request again, and gets the answer of the first one.
Two that ask for the same while their ingresses live get an answer each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from serve_app.contract import IngressLease, Reason, State
from serve_app.errors import RequestRefused
from serve_app.ingress.exchange import Exchange
from serve_app.policy.tenant_limits import Limits
from serve_app.policy.tenants import Tenant
from serve_app.redis.keyspace import twins_key
from tests.journal.admitting import StillIngress
from tests.journal.journal_helpers import (
    OPENED,
    World,
    add,
    added,
    complete,
    events,
    everything,
    world,
)
from tests.waiting import PATIENCE_S, eventually

NEVER: dict[str, Any] = {"ingress": {"disconnect_grace_s": 1e6, "lost_reader_grace_s": 1e5}}
BODIES = [b'{"prompt": "Hello"}', b'{"prompt": "Hello!"}']
SOMEBODY = Tenant("t")
MOST = 32
names = itertools.count(1)


@pytest.fixture
def sections() -> dict[str, Any]:
    return NEVER


async def born(w: World) -> StillIngress:
    """An ingress that listens."""
    name = f"ingress-{next(names)}"
    ingress = StillIngress(w.settings, name)
    await ingress.membership.join_as_ingress(lambda: IngressLease(name, "session-1"))
    await ingress.followers.start()
    await eventually(lambda: w.subscribers(ingress.followers.channel))
    return ingress


async def dies(w: World, ingress: StillIngress) -> None:
    """As by `kill -9`: nothing is told to Redis, whose connections break."""
    for task in ingress.disconnects.tasks:
        task.cancel()
    await ingress.followers.stop()
    await ingress.base.link.close()
    await ingress.base.lease_link.close()
    await eventually(lambda: _silent(w, ingress))


async def _silent(w: World, ingress: StillIngress) -> bool:
    return not await w.subscribers(ingress.followers.channel)


async def ends(w: World, request_id: str, state: State) -> None:
    await w.ended(request_id, state, None if state is State.COMPLETED else Reason.CANCELLED)


async def leaves(w: World, exchange: Exchange) -> None:
    """Its client has closed the connection, and Redis knows it."""
    assert exchange.facts
    key, name = twins_key(w.settings.namespace, exchange.facts.twins), exchange.follower.request_id
    exchange.leave(departed=True)

    async def unlisted() -> bool:
        return name.encode() not in (await w.redis.get(key) or b"")

    await eventually(unlisted)


@pytest.fixture
async def two(w: World) -> AsyncIterator[tuple[StillIngress, StillIngress]]:
    """Two ingresses, of which the first will die."""
    pair = await born(w), await born(w)
    yield pair
    for ingress in pair:
        await dies(w, ingress)


Two = tuple[StillIngress, StillIngress]


async def sent(
    ingress: StillIngress,
    tenant: Tenant = SOMEBODY,
    query: str = "",
    path: str = "/v1/completions",
    **headers: str,
) -> str:
    """The id of a request that is sent once more, with something else."""
    body = BODIES[0]
    submission = ingress.submissions.of(tenant, path, query, headers, body, json.loads(body), "")
    return (await ingress.exchanges.submit(submission)).follower.request_id


async def test_a_retry_gets_the_whole_answer_and_counts_once(
    w: World, two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hermes.ingress")
    first, second = two
    asked = await first.submit()
    name, writer = asked.follower.request_id, await w.writer()
    attempt, _ = await writer.open(name, 1, b"nonce", OPENED)
    await added(attempt, 1)
    await dies(w, first)
    again = await second.submit()
    assert (again.follower.request_id, again.facts) == (name, asked.facts)
    assert again.own_headers()["x-request-id"] == name
    assert len(second.limits.waiting) == 0
    add(attempt, 2)
    await complete(attempt)
    assert await everything(again.follower) == events(1, 2)
    assert await w.journals() == [name]
    page = second.base.telemetry.registry
    assert page.get_sample_value("hermes_requests_joined_total") == 1
    assert not page.get_sample_value("hermes_requests_admitted_total", {"class": "standard"})
    assert caplog.messages == [f"request {name} joined by its client: its ingress has died"]


@pytest.mark.parametrize(
    "differs",
    [
        {"tenant": Tenant("another")},
        {"tenant": Tenant("t", key_id="another")},
        {"query": "beta=true"},
        {"x-session-id": "another"},
        {"x-hermes-class": "batch"},
        {"idempotency-key": "a key"},
        {"prefer": "respond-async"},
    ],
    ids=str,
)
async def test_what_is_not_the_same_joins_nothing(
    w: World, two: Two, differs: dict[str, Any]
) -> None:
    name = await sent(two[0])
    await dies(w, two[0])
    assert await sent(two[1], **differs) != name
    assert await sent(two[1]) == name


@pytest.mark.parametrize(("late_s", "joins"), [(-60, True), (60, False)])
async def test_an_answer_waits_for_its_retry_for_the_grace(
    w: World, two: Two, later: Callable[[float], None], late_s: float, joins: bool
) -> None:
    name = await sent(two[0])
    await dies(w, two[0])
    await ends(w, name, State.COMPLETED)
    later(w.settings.ingress.lost_reader_grace_s + late_s)
    assert (await sent(two[1]) == name) == joins


async def test_the_oldest_is_joined_first_and_so_many_are_known(w: World, two: Two) -> None:
    asked = [await sent(two[0]) for _ in range(MOST + 1)]
    await dies(w, two[0])
    assert [await sent(two[1]) for _ in range(MOST)] == asked[:MOST]
    assert await sent(two[1]) not in asked


async def test_nobody_is_dead_only_because_redis_has_just_started(w: World, two: Two) -> None:
    """Who has not subscribed again itself does not know."""
    name = await sent(two[0])
    await dies(w, two[0])
    await two[1].followers.stop()
    await eventually(lambda: _silent(w, two[1]))
    assert await sent(two[1]) != name


async def test_what_others_have_written_there_is_passed_over(w: World, two: Two) -> None:
    name = await sent(two[0])
    record = await w.store.record(name)
    assert record
    assert record.facts
    key = twins_key(w.settings.namespace, record.facts.twins)
    await w.operator.append(key, b"x\n\n1 2\n9e15 req_1\n%d req_2 nobody:w:x\n\xff" % 10**15)
    await dies(w, two[0])
    assert await sent(two[1]) == name


@pytest.mark.parametrize(
    ("grace_s", "path"), [(0, "/v1/completions"), (60, "/v1/embeddings")], ids=["no grace", "cheap"]
)
async def test_what_is_not_worth_it_costs_redis_nothing(
    redis_url: str, namespace: str, grace_s: float, path: str
) -> None:
    async with world(redis_url, namespace, ingress={"lost_reader_grace_s": grace_s}) as w:
        ingress = await born(w)
        record = await w.store.record(await sent(ingress, path=path))
        assert record
        assert record.facts
        assert record.facts.twins == ""
        await dies(w, ingress)


async def test_who_asks_for_the_same_gets_an_answer_of_its_own(w: World, two: Two) -> None:
    assert len({await sent(one) for one in (*two, *two)}) == 4


async def test_a_retry_joins_though_its_tenants_limits_are_used_up(w: World, two: Two) -> None:
    """Also where others have been refused just now, so that Redis is asked without the body."""
    for limits in (Limits(concurrent_requests=1), Limits(requests_per_minute=1)):
        tenant = Tenant(f"t{limits.concurrent_requests}", limits=limits)
        name = await sent(two[0], tenant)
        for _ in range(2):
            with pytest.raises(RequestRefused):
                await sent(two[1], tenant)
        await two[0].followers.stop()
        await eventually(lambda: _silent(w, two[0]))
        assert await sent(two[1], tenant) == name
        await two[0].followers.start()
        await eventually(lambda: w.subscribers(two[0].followers.channel))


async def test_what_a_client_has_left_is_not_joined_though_its_ingress_dies_then(
    w: World, two: Two
) -> None:
    asked = await two[0].submit()
    await leaves(w, asked)
    await dies(w, two[0])
    assert (await two[1].submit()).follower.request_id != asked.follower.request_id


@dataclass(eq=False)
class Asked:
    """A request, in the model. `reads`: the ingress at which its client reads, dead or alive; None
    if the client has left.
    """

    request_id: str
    body: bytes
    reads: StillIngress | None
    exchange: Exchange
    over: bool = False
    """Whether it has failed, or its answer has reached a living ingress."""
    ended: bool = False


class Retries(RuleBasedStateMachine):
    """Two ingresses, of which each may die and has a successor, and clients that leave, send again
    or read on.
    """

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.asked: list[Asked] = []
        self.dead: set[StillIngress] = set()
        self.loop.run(self.start(redis_url))

    async def start(self, redis_url: str) -> None:
        self.w = World(redis_url, f"t-twins-{next(names)}", **NEVER)
        self.ingresses = [await born(self.w), await born(self.w)]

    async def stop(self) -> None:
        for ingress in self.ingresses:
            await dies(self.w, ingress)
        await self.w.stop()

    def teardown(self) -> None:
        self.loop.run(self.stop())
        self.loop.close()

    def run(self, step: Any) -> Any:
        return self.loop.run(asyncio.wait_for(step, PATIENCE_S))

    def lost(self, one: Asked) -> bool:
        return one.reads in self.dead and not one.over

    @rule(at=st.integers(0, 1), body=st.sampled_from(BODIES))
    def a_client_sends(self, at: int, body: bytes) -> None:
        ingress = self.ingresses[at]
        exchange = self.run(ingress.submit(body=body))
        lost = [one for one in self.asked if self.lost(one) and one.body == body]
        found = [one for one in lost if one.request_id == exchange.follower.request_id]
        assert bool(found) == bool(lost)
        if not lost:
            name = exchange.follower.request_id
            assert name not in [one.request_id for one in self.asked]
            self.asked.append(Asked(name, body, ingress, exchange))
        for one in found:
            one.reads, one.exchange, one.over = ingress, exchange, one.ended

    @rule(at=st.integers(0, 1))
    def an_ingress_dies(self, at: int) -> None:
        self.dead.add(self.ingresses[at])
        self.run(dies(self.w, self.ingresses[at]))
        self.ingresses[at] = self.run(born(self.w))

    def one(self, data: Any, those: Callable[[Asked], bool]) -> Asked | None:
        able = [one for one in self.asked if those(one)]
        return data.draw(st.sampled_from(able)) if able else None

    @rule(data=st.data())
    def a_client_leaves(self, data: Any) -> None:
        """Its ingress lives to see it, and dies perhaps before anything is cancelled."""
        able = lambda one: one.reads in self.ingresses and not one.ended  # noqa: E731
        if one := self.one(data, able):
            self.run(leaves(self.w, one.exchange))
            one.reads = None

    @rule(data=st.data(), at=st.integers(0, 1))
    def a_client_reads_on_by_the_id(self, data: Any, at: int) -> None:
        if one := self.one(data, lambda one: not one.ended and self.lost(one)):
            attaching = self.ingresses[at].exchanges.attach(one.request_id, "", 0, False, True)
            one.exchange, one.reads = self.run(attaching), self.ingresses[at]

    @rule(data=st.data(), state=st.sampled_from([State.COMPLETED, State.CANCELLED]))
    def a_request_ends(self, data: Any, state: State) -> None:
        if one := self.one(data, lambda one: not one.ended):
            self.run(ends(self.w, one.request_id, state))
            one.ended = True
            one.over = state is State.CANCELLED or one.reads not in self.dead


def test_each_request_that_lost_its_ingress_is_joined_once_and_no_other(redis_url: str) -> None:
    within = settings(
        max_examples=10,
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(lambda: Retries(redis_url), settings=within)  # type: ignore[arg-type] # it calls it
