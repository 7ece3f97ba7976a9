"""The waiting lines and the leases, on a real Redis."""

from __future__ import annotations

import asyncio
import time

import pytest
from journal_helpers import World, world

from serve_app import membership
from serve_app.errors import JournalUnavailable
from serve_app.membership import IngressLease, Members, Membership
from serve_app.request_queue.queue import RequestQueue
from serve_app.snapshots import Snapshots
from serve_app.telemetry import Telemetry


async def enqueue(w: World, request_class: str, *request_ids: str) -> None:
    queue = w.queue()
    for request_id in request_ids:
        fields = queue.fields(request_id, "tenant", "session", 123, 7)
        await w.redis.xadd(queue.stream(request_class), {**fields})


async def claimed(queue: RequestQueue, room: int) -> list[str]:
    return [entry.request_id for entry in await queue.claim(room)]


def test_a_claim_gives_back_what_was_enqueued(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            before_ms = int(time.time() * 1000) - 1_000
            await enqueue(w, "batch", "req_1")
            (entry,) = await w.queue().claim(1)
            assert (entry.request_id, entry.tenant, entry.session) == ("req_1", "tenant", "session")
            assert (entry.deadline_ms, entry.cost_tokens, entry.request_class) == (123, 7, "batch")
            assert before_ms < entry.enqueued_ms < before_ms + 60_000

    asyncio.run(main())


def test_little_room_goes_to_the_urgent_first(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await enqueue(w, "batch", "b1", "b2")
            await enqueue(w, "standard", "s1")
            await enqueue(w, "realtime", "r1", "r2", "r3")
            queue = w.queue()
            assert await claimed(queue, 2) == ["r1", "r2"]
            assert await claimed(queue, 2) == ["r3"]
            assert await claimed(queue, 1) == ["s1"]
            assert await claimed(queue, 2) == ["b1", "b2"]

    asyncio.run(main())


def test_much_room_is_shared_by_the_classes_so_that_none_waits_for_ever(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            for name in ("realtime", "standard", "batch"):
                await enqueue(w, name, *(f"{name}-{number}" for number in range(5)))
            got = await claimed(w.queue(), 6)
            assert sorted(got) == sorted(f"{name}-{n}" for name in ("realtime", "standard", "batch") for n in (0, 1))

    asyncio.run(main())


def test_an_arrival_ends_the_wait_for_one(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            queue = w.queue()
            waiting = asyncio.create_task(claimed(queue, 8))
            while not (await w.redis.info("clients"))["blocked_clients"]:
                await asyncio.sleep(0)
            await enqueue(w, "standard", "s1")
            assert await waiting == ["s1"]

    asyncio.run(main())


def test_an_idle_queue_is_no_error(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            assert await claimed(w.queue(), 8) == []

    asyncio.run(main())


def test_no_entry_goes_to_two_consumers(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            wanted = [f"req_{number}" for number in range(40)]
            await enqueue(w, "standard", *wanted)

            async def consume(queue: RequestQueue) -> list[str]:
                mine: list[str] = []
                while found := await claimed(queue, 2):
                    mine += found
                return mine

            shares = await asyncio.gather(*(consume(w.queue(f"ingress-{number}")) for number in range(4)))
            assert sorted(request_id for share in shares for request_id in share) == sorted(wanted)

    asyncio.run(main())


def test_what_is_acknowledged_is_forgotten_and_what_is_not_stays_claimed(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await enqueue(w, "standard", "s1", "s2", "s3")
            await enqueue(w, "batch", "b1")
            queue = w.queue()
            depths = await queue.depths()
            assert [(d.waiting, d.claimed) for d in depths.values()] == [(0, 0), (3, 0), (1, 0)]
            assert depths["realtime"].oldest_s == 0
            assert 0 <= depths["standard"].oldest_s < 30
            first, _ = await queue.claim(2)
            await queue.acknowledge(first)
            depths = await queue.depths()
            assert (depths["standard"].waiting, depths["standard"].claimed) == (1, 1)
            assert await w.redis.xlen(queue.stream("standard")) == 2
            await queue.acknowledge(first)  # twice is once
            assert (await queue.depths())["standard"].claimed == 1

    asyncio.run(main())


def test_a_redis_that_was_emptied_is_prepared_again(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            queue, looker = w.queue(), w.queue("looker")
            await enqueue(w, "standard", "s1")
            assert await claimed(queue, 1) == ["s1"]
            await looker.depths()
            await w.operator.flushall()
            await enqueue(w, "standard", "s2")
            assert await claimed(queue, 1) == []  # this claim finds no group and makes it
            assert await claimed(queue, 1) == ["s2"]
            await w.operator.flushall()
            with pytest.raises(JournalUnavailable):
                await looker.depths()
            assert (await looker.depths())["standard"].waiting == 0

    asyncio.run(main())


# -- leases --------------------------------------------------------------------------------------------------


def test_members_see_each_other_and_a_leaver_at_once(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            looks: list[Members] = []
            worker, ingress = Membership(w.redis, namespace), Membership(w.redis, namespace, looks.append)
            await worker.join_as_worker("replica|with-a-bar", 16)
            await ingress.join_as_ingress("ingress-1", "session-1", lambda: False)
            assert ingress.reachable
            lease = IngressLease("ingress-1", "session-1", False)
            assert looks[-1] == Members((lease,), (("replica|with-a-bar", 16),))
            await worker.leave()
            await ingress._renew()
            assert looks[-1].workers == ()
            await ingress.leave()

    asyncio.run(main())


def test_an_ingress_that_sees_its_cluster_whole_has_one_lease_still(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            whole = False
            ingress = Membership(w.redis, namespace)
            await ingress.join_as_ingress("ingress-1", "session-1", lambda: whole)
            whole = True
            await ingress._renew()
            assert ingress.members.ingresses == (IngressLease("ingress-1", "session-1", True),)
            await ingress.leave()
            assert await w.redis.zcard(f"{namespace}:ingresses") == 0

    asyncio.run(main())


def test_a_younger_cluster_supersedes_an_older_one_as_soon_as_it_is_whole() -> None:
    old, young = "session_2026-11-22_09-59-59_1_7", "session_2026-11-22_10-00-00_1_7"
    for whole, expected in ((False, False), (True, True)):
        members = Members((IngressLease("a", old, True), IngressLease("b", young, whole)))
        assert members.superseded(old) is expected
        assert members.superseded(young) is False
    assert (members.ingresses_of(old), members.ingresses_of(young), members.names) == (1, 1, ("a", "b"))


def test_the_lease_of_one_who_died_expires(redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LEASE_MS", 2_000)
    monkeypatch.setattr(membership, "RENEW_S", 0.02)

    async def main() -> None:
        async with world(redis_url, namespace) as w:
            alone = asyncio.Event()
            looks: list[Members] = []

            def look(members: Members) -> None:
                looks.append(members)
                if members.names == ("ingress-1",):
                    alone.set()

            dying, living = Membership(w.redis, namespace), Membership(w.redis, namespace, look)
            await dying.join_as_ingress("ingress-2", "session-1", lambda: False)
            await living.join_as_ingress("ingress-1", "session-1", lambda: False)
            assert looks[0].names == ("ingress-1", "ingress-2")
            assert dying._task is not None
            dying._task.cancel()  # as a crash would: nothing is given back
            await asyncio.wait_for(alone.wait(), 60)
            assert await w.redis.zcard(f"{namespace}:ingresses") == 1  # and is cleaned away
            await living.leave()

    asyncio.run(main())


def test_a_redis_that_is_away_is_known_and_no_reason_to_die(namespace: str) -> None:
    async def main() -> None:
        async with world("redis://127.0.0.1:1/0", namespace) as w:
            member = Membership(w.redis, namespace)
            await member.join_as_ingress("ingress-1", "session-1", lambda: False)
            assert not member.reachable
            assert member._task is not None
            assert not member._task.done()
            await member.leave()

    asyncio.run(main())


def test_pages_of_others_are_found_by_their_names(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            one, two = (Snapshots(w.redis, namespace, name, Telemetry(), 60) for name in ("one", "two"))
            await one.start()
            while not await w.redis.exists(f"{namespace}:metrics:one"):
                await asyncio.sleep(0)
            pages = await two.pages(["one", "two", "gone"])
            assert set(pages) == {"one", "two"}
            assert b"hermes_in_flight_requests" in pages["one"]
            await one.stop()

    asyncio.run(main())
