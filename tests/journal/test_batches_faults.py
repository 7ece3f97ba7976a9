"""What other services' batches have met, one test each: the scenarios of llm-d's fault-injection
harness, by its names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from serve_app import timings
from serve_app.batches.leading import Closed, Deposed, Marked
from serve_app.batches.record import Batch, BatchState, new_batch_id
from serve_app.errors import RedisUnavailable
from serve_app.files.storage import StorageUnavailable, each
from serve_app.journal.usage import Usage
from serve_app.policy.tenant_limits import NO_LIMITS
from serve_app.redis.keyspace import batch_key
from tests.journal.batching import STILL, Bench, Knife, bench
from tests.journal.journal_helpers import PrivateRedis, World, world
from tests.waiting import eventually

PROMPTS = [f"p{n}" for n in range(5)]


@pytest.fixture
def sections() -> dict[str, object]:
    return STILL


@pytest.fixture
async def at(w: World, tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench(w, tmp_path) as made:
        yield made


async def whole(at: Bench, found: Batch) -> None:
    """Every line has been answered once, and nothing is left."""
    told = (found.state, found.total, found.completed, found.failed)
    assert told == (BatchState.COMPLETED, len(PROMPTS), len(PROMPTS), 0)
    lines = await at.lines(found.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == PROMPTS
    assert sorted(at.worker.prompts) == PROMPTS, "none is computed twice"


async def test_terminal_overwrite(at: Bench) -> None:
    """What is over stays as it is."""
    async with at.leader() as leader:
        found = await at.over(await at.create(PROMPTS))
        assert await at.batches.cancel("t", found.facts.id) == found
        late = Closed(BatchState.EXPIRED, "", "")
        await leader.parts.leading.over(found, late, 3)
        assert await at.now(found) == found


async def test_worker_crash_strands_job(at: Bench) -> None:
    at.worker.deadly = {"p1", "p3"}
    async with at.leader():
        await whole(at, await at.over(await at.create(PROMPTS)))


async def test_cancel_reverted(at: Bench) -> None:
    """A cancellation while the file is checked is not lost by what follows the check."""
    async with at.leader() as leader:
        check = leader.parts.checks.check

        async def cancelled(batch: Batch) -> object:
            await at.batches.cancel("t", batch.facts.id)
            return await check(batch)

        leader.parts.checks.check = cancelled  # type: ignore[method-assign, assignment]
        found = await at.over(await at.create(PROMPTS))
        assert (found.state, found.total, at.worker.begun) == (BatchState.CANCELLED, 0, [])


async def test_duplicate_execution(at: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that does not know yet that another one leads."""
    monkeypatch.setattr(timings, "BATCH_RENEW_S", 1e6)
    held = at.worker.held["p0"] = asyncio.Event()
    async with at.leader() as former:
        batch = await at.create(PROMPTS)
        await eventually(lambda: sorted(at.worker.prompts) == PROMPTS[1:])
        await at.depose()
        monkeypatch.setattr(timings, "BATCH_RENEW_S", 0.01)
        async with at.leader() as leader:
            await eventually(lambda: leader.jobs)
            held.set()
            await whole(at, await at.over(batch))
            assert former is not leader


async def test_cancel_racing_completion(at: Bench) -> None:
    """Whichever is first, each line is told once."""
    async with at.leader():
        for _ in range(10):
            batch = await at.create(PROMPTS)
            await eventually(lambda: "p4" in at.worker.begun)
            await at.batches.cancel("t", batch.facts.id)
            found = await at.over(batch)
            assert found.state in (BatchState.CANCELLED, BatchState.COMPLETED)
            assert found.completed + found.failed == found.total
            files = (found.output_file_id, found.error_file_id)
            told = [line["custom_id"] for one in files for line in await at.lines(one)]
            assert sorted(told) == (PROMPTS if found.total else [])
            at.worker.begun.clear()


async def test_recovery_crash_loop(at: Bench) -> None:
    """Leaders that live for a few commands each end it together."""
    batch = await at.create(PROMPTS)
    deaths = 0
    while not (await at.now(batch)).state.over:
        knife = Knife(14)
        async with at.leader(knife):
            over = asyncio.create_task(at.over(batch))
            dead = asyncio.create_task(knife.dead.wait())
            await asyncio.wait([over, dead], return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
            dead.cancel()
        deaths += knife.dead.is_set()
    assert deaths
    async with at.leader():
        await whole(at, await at.over(batch))


async def test_replicas_execute_once(at: Bench) -> None:
    async with AsyncExitStack() as stack:
        leaders = [await stack.enter_async_context(at.leader()) for _ in range(3)]
        batches = [await at.create(PROMPTS) for _ in range(3)]
        for batch in batches:
            await at.over(batch)
        assert sorted(at.worker.prompts) == sorted(PROMPTS * 3)
        assert len(leaders) == 3


async def test_create_crash_after_store(at: Bench) -> None:
    """A client that got no answer creates it again, under its key."""
    async with at.leader():
        first = await at.create(PROMPTS, key="k")
        again = await at.create(PROMPTS, key="k")
        assert again.facts == first.facts
        await whole(at, await at.over(first))
        listed, more = await at.batches.listed("t", "", 10) or ((), False)
        assert ([one.facts.id for one in listed], more) == ([first.facts.id], False)


async def test_cancel_event_lost(at: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "BATCH_LOOK_S", 0.01)
    at.worker.held["p0"] = asyncio.Event()
    async with at.leader() as leader:

        async def none(within_s: float) -> list[str]:
            return await asyncio.sleep(0.01, [])

        leader.parts.leading.news = none  # type: ignore[method-assign]
        batch = await at.create(PROMPTS)
        await eventually(lambda: sorted(at.worker.prompts) == PROMPTS[1:])
        await at.batches.cancel("t", batch.facts.id)
        found = await at.over(batch)
        assert (found.state, found.completed, found.failed) == (BatchState.CANCELLED, 4, 1)


async def test_orphaned_blob(at: Bench, later: Callable[[float], None]) -> None:
    """A segment that was written by who leads no more is found and deleted, with those that the
    batch has needed.
    """
    async with at.leader() as leader:
        found = await at.over(await at.create(PROMPTS))
        path = f"segments/{found.facts.id}/late-4-4"
        await leader.parts.storage.put(path, each(b"late"))
        await leader.sweep()
        assert path in [one async for one in at.storage.under("segments/")]
        later(timings.UNKNOWN_OBJECT_S + 60)
        await leader.sweep()
        assert [one async for one in at.storage.under("segments/")] == []


async def test_the_segments_of_a_long_batch_stay_when_it_has_just_ended(
    at: Bench, later: Callable[[float], None]
) -> None:
    async with at.leader() as leader:
        batch = await at.create(PROMPTS, window_s=7 * 86_400.0)
        path = f"segments/{batch.facts.id}/one-4-4"
        await at.storage.put(path, each(b"text"))
        later(2 * timings.UNKNOWN_OBJECT_S)
        await at.over(batch)
        await leader.sweep()
        assert path in [one async for one in at.storage.under("segments/")]


async def test_an_end_that_redis_has_lost_is_made_again(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same segments, with the same files."""
    monkeypatch.setattr(timings, "BATCH_LOOK_S", 0.01)
    remembered = list[dict[bytes, tuple[bytes, int]]]()
    async with at.leader() as leader:
        over = leader.parts.leading.over

        async def noted(*its: Any) -> None:
            remembered.append(await at.remember())
            await over(*its)

        leader.parts.leading.over = noted  # type: ignore[method-assign, assignment]
        batch = await at.create(PROMPTS)
        first = await at.over(batch)
        await leader.sweep()
        await eventually(lambda: not leader.jobs)
        await at.roll_back(remembered[0])
        assert await at.batch_is(batch, BatchState.FINALIZING)
        found = await at.over(batch)
        assert found.output_file_id == first.output_file_id
        await whole(at, found)


async def test_a_line_whose_end_redis_has_lost_is_answered_again(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has read it meanwhile, and its worker lives and knows nothing of it any more."""
    monkeypatch.setattr(timings, "TAKE_OVER_S", 0.05)
    monkeypatch.setattr(timings, "CLAIM_ANSWER_LOST_MS", 500)
    monkeypatch.setattr(timings, "ADOPTED_LOOK_S", 0.05)
    monkeypatch.setattr(timings, "ADOPTED_SILENT_S", 0.0)
    at.worker.held["p0"] = asyncio.Event()
    async with at.leader():
        batch = await at.create(PROMPTS)
        await eventually(lambda: sorted(at.worker.prompts) == PROMPTS[1:])
    remembered = await at.remember()
    at.worker.held["p0"].set()
    await eventually(lambda: "p0" in at.worker.prompts and not at.ingress.dispatcher.in_flight)
    await at.roll_back(remembered)
    await at.depose()
    async with at.leader():
        found = await at.over(batch)
    assert (found.state, found.completed, found.failed) == (BatchState.COMPLETED, 5, 0)
    lines = await at.lines(found.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == PROMPTS
    assert await at.keys() == []


async def test_the_segments_of_another_model_are_no_rubbish(
    at: Bench, later: Callable[[float], None]
) -> None:
    """While a service is upgraded to another model, there is a leader for each."""
    facts = (await at.create(PROMPTS)).facts
    others = replace(facts, id=new_batch_id("t"), model="another")
    await at.batches.create(others, NO_LIMITS)
    path = f"segments/{others.id}/one-4-4"
    await at.storage.put(path, each(b"text"))
    later(timings.UNKNOWN_OBJECT_S + 60)
    await at.runner().sweep()
    assert [one async for one in at.storage.under("segments/")] == [path]


@pytest.mark.parametrize("state", [BatchState.EXPIRED, BatchState.CANCELLED])
async def test_a_batch_ends_though_nobody_serves_its_model_any_more(
    at: Bench,
    tmp_path: Path,
    later: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    state: BatchState,
) -> None:
    """Until then it waits for its model; an ingress of another one ends it."""
    monkeypatch.setattr(timings, "MODEL_GONE_MS", 0)
    monkeypatch.setattr(timings, "BATCH_LOOK_S", 0.01)
    monkeypatch.setattr(timings, "BATCH_SEGMENT_S", 0.0)
    its, of_former = at.w.settings, ("ingress-2", "worker-2")
    async with (
        world(its.redis.url, its.namespace, model={"name": "gone"}, **STILL) as gone,
        bench(gone, tmp_path, 8, *of_former) as former,
    ):
        former.worker.held = {"p1": asyncio.Event()}
        async with former.leader() as leader:
            batch = await former.create(PROMPTS, window_s=600.0)
            await eventually(lambda: leader.jobs and leader.jobs[batch.facts.id]._pace.done == 4)
    async with at.leader() as leader:
        await eventually(lambda: "gone" in leader.parts.leading._models)
        assert await at.batch_is(batch, BatchState.IN_PROGRESS)
        if state is BatchState.CANCELLED:
            await at.batches.cancel("t", batch.facts.id)
        else:
            later(601.0)
        found = await at.over(batch)
        assert (found.state, found.completed, found.failed) == (state, 4, 1)
        (line,) = await at.lines(found.error_file_id)
        assert (line["custom_id"], line["error"]["code"]) == ("p1", f"batch_{state}")
        assert at.accepted.total() == 0
        assert await at.keys() == []
        await eventually(lambda: "gone" not in at.ingress.entrance.unserved)


async def test_finalization_strand(at: Bench) -> None:
    """A leader that dies while it joins: the next one ends the batch with the same files."""
    knife = Knife()
    async with at.leader(knife) as leader:
        close = leader.parts.leading.close

        async def dies(batch: Batch, closed: Closed) -> Closed:
            answer = await close(batch, closed)
            knife.dead.set()
            return answer

        leader.parts.leading.close = dies  # type: ignore[method-assign]
        batch = await at.create(PROMPTS)
        await knife.dead.wait()
        assert (await at.now(batch)).state is BatchState.FINALIZING
    planned = await at.now(batch)
    async with at.leader():
        found = await at.over(batch)
        assert found.output_file_id == planned.output_file_id
        await whole(at, found)


async def test_zombie_owner_burns_inference(at: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has lost the lease begins no line and changes nothing, even before it notices."""
    monkeypatch.setattr(timings, "BATCH_RENEW_S", 1e6)
    at.slots = 0
    at.worker.held["p0"] = asyncio.Event()
    async with at.leader() as former:
        batch = await at.create(PROMPTS)
        await eventually(lambda: sorted(at.worker.prompts) == PROMPTS[1:])
        await at.depose()
        leading = former.parts.leading
        for step in (
            leading.take(batch, 1),
            leading.turn(batch, 0, 1, 2),
            leading.close(batch, Closed(BatchState.EXPIRED, "a", "b")),
            leading.over(batch, Closed(BatchState.EXPIRED, "", ""), 1),
        ):
            with pytest.raises(Deposed):
                await step
        at.worker.held["p0"].set()
        await eventually(lambda: not former.jobs)
    monkeypatch.setattr(timings, "BATCH_RENEW_S", 0.01)  # a stall may cost the first try
    async with at.leader():
        await whole(at, await at.over(batch))


async def test_a_cancel_stops_lines_though_the_storage_cannot_be_written(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "BATCH_RETRY_S", (0.01,))
    monkeypatch.setattr(timings, "BATCH_SEGMENT_S", 0.0)
    at.worker.held = {prompt: asyncio.Event() for prompt in PROMPTS}
    async with at.leader():
        batch = await at.create(PROMPTS)
        await eventually(lambda: sorted(at.worker.begun) == PROMPTS)
        with monkeypatch.context() as broken:
            failures = refusing(broken, at, "put")
            at.worker.held["p0"].set()
            await eventually(lambda: len(failures) > 1)
            await at.batches.cancel("t", batch.facts.id)
            await eventually(lambda: at.ingress.dispatcher.in_flight == 0)
            assert at.worker.prompts == ["p0"]
            assert await at.batch_is(batch, BatchState.CANCELLING)
        found = await at.over(batch)
        assert (found.state, found.completed, found.failed) == (BatchState.CANCELLED, 1, 4)


@pytest.mark.parametrize("how", ["it refuses", "its volume is not mounted"])
async def test_a_deadline_passes_while_the_storage_is_away(
    at: Bench, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Lines stop and the batch says so; nothing that is done is lost."""
    monkeypatch.setattr(timings, "BATCH_RETRY_S", (0.01,))
    monkeypatch.setattr(timings, "BATCH_TICK_S", 0.01)
    monkeypatch.setattr(timings, "BATCH_SEGMENT_S", 0.0)
    at.worker.held = {prompt: asyncio.Event() for prompt in PROMPTS}
    parts = [at.folder / "segments", at.folder / "files" / "in"]
    async with at.leader() as leader:
        batch = await at.create(PROMPTS, window_s=600.0, recorded=True)
        await eventually(lambda: sorted(at.worker.begun) == PROMPTS)
        with monkeypatch.context() as broken:
            if how == "it refuses":
                refusing(broken, at, "put")
                parts = []
            at.worker.held["p0"].set()
            await eventually(lambda: "p0" in at.worker.prompts)
            if parts:
                await eventually(lambda: leader.jobs[batch.facts.id]._pace.done == 1)
            for part in parts:
                part.rename(at.folder / f"{part.name}-away")
            later(601.0)
            assert await at.batch_is(batch, BatchState.FINALIZING)
            assert (await at.now(batch)).finalizing_ms == batch.facts.expires_ms
            await eventually(lambda: at.ingress.dispatcher.in_flight == 0)
            await asyncio.sleep(0.1)  # some tries
            assert await at.batch_is(batch, BatchState.FINALIZING)
        for part in parts:
            (at.folder / f"{part.name}-away").rename(part)
        found = await at.over(batch)
        assert (found.state, found.completed, found.failed) == (BatchState.EXPIRED, 1, 4)
        assert found.finalizing_ms == batch.facts.expires_ms
        lines = await at.lines(found.output_file_id)
        assert [line["custom_id"] for line in lines] == ["p0"]


async def test_a_cancel_ends_a_check_that_waits_for_the_storage(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "BATCH_RETRY_S", (0.01,))
    failures = refusing(monkeypatch, at, "read")
    async with at.leader():
        batch = await at.create(PROMPTS)
        await eventually(lambda: len(failures) > 1)
        await at.batches.cancel("t", batch.facts.id)
        assert (await at.over(batch)).state is BatchState.CANCELLED


async def test_a_volume_that_is_not_there_is_no_deleted_file(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis knows its file, so nobody has deleted it: the batch waits, also for its check."""
    monkeypatch.setattr(timings, "BATCH_RETRY_S", (0.01,))
    asked, knows = list[str](), at.files.knows

    async def noted(tenant: str, path: str) -> bool:
        asked.append(path)
        return await knows(tenant, path)

    at.files.knows = noted  # type: ignore[method-assign]
    prompts, away = [f"p{n}" for n in range(40)], at.folder.with_name("away")
    at.worker.held = {prompt: asyncio.Event() for prompt in prompts}
    at.slots = 0
    batch = await at.create(prompts, recorded=True)
    async with at.leader():
        at.folder.rename(away)
        await eventually(lambda: len(asked) > 2)
        assert await at.batch_is(batch, BatchState.VALIDATING)
        away.rename(at.folder)
        await eventually(lambda: len(at.worker.begun) == 8)
        at.folder.rename(away)
        asked.clear()
        for held in at.worker.held.values():
            held.set()
        await eventually(lambda: len(asked) > 2)
        assert await at.batch_is(batch, BatchState.IN_PROGRESS)
        away.rename(at.folder)
        found = await at.over(batch)
        assert (found.state, found.completed) == (BatchState.COMPLETED, 40)


def refusing(monkeypatch: pytest.MonkeyPatch, at: Bench, method: str) -> list[object]:
    """The storage does not do this any more. Returns a list with an item for each try."""
    tries = list[object]()

    async def refused(path: str, *_: object) -> None:
        tries.append(path)
        raise StorageUnavailable("refused by the test")

    monkeypatch.setattr(at.storage, method, refused)
    return tries


async def test_a_record_that_is_gone_does_not_come_back(at: Bench) -> None:
    """It would have no facts, so nobody could ever read or end it."""
    batch, leading = await at.create(PROMPTS), at.runner().parts.leading
    assert await leading.lead()
    await leading.checked(batch, len(PROMPTS), 1, 0)
    await leading.take(batch, 2)
    await at.w.operator.delete(batch_key(at.w.settings.namespace, batch.facts.id))
    expired = Closed(BatchState.EXPIRED, "a", "b")
    for step in (
        leading.checked(batch, 1, 1, 0),
        leading.take(batch, 1),
        leading.turn(batch, 0, 1, 2),
        leading.mark(batch, "one-4-4", Marked([0], 1, 0, Usage(), ())),
        leading.close(batch, expired),
        leading.over(batch, expired, 1),
    ):
        with pytest.raises(Deposed):
            await step
    assert await at.batches.cancel("t", batch.facts.id) is None
    assert [page async for page in leading.open()] == [[]]
    assert [page async for page in leading.open()] == []
    assert await leading.read([batch.facts.id]) == []
    await leading.stop()


async def test_async_result_destruction(at: Bench) -> None:
    """What is answered while nobody leads is not computed again."""
    for prompt in PROMPTS:
        at.worker.held[prompt] = asyncio.Event()
    async with at.leader():
        batch = await at.create(PROMPTS)
        await eventually(lambda: sorted(at.worker.begun) == PROMPTS)
    for held in at.worker.held.values():
        held.set()
    await eventually(lambda: sorted(at.worker.prompts) == PROMPTS)
    async with at.leader():
        await whole(at, await at.over(batch))


async def test_lines_whose_marks_redis_has_lost_are_marked_again(
    private_redis: PrivateRedis, namespace: str, tmp_path: Path
) -> None:
    """It comes back with data from before they were."""
    prompts = [f"p{number:02}" for number in range(80)]
    async with world(private_redis.url, namespace, **STILL) as w, bench(w, tmp_path) as at:

        async def marked() -> int | None:
            with suppress(RedisUnavailable):
                return (await at.now(batch)).completed
            return None

        async def comes_back(with_marked: int) -> None:
            await private_redis.start()
            await w.redis.connection_pool.disconnect()
            while await marked() is None:
                await asyncio.sleep(0.01)
            assert await marked() == with_marked

        at.worker.held = {prompt: asyncio.Event() for prompt in prompts[48:]}
        async with at.leader() as leader:
            batch = await at.create(prompts)
            job = await eventually(lambda: leader.jobs.get(batch.facts.id))
            await eventually(lambda: len(job._results) == 48)
            await eventually(lambda: len(at.worker.begun) == 48 + 8)
            private_redis.kill()
            private_redis.remember()
            await comes_back(with_marked=0)
            await job._results.write()
            assert await marked() == 48
            private_redis.kill()
            private_redis.forget()
            await comes_back(with_marked=0)
            for held in at.worker.held.values():
                held.set()
            found = await at.over(batch)
        assert (found.state, found.completed, found.failed) == (BatchState.COMPLETED, 80, 0)
        lines = await at.lines(found.output_file_id)
        assert sorted(line["custom_id"] for line in lines) == prompts
        assert await at.keys() == []
