"""An `Idempotency-Key` stands for one request at a time, and for a new one after a failure that passes."""

from __future__ import annotations

import asyncio

import pytest
from doors import door, ending, journals
from journal_helpers import World, world

from serve_app.errors import LASTING, Reason, RequestRefused
from serve_app.journal.entries import RequestLine
from serve_app.journal.keyed import KeyedRequests, Outrun

KEY = "a key"


async def end(w: World, request_id: str, state: str, reason: Reason | str = "") -> None:
    entries = await w.store.outline(request_id)
    assert entries is not None
    assert await w.store.end(request_id, state, reason, entries)  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["", *LASTING])
def test_what_completed_or_would_fail_again_answers_its_key(redis_url: str, namespace: str, reason: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w, door(w) as its:
            first, _ = await its.post(KEY)
            await end(w, first.request_id, "failed" if reason else "completed", reason)
            again, _ = await its.post(KEY)
            assert again.request_id == first.request_id
            assert again.reader.ending is not None

    asyncio.run(main())


@pytest.mark.parametrize(
    "reason",
    [
        Reason.CLIENT_DISCONNECTED, Reason.CANCELLED, Reason.DEADLINE, Reason.ATTEMPT_LOST, Reason.ENGINE_ERROR,
        Reason.QUEUE_FULL,
    ],
)  # fmt: skip
def test_after_a_failure_that_passes_a_repeat_is_a_new_request(redis_url: str, namespace: str, reason: Reason) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w, door(w) as its:
            first, _ = await its.post(KEY)
            await end(w, first.request_id, "failed", reason)
            second, _ = await its.post(KEY)
            assert second.request_id != first.request_id
            assert await ending(w, second.request_id) == ""
            assert (await its.post(KEY))[0].request_id == second.request_id, "it is the one now"
            with pytest.raises(RequestRefused) as refusal:
                await its.post(KEY, b'{"prompt": "Another"}')
            assert refusal.value.reason == Reason.IDEMPOTENCY_CONFLICT
            await end(w, second.request_id, "failed", reason)
            third, _ = await its.post(KEY)
            assert third.request_id not in (first.request_id, second.request_id)
            await end(w, third.request_id, "completed")
            assert (await its.post(KEY))[0].request_id == third.request_id

    asyncio.run(main())


@pytest.mark.parametrize("failed_before", [False, True])
def test_of_fifty_repeats_at_once_over_two_ingresses_one_is_admitted(
    redis_url: str, namespace: str, failed_before: bool
) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w, door(w, "a") as one, door(w, "b") as two:
            before = set()
            if failed_before:
                follower, _ = await one.post(KEY)
                await end(w, follower.request_id, "cancelled", Reason.CLIENT_DISCONNECTED)
                before = {follower.request_id}
            answers = await asyncio.gather(*((one, two)[number % 2].post(KEY) for number in range(50)))
            (request_id,) = {follower.request_id for follower, _ in answers}
            assert set(await journals(w)) == before | {request_id}
            assert await w.redis.xlen(w.queue().stream("standard")) == 1 + len(before)

    asyncio.run(main())


def test_a_name_outlives_the_journal_that_it_leads_to(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w, door(w) as its:
            first, _ = await its.post(KEY)
            await end(w, first.request_id, "failed", Reason.DEADLINE)
            second, _ = await its.post(KEY)
            (name,) = [key async for key in w.operator.scan_iter(f"{namespace}:i:*")]
            assert await w.redis.pttl(name) > await w.redis.pttl(w.store.key(second.request_id)) > 0
            await w.redis.delete(w.store.key(second.request_id))  # as when it has expired
            third, _ = await its.post(KEY)
            assert third.request_id not in (first.request_id, second.request_id)

    asyncio.run(main())


@pytest.mark.parametrize("known", ["nothing", "a failure", "a name"])
def test_who_has_looked_before_another_was_admitted_is_not(redis_url: str, namespace: str, known: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w, door(w) as its:
            for _ in range(("nothing", "a failure", "a name").index(known)):
                follower, _ = await its.post(KEY)
                await end(w, follower.request_id, "failed", Reason.DEADLINE)
            keyed = KeyedRequests(w.settings, w.store, w.link)
            slow = await keyed.held("tenant", KEY)
            assert not slow.stands
            follower, facts = await its.post(KEY)
            enqueue = (w.queue().stream("standard"), w.queue().fields("x", "t", "s", 1, 1))
            with pytest.raises(Outrun):
                await keyed.admit(slow, RequestLine("POST", "/", "", []), b"", facts, enqueue)
            assert await w.redis.xlen(w.queue().stream("standard")) == len(await journals(w))

    asyncio.run(main())
