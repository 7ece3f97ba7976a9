"""An `Idempotency-Key` stands for one request at a time, and for a new one after a temporary
failure.
"""

from __future__ import annotations

import asyncio

import pytest

from serve_app.contract import Reason, State
from serve_app.errors import REASONS, RequestRefused
from serve_app.policy.work import Work
from serve_app.redis.keyspace import later_request_key
from serve_app.requests.idempotency import KeyedRequests, Outrun
from serve_app.requests.lifecycle import Offer
from tests.journal.admitting import StillIngress, admitting
from tests.journal.journal_helpers import LINE, World

KEY = "a key"


@pytest.mark.parametrize("reason", [None, *(one for one, row in REASONS.items() if row.lasting)])
async def test_what_completed_or_would_fail_again_answers_its_key(
    w: World, its: StillIngress, reason: Reason | None
) -> None:
    first, _ = await its.post(KEY)
    state = State.FAILED if reason else State.COMPLETED
    await w.ended(first.request_id, state, reason)
    again, _ = await its.post(KEY)
    assert again.request_id == first.request_id
    assert again.reader.ending is not None


@pytest.mark.parametrize("reason", [Reason.CLIENT_DISCONNECTED, Reason.ENGINE_ERROR])
async def test_after_a_failure_that_passes_a_repeat_is_a_new_request(
    w: World, its: StillIngress, reason: Reason
) -> None:
    first, _ = await its.post(KEY)
    await w.ended(first.request_id, State.FAILED, reason)
    second, _ = await its.post(KEY)
    assert second.request_id != first.request_id
    assert await w.ending(second.request_id) == ("", "")
    assert (await its.post(KEY))[0].request_id == second.request_id, "it is the one now"
    with pytest.raises(RequestRefused) as refusal:
        await its.post(KEY, b'{"prompt": "Another"}')
    assert refusal.value.reason == Reason.IDEMPOTENCY_CONFLICT
    await w.ended(second.request_id, State.FAILED, reason)
    third, _ = await its.post(KEY)
    assert third.request_id not in (first.request_id, second.request_id)
    await w.ended(third.request_id, State.COMPLETED)
    assert (await its.post(KEY))[0].request_id == third.request_id


async def test_a_repeat_takes_no_place_among_those_that_wait(its: StillIngress) -> None:
    first, again = await its.submit(KEY), await its.submit(KEY)
    again.leave(departed=False)
    assert len(its.limits.waiting) == 1
    first.leave(departed=False)
    assert len(its.limits.waiting) == 0


@pytest.mark.parametrize("failed_before", [False, True])
async def test_of_fifty_repeats_at_once_over_two_ingresses_one_is_admitted(
    w: World, its: StillIngress, failed_before: bool
) -> None:
    before = set()
    if failed_before:
        follower, _ = await its.post(KEY)
        await w.ended(follower.request_id, State.CANCELLED, Reason.CLIENT_DISCONNECTED)
        before = {follower.request_id}
    async with admitting(w.settings, "ingress-2") as other:
        both = (its, other)
        answers = await asyncio.gather(*(both[number % 2].post(KEY) for number in range(50)))
    (request_id,) = {follower.request_id for follower, _ in answers}
    assert set(await w.journals()) == before | {request_id}
    assert await w.redis.xlen(w.stream("standard")) == 1


async def test_a_repeat_joins_however_many_requests_wait(w: World) -> None:
    full = w.settings.model_copy(
        update={"queue": w.settings.queue.model_copy(update={"max_waiting_standard": 1})}
    )
    async with admitting(full) as its:
        first, _ = await its.post(KEY)
        its.limits.depths = await w.depths()
        with pytest.raises(RequestRefused):
            await its.post("another key")
        assert (await its.post(KEY))[0].request_id == first.request_id


async def test_a_name_outlives_the_journal_that_it_leads_to(
    w: World, namespace: str, its: StillIngress
) -> None:
    first, _ = await its.post(KEY)
    await w.ended(first.request_id, State.FAILED, Reason.DEADLINE)
    second, _ = await its.post(KEY)
    (name,) = [key async for key in w.operator.scan_iter(later_request_key(namespace, "*"))]
    assert await w.redis.pttl(name) > await w.redis.pttl(w.store.key(second.request_id)) > 0
    await w.redis.unlink(w.store.key(second.request_id))  # as when it has expired
    third, _ = await its.post(KEY)
    assert third.request_id not in (first.request_id, second.request_id)


@pytest.mark.parametrize("failures", [0, 1, 2], ids=["nothing", "a failure", "a name"])
async def test_a_repeat_that_read_before_another_was_admitted_is_not_admitted(
    w: World, its: StillIngress, failures: int
) -> None:
    for _ in range(failures):
        follower, _ = await its.post(KEY)
        await w.ended(follower.request_id, State.FAILED, Reason.DEADLINE)
    keyed = KeyedRequests(w.settings, w.store, w.link)
    slow = await keyed.held("tenant", KEY)
    assert not slow.stands
    follower, facts = await its.post(KEY)
    with pytest.raises(Outrun):
        await keyed.accept(slow, Offer(slow.request_id, LINE, b"", facts, Work(1)))
    assert await w.redis.xlen(w.stream("standard")) == 1
    assert len(await w.journals()) == failures + 1


async def test_a_key_belongs_to_one_tenant(w: World) -> None:
    keyed = KeyedRequests(w.settings, w.store, w.link)
    ids = [(await keyed.held(tenant, KEY)).request_id for tenant in ("acme", "acme", "zeta")]
    assert ids[0] == ids[1] != ids[2]
