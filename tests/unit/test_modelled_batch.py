"""The engine model in real time: requests get their tokens step by step, share what they begin
with, and leave nothing behind, whenever they leave.
"""

from __future__ import annotations

import asyncio

from workers.engine_model.parameters import EngineParameters, Timing
from workers.modelled_batch import ModelledBatch, Running

ENGINE = EngineParameters("e", Timing(step_ms=1.0), num_gpu_blocks=40, max_num_seqs=2)
PROMPT = b"once upon a time " * 30


async def all_tokens(batch: ModelledBatch, running: Running, limit: int) -> None:
    while running.steps < limit:
        await running.ready.wait()
        running.ready.clear()
    batch.leave(running)


async def test_requests_get_their_tokens_and_the_third_waits_for_a_place() -> None:
    ended: list[str] = []
    steps: list[None] = []

    async def one(batch: ModelledBatch, name: str, limit: int) -> None:
        await all_tokens(batch, batch.join(name.encode(), 0, limit), limit)
        ended.append(name)

    batch = ModelledBatch(ENGINE, lambda: steps.append(None))
    stepping = asyncio.create_task(batch.step())
    async with asyncio.TaskGroup() as group:
        for name, limit in (("long", 30), ("short", 5), ("third", 10)):
            group.create_task(one(batch, name, limit))
    stepping.cancel()
    assert ended == ["short", "third", "long"]
    assert len(steps) == 30
    assert batch._model.idle
    assert batch._model.kv.used == 0


async def test_a_request_that_is_cancelled_leaves_nothing_behind() -> None:
    stepped = asyncio.Event()
    batch = ModelledBatch(ENGINE, stepped.set)
    early = batch.join(PROMPT, 0, 20)
    batch.leave(early)
    late = batch.join(PROMPT, 0, 20)
    stepping = asyncio.create_task(batch.step())
    await late.ready.wait()
    while not batch._in_step:
        await asyncio.sleep(0)
    stepped.clear()
    batch.leave(late)
    await stepped.wait()
    await asyncio.sleep(0)
    stepping.cancel()
    assert batch._model.idle
    assert batch._model.kv.used == 0


async def test_an_attempt_that_continues_computes_what_was_there_and_finds_it_cached() -> None:
    batch = ModelledBatch(ENGINE, lambda: None)
    stepping = asyncio.create_task(batch.step())
    await all_tokens(batch, batch.join(PROMPT, 0, 3), 3)
    continued = batch.join(PROMPT, 3, 8)
    await all_tokens(batch, continued, 8)
    stepping.cancel()
    steps, hits = continued.steps, batch._model.metrics()["vllm:prefix_cache_hits_total"]
    assert steps == 8
    # the prompt has 127 tokens, of which 112 fill blocks
    assert hits == 112


def test_a_long_prompt_has_no_room() -> None:
    batch = ModelledBatch(ENGINE, lambda: None)
    assert batch.room(PROMPT) == 40 * 16 - 127
    assert batch.room(b"x" * 4 * 40 * 16) == 0
