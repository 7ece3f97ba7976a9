"""What waits between vLLM's engine and its server app, in a pause of the journal's writer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.outputs import STREAM_FINISHED, CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import async_llm

from serve_app.journal.attempt_log import Pause
from workers import resumable
from workers.attempt import current


def output(token: int, index: int = 0, finished: bool = False) -> RequestOutput:
    ends = "length" if finished else None
    item = CompletionOutput(index, f"{token} ", [token], None, None, finish_reason=ends)
    return RequestOutput("req", None, [1], None, [item], finished)


def collecting(pause: Pause | None) -> Any:
    """A collector whose request has had its first output."""
    resumable.install()
    attempt: Any = pause and SimpleNamespace(pause=pause)
    token = current.set(attempt)
    made: Any = async_llm.RequestOutputCollector(RequestOutputKind.DELTA, "req")
    current.reset(token)
    assert isinstance(made, resumable.PausingCollector)
    made.put(output(0))
    assert made.ready.is_set()
    assert made.get_nowait().outputs[0].token_ids == [0]
    return made


def lasting() -> Pause:
    pause = Pause(3600.0)
    pause.on = True
    return pause


async def waits(collected: Any, pause: Pause) -> asyncio.Task[Any]:
    """The server's task, which three outputs have not woken."""
    taking = asyncio.create_task(collected.get())
    await asyncio.sleep(0)
    for token in (1, 2, 3):
        collected.put(output(token))
        for _ in range(3):
            await asyncio.sleep(0)
    assert not taking.done()
    return taking


def tokens(taken: Any) -> dict[int, list[int]]:
    return {item.index: list(item.token_ids) for item in taken.outputs}


async def test_outputs_of_a_pause_become_one_when_it_ends() -> None:
    pause = lasting()
    collected = collecting(pause)
    taking = await waits(collected, pause)
    pause.end()
    taken = await taking
    assert (tokens(taken), taken.outputs[0].text) == ({0: [1, 2, 3]}, "1 2 3 ")
    collected.put(output(4))
    assert tokens(await collected.get()) == {0: [4]}


async def test_the_end_waits_for_no_pause_and_brings_what_waits() -> None:
    pause = lasting()
    collected = collecting(pause)
    taking = await waits(collected, pause)
    collected.put(output(4, finished=True))
    taken = await taking
    assert tokens(taken) == {0: [1, 2, 3, 4]}
    assert taken.finished


async def test_an_error_waits_for_no_pause() -> None:
    pause = lasting()
    collected = collecting(pause)
    taking = await waits(collected, pause)
    collected.put(ValueError("the engine is dead"))
    with pytest.raises(ValueError, match="dead"):
        await taking


async def test_of_several_sequences_each_is_merged_for_itself() -> None:
    pause = lasting()
    collected = collecting(pause)
    for token, index in ((1, 0), (7, 1), (2, 0), (8, 1)):
        collected.put(output(token, index))
    assert not collected.ready.is_set()
    pause.end()
    assert tokens(await collected.get()) == {0: [1, 2], 1: [7, 8]}


async def test_what_comes_behind_an_error_counts_for_nothing() -> None:
    collected = collecting(lasting())
    collected.put(ValueError("the engine is dead"))
    collected.put(output(1))
    with pytest.raises(ValueError, match="dead"):
        await collected.get()


async def test_the_end_of_a_pause_wakes_nobody_for_what_has_been_taken() -> None:
    """vLLM's `get` would look for an output without end, and hold the event loop."""
    pause = lasting()
    collected = collecting(pause)
    collected.put(output(1))
    assert tokens(collected.get_nowait()) == {0: [1]}
    pause.end()
    assert not collected.ready.is_set()


async def test_the_end_of_inputs_and_a_request_of_nobody_wait_for_no_pause() -> None:
    collected = collecting(lasting())
    collected.put(STREAM_FINISHED)
    assert await collected.get() is STREAM_FINISHED
    alone = collecting(None)
    alone.put(output(1))
    assert alone.ready.is_set()
