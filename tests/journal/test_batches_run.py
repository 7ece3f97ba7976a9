"""Batches from their creation to their files, on a real Redis, in one ingress."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serve_app import timings
from serve_app.batches.job import Job
from serve_app.batches.lines import Row
from serve_app.batches.record import BatchState
from serve_app.clock import RedisClock
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.policy.tenant_limits import Limits
from serve_app.redis.keyspace import limits_key
from tests.journal.batching import STILL, Bench, Knife, bench
from tests.journal.journal_helpers import World
from tests.waiting import eventually

PROMPTS = [f"p{n}" for n in range(5)]


@pytest.fixture
def sections() -> dict[str, object]:
    return {**STILL, "queue": {"max_waiting_batch": 20}}


@pytest.fixture
async def at(w: World, tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench(w, tmp_path) as made:
        yield made


def told(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What a file says of each line: a status, or the code of an error."""
    return {
        line["custom_id"]: line["response"]["status_code"]
        if line["response"]
        else line["error"]["code"]
        for line in lines
    }


async def test_every_line_is_answered_once(at: Bench) -> None:
    async with at.leader():
        prompts = [f"p{n}" for n in range(100)]
        found = await at.over(await at.create(prompts))
        assert (found.state, found.total, found.completed, found.failed) == (
            BatchState.COMPLETED,
            100,
            100,
            0,
        )
        lines = await at.lines(found.output_file_id)
        assert sorted(line["custom_id"] for line in lines) == sorted(prompts)
        for line in lines:
            (choice,) = line["response"]["body"]["choices"]
            assert choice["message"]["content"] == line["custom_id"]
        assert found.error_file_id == ""
        assert (found.usage.prompt, found.usage.output) == (300, 500)
        assert set(at.accepted.values()) == {1}
        assert await at.keys() == []
        assert await at.w.store.kept("t") == (0, 0)


async def test_bad_lines_get_errors_and_take_no_place_in_the_queue(at: Bench) -> None:
    """Neither what the check has found, nor what is refused when it is submitted."""
    refused = b'["invalid_request","No such field.","n"]'
    async with at.leader() as leader:
        rows = leader.parts.checks.rows

        async def some_bad(*asked: Any) -> list[Row]:
            found = await rows(*asked)
            return [one._replace(refused=refused if one.line == 2 else b"") for one in found]

        leader.parts.checks.rows = some_bad  # type: ignore[method-assign, assignment]
        at.worker.fails = {"p3": Reason.POISON}
        found = await at.over(await at.create(PROMPTS, body={"p4": {"n": -1}}))
        assert (found.state, found.completed, found.failed) == (BatchState.COMPLETED, 2, 3)
        assert told(await at.lines(found.output_file_id)) == {"p0": 200, "p2": 200}
        assert told(await at.lines(found.error_file_id)) == {"p1": 400, "p3": 500, "p4": 400}
        assert sorted(at.worker.begun) == ["p0", "p2", "p3"]


async def test_a_line_whose_engine_has_failed_is_tried_again(at: Bench) -> None:
    at.worker.fails = {"p0": Reason.ENGINE_ERROR, "p1": Reason.ATTEMPT_LOST}
    async with at.leader():
        found = await at.over(await at.create(PROMPTS))
        assert (found.state, found.completed) == (BatchState.COMPLETED, 5)
        assert Counter(at.worker.begun)["p0"] == Counter(at.worker.begun)["p1"] == 2
        assert await at.keys() == []


async def test_a_line_whose_model_nobody_served_for_a_while_goes_on(at: Bench) -> None:
    held = at.worker.held["p1"] = asyncio.Event()
    async with at.leader() as leader:
        batch = await at.create(PROMPTS)
        await eventually(lambda: len(at.worker.prompts) == 4)
        await eventually(lambda: len(leader.jobs[batch.facts.id].running) == 1)
        (line,) = leader.jobs[batch.facts.id].running
        assert await at.ingress.endings.end(line.request_id, Reason.MODEL_NOT_FOUND)
        held.set()
        found = await at.over(batch)
    assert (found.state, found.completed, at.accepted.total()) == (BatchState.COMPLETED, 5, 6)


async def test_a_line_that_always_fails_is_given_up(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Always(dict[str, Reason]):
        pop = dict.get  # type: ignore[assignment]

    at.worker.fails = Always(p0=Reason.ENGINE_ERROR)
    async with at.leader():
        found = await at.over(await at.create(PROMPTS))
        assert (found.completed, found.failed) == (4, 1)
        assert told(await at.lines(found.error_file_id)) == {"p0": 500}
        assert Counter(at.worker.begun)["p0"] == 3


async def test_what_is_refused_because_of_load_waits(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "BATCH_REFUSED_S", (0.01,))
    submit, refused = at.ingress.exchanges.submit, Counter[str]()

    async def full(submission: Any) -> Any:
        key = submission.idempotency_key
        if refused[key] < 3:
            refused[key] += 1
            raise RequestRefused(Reason.QUEUE_FULL, "Full.")
        return await submit(submission)

    at.ingress.exchanges.submit = full  # type: ignore[method-assign]
    async with at.leader():
        found = await at.over(await at.create(PROMPTS))
        assert (found.state, found.completed) == (BatchState.COMPLETED, 5)
        assert set(refused.values()) == {3}


async def test_cancelling_keeps_what_is_done_and_ends_the_rest(at: Bench) -> None:
    at.worker.held = {"p1": asyncio.Event(), "p3": asyncio.Event()}
    async with at.leader():
        batch = await at.create(PROMPTS)
        await eventually(lambda: sorted(at.worker.begun) == PROMPTS)
        await eventually(lambda: len(at.worker.prompts) == 3)
        asked = await at.batches.cancel("t", batch.facts.id)
        assert asked is not None
        assert asked.state is BatchState.CANCELLING
        assert await at.batches.cancel("another", batch.facts.id) is None
        found = await at.over(batch)
        assert (found.state, found.completed, found.failed) == (BatchState.CANCELLED, 3, 2)
        assert told(await at.lines(found.output_file_id)) == {"p0": 200, "p2": 200, "p4": 200}
        cancelled = dict.fromkeys(("p1", "p3"), "batch_cancelled")
        assert told(await at.lines(found.error_file_id)) == cancelled
        assert await at.keys() == []
        assert await at.w.store.kept("t") == (0, 0)


async def test_a_deadline_delivers_what_is_done(at: Bench, later: Callable[[float], None]) -> None:
    at.worker.held = {"p1": asyncio.Event()}
    at.slots = 0
    prompts = [f"p{n}" for n in range(100)]
    for prompt in prompts[16:]:
        at.worker.held[prompt] = asyncio.Event()
    async with at.leader():
        batch = await at.create(prompts, window_s=60.0)
        await eventually(lambda: len(at.worker.prompts) == 15)
        later(61.0)
        found = await at.over(batch)
        assert (found.state, found.completed, found.failed) == (BatchState.EXPIRED, 15, 85)
        assert set(told(await at.lines(found.error_file_id)).values()) == {"batch_expired"}
        given = [told(await at.lines(one)) for one in (found.output_file_id, found.error_file_id)]
        assert given[0].keys() | given[1].keys() == set(prompts)
        assert await at.keys() == []


async def test_lines_begin_only_in_their_window(at: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end those that no worker has begun are withdrawn, and run in the next one."""
    within = asyncio.Event()
    begins = property(lambda job: job._working and not job._stopping and within.is_set())
    monkeypatch.setattr(Job, "_begins", begins)
    monkeypatch.setattr(timings, "BATCH_TICK_S", 0.01)
    monkeypatch.setattr(timings, "BATCH_STOP_AGAIN_S", 0.01)
    prompts = [f"p{n}" for n in range(12)]
    at.worker.held = {prompt: asyncio.Event() for prompt in prompts}
    async with at.leader():
        batch = await at.create(prompts)
        await eventually(lambda: at.batch_is(batch, BatchState.IN_PROGRESS))
        assert at.accepted.total() == 0
        within.set()
        await eventually(lambda: at.accepted.total() == 12)
        await eventually(lambda: len(at.worker.begun) == 8)
        within.clear()
        await eventually(lambda: at.ingress.dispatcher.in_flight == 8)
        for held in at.worker.held.values():
            held.set()
        await eventually(lambda: len(at.worker.prompts) == 8)
    async with at.leader() as leader:  # another one, which finds the window closed
        await eventually(lambda: leader.jobs)
        await asyncio.sleep(0.1)
        assert len(at.worker.begun) == 8
        within.set()
        found = await at.over(batch)
        assert (found.state, found.completed) == (BatchState.COMPLETED, 12)
        assert sorted(at.worker.prompts) == sorted(prompts)


async def test_of_large_lines_only_what_is_submitted_is_in_memory(at: Bench) -> None:
    """Else a leader could hold as many bodies as the engines run lines, times two."""
    at.worker.held = {"p0": asyncio.Event()}
    more = [{"role": "user", "content": text} for text in ("p0", "x" * timings.LARGE_BYTES)]
    async with at.leader() as leader:
        batch = await at.create(["p0"], body={"p0": {"messages": more}})
        await eventually(lambda: at.worker.begun)
        (task,) = leader.jobs[batch.facts.id].running.values()
        kept = task.get_coro().cr_frame.f_locals["asked"]  # type: ignore[union-attr]
        assert kept == ("p0", b"")
        at.worker.held["p0"].set()
        found = await at.over(batch)
        assert told(await at.lines(found.output_file_id)) == {"p0": 200}


async def test_a_short_batch_leaves_the_records_of_a_long_one(at: Bench) -> None:
    at.slots = 0
    await at.create(["p0"], window_s=7 * 86_400.0)
    await at.create(["p1"], window_s=60.0)
    namespace = at.w.settings.namespace
    for name in ("batches:t", "batch_tokens:t"):
        assert await at.w.operator.pttl(f"{namespace}:{name}") > (30 + 6) * 86_400_000


async def test_a_batch_waits_for_its_hours(
    at: Bench, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Created two hours before its window, in which the clock is turned ahead."""
    monkeypatch.setattr(timings, "BATCH_TICK_S", 0.01)
    opens, closes = (
        datetime.fromtimestamp(RedisClock().now_s() + hours * 3600, UTC) for hours in (2, 4)
    )
    async with at.leader():
        batch = await at.create(PROMPTS, window_s=86_400.0, window=f"{opens:%H:%M}-{closes:%H:%M}")
        await eventually(lambda: at.batch_is(batch, BatchState.IN_PROGRESS))
        later(3600.0)
        await asyncio.sleep(0.1)  # some rounds of the leader
        assert at.accepted.total() == 0
        later(3 * 3600.0)
        found = await at.over(batch)
        assert (found.state, found.completed) == (BatchState.COMPLETED, len(PROMPTS))


async def test_an_input_file_that_is_deleted_before_it_is_checked_fails_the_batch(
    at: Bench,
) -> None:
    batch = await at.create(PROMPTS)
    (at.folder / batch.facts.input_path).unlink()
    async with at.leader():
        found = await at.over(batch)
    assert (found.state, found.total) == (BatchState.FAILED, 0)
    assert [one.code for one in found.errors] == ["input_file_not_found"]


async def test_an_input_file_that_is_deleted_ends_the_batch(at: Bench) -> None:
    at.worker.held = {"p0": asyncio.Event()}
    at.slots = 0
    prompts = [f"p{n}" for n in range(40)]
    async with at.leader():
        at.worker.held = {prompt: asyncio.Event() for prompt in prompts}
        batch = await at.create(prompts)
        await eventually(lambda: len(at.worker.begun) == 8)
        (at.folder / batch.facts.input_path).unlink()
        for held in at.worker.held.values():
            held.set()
        found = await at.over(batch)
        assert (found.state, found.completed + found.failed) == (BatchState.FAILED, 40)
        assert [one.code for one in found.errors] == ["input_file_not_found"]
        assert len(await at.lines(found.output_file_id)) == found.completed


@pytest.mark.parametrize("state", [BatchState.CANCELLED, BatchState.EXPIRED])
async def test_a_batch_whose_input_file_is_deleted_can_still_end(
    at: Bench, later: Callable[[float], None], state: BatchState
) -> None:
    """Nobody knows the names of its unfinished lines then; what is done is delivered."""
    prompts = [f"p{n}" for n in range(16)]
    at.worker.held = {prompt: asyncio.Event() for prompt in prompts}
    async with at.leader():
        batch = await at.create(prompts, window_s=60.0)
        await eventually(lambda: at.accepted.total() == 16 and len(at.worker.begun) == 8)
        done = at.worker.begun[0]
        at.worker.held[done].set()
        await eventually(lambda: len(at.worker.begun) == 9)
        (at.folder / batch.facts.input_path).unlink()
        if state is BatchState.CANCELLED:
            await at.batches.cancel("t", batch.facts.id)
        else:
            later(61.0)
        found = await at.over(batch)
        assert (found.state, found.completed, found.failed) == (state, 1, 15)
        assert [one.code for one in found.errors] == ["input_file_not_found"]
        assert told(await at.lines(found.output_file_id)) == {done: 200}
        assert found.error_file_id == ""
        assert await at.keys() == []


async def test_a_lost_segment_fails_a_batch_only_long_after_its_deadline(
    at: Bench, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the storage may be there again."""
    monkeypatch.setattr(timings, "BATCH_RETRY_S", (0.05,))
    at.worker.held = {"p1": asyncio.Event()}
    async with at.leader() as leader:
        batch = await at.create(PROMPTS, window_s=60.0)
        await eventually(lambda: len(at.worker.prompts) == 4)
        await leader.jobs[batch.facts.id]._write_segment()
        (segment,) = (at.folder / "segments" / batch.facts.id).glob("*-*")
        segment.unlink()
        at.worker.held["p1"].set()
        await eventually(lambda: at.batch_is(batch, BatchState.FINALIZING))
        later(61.0 + timings.BATCH_LINE_KEPT_S)
        found = await at.over(batch)
        assert (found.state, found.completed) == (BatchState.FAILED, 5)
        assert [one.code for one in found.errors] == ["results_lost"]
        assert await at.keys() == []


async def test_tenants_share_the_places_and_their_deadlines_decide(at: Bench) -> None:
    at.slots = 10
    prompts = [f"p{n}" for n in range(40)]
    at.worker.held = {prompt: asyncio.Event() for prompt in prompts}
    batches = {
        name: await at.create(prompts, tenant, window_s)
        for name, tenant, window_s in (
            ("late", "a", 900.0),
            ("soon", "a", 600.0),
            ("other", "b", 1_200.0),
        )
    }
    async with at.leader() as leader:
        leader.most_in_flight = 0
        await eventually(lambda: [job.wants for job in leader.jobs.values()] == [True] * 3)
        leader.most_in_flight = 20
        leader.feed()
        await eventually(lambda: sum(len(job.running) for job in leader.jobs.values()) == 20)
        running = {name: len(leader.jobs[one.facts.id].running) for name, one in batches.items()}
        assert running == {"late": 0, "soon": 10, "other": 10}


async def test_too_many_batches_or_tokens_are_refused_with_the_number(at: Bench) -> None:
    limits = Limits(background_tokens=1_000)
    first = await at.create(PROMPTS, limits=limits, tokens=700)
    with pytest.raises(RequestRefused) as refused:
        await at.create(PROMPTS, limits=limits, tokens=301)
    assert refused.value.reason is Reason.TENANT_LIMIT
    for number in ("700 tokens", "1,000"):
        assert number in refused.value.message
    await at.create(PROMPTS, tenant="another", limits=limits, tokens=301)
    async with at.leader():
        await at.over(first)
        await at.over(await at.create(PROMPTS, limits=limits, tokens=1_000))


async def test_a_file_with_too_many_tokens_fails_its_batch(at: Bench) -> None:
    at.tenants["t"] = at.tenant(Limits(background_tokens=99))
    async with at.leader():
        found = await at.over(await at.create([f"p{n}" for n in range(10)]))
        assert (found.state, found.errors[0].code) == (BatchState.FAILED, "token_limit_exceeded")
        assert at.worker.begun == []


def more_than(prompts: list[str], number: int) -> bool:
    return len(prompts) > number


async def test_lines_count_only_towards_the_tokens_of_the_month(at: Bench) -> None:
    """What is beyond them is refused in the error file, without being submitted once it is certain
    that they are used up; and nothing of the minute is taken.
    """
    limits = Limits(1, 1, 1, 1_000_000, tokens_per_month=1_000)
    at.tenants = {"t": at.tenant(limits)}
    submit, submitted = at.ingress.exchanges.submit, list[int]()

    async def counted(submission: Any) -> Any:
        submitted.append(submission.work.cost_tokens)
        return await submit(submission)

    at.ingress.exchanges.submit = counted  # type: ignore[method-assign]
    async with at.leader():
        prompts = [f"p{n:03}" for n in range(600)]
        found = await at.over(await at.create(prompts, limits=limits))
    assert 8 * found.completed + submitted[0] > 1_000, "they are used up"
    assert found.completed + found.failed == 600
    assert len(submitted) < 400
    errors = [line["response"] for line in await at.lines(found.error_file_id)]
    assert {error["status_code"] for error in errors} == {429}
    assert {error["body"]["error"]["code"] for error in errors} == {"quota_exceeded"}
    used = await at.w.redis.get(limits_key(at.w.settings.namespace, "t"))
    _, _, month, requests, tokens, running, background, debt = map(int, used.split())
    assert month == found.usage.prompt + found.usage.output == 8 * found.completed
    assert (requests, tokens, running, background, debt) == (0, 0, 0, 0, 0)


async def test_lines_wait_for_tokens_of_the_month_that_others_give_back(at: Bench) -> None:
    """Each reserves a hundred and uses eight."""
    at.tenants = {"t": at.tenant(limits := Limits(tokens_per_month=500))}
    prompts = [f"p{n}" for n in range(40)]
    body = {prompt: {"max_tokens": 100} for prompt in prompts}
    async with at.leader():
        found = await at.over(await at.create(prompts, limits=limits, body=body))
    assert (found.state, found.completed) == (BatchState.COMPLETED, 40)


async def test_64_lines_survive_the_ingress_and_the_worker_that_hold_them(
    w: World, tmp_path: Path
) -> None:
    """Both go at the 27th line."""
    prompts = [f"p{n:02}" for n in range(64)]
    knife = Knife()
    async with bench(w, tmp_path, name="ingress-1") as first:
        for prompt in prompts:
            first.worker.held[prompt] = asyncio.Event()
        async with first.leader(knife):
            batch = await first.create(prompts)
            for number in range(27):
                await eventually(partial(more_than, first.worker.begun, number))
                first.worker.held[first.worker.begun[number]].set()
                await eventually(partial(more_than, first.worker.prompts, number))
            knife.dead.set()
    done = list(first.worker.prompts)
    async with bench(w, tmp_path, name="ingress-2", replica="replica-2") as second:
        async with second.leader():
            found = await second.over(batch)
        assert (found.state, found.completed, found.failed) == (BatchState.COMPLETED, 64, 0)
        lines = await second.lines(found.output_file_id)
        assert sorted(line["custom_id"] for line in lines) == prompts
        assert len(done) >= 27
        assert not set(done) & set(second.worker.prompts), "finished lines run again: 0"
        assert await second.keys() == []
