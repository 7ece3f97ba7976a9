"""The client that `scripts/chaos --kubernetes` runs in a pod: on a real ingress, a real worker with
the simulated engine, and a real Redis.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.chaos_testing.kubernetes.in_pod import control
from scripts.chaos_testing.kubernetes.in_pod.rounds import Rounds, longest_pause_s
from scripts.chaos_testing.kubernetes.in_pod.texts import BEFORE, RECORD, Texts
from scripts.chaos_testing.traffic import Client, Told
from tests.journal.in_process import Door, in_process, settings_of
from tests.waiting import eventually

Send = Callable[..., Awaitable[Any]]
TOKENS = 30
ENGINE = {"kind": "simulated", "args": {"tokens_per_s": 500}}


@asynccontextmanager
async def client_of(d: Door, compare: str, socket: Path) -> AsyncIterator[tuple[Client, Send]]:
    """The client's process, and how to send it a word."""
    client = Client(d.http, "hermes-tiny")
    rounds = Rounds(client, d.http, Texts(client, d.http, compare), TOKENS, random.Random(1))
    serving = asyncio.create_task(control.serve(socket, rounds))

    async def send(*words: str) -> Any:
        return json.loads(await control.send(socket, words))

    try:
        yield client, send
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def until(send: Send, holds: Callable[[Any], Any]) -> None:
    """Wait for a state of the client."""

    async def look() -> bool:
        state = await send("state")
        assert not state["problem"]
        return bool(holds(state))

    await eventually(look)


async def one_round(send: Send) -> dict[str, Any]:
    """Three users, two more of them for a while; the account."""
    await send("begin", "3")
    await until(send, lambda state: state["begun"] >= 3)
    await send("strike")
    await send("users", "5")
    await until(send, lambda state: state["running"] == 5)
    await send("end")
    await until(send, lambda state: state["running"] == 0)
    result: dict[str, Any] = await send("result")
    return result


@pytest.mark.parametrize(("compare", "words"), [("auto", BEFORE), ("record", RECORD)])
async def test_every_stream_is_whole_and_damage_shows(
    redis_url: str, namespace: str, tmp_path: Path, compare: str, words: str
) -> None:
    async with (
        in_process(settings_of(redis_url, namespace, engine=ENGINE)) as d,
        client_of(d, compare, tmp_path / "socket") as (client, send),
    ):
        await send("expect")
        await until(send, lambda state: state["compared_with"])
        assert (await send("state"))["compared_with"] == words
        result = await one_round(send)
        assert result["whole"] == result["all"] >= 5, result
        assert result["longest_pause_s"] > 0
        assert result["reconnected"] == 0
        await until(send, lambda state: state["ready"]["ready"])

        ask = client.ask

        async def damaged(told: Told) -> None:
            await ask(told)
            told.texts = {0: told.text[:-1]}

        client.ask = damaged  # type: ignore[method-assign]
        result = await one_round(send)
        assert result["whole"] == 0
        assert len(result["corrupted"]) == result["all"] >= 5


async def test_a_model_that_answers_otherwise_under_load_is_compared_with_its_records(
    redis_url: str, namespace: str
) -> None:
    async with in_process(settings_of(redis_url, namespace, engine=ENGINE)) as d:
        client = Client(d.http, "hermes-tiny")
        asked: list[Told] = []
        ask = client.ask

        async def otherwise(told: Told) -> None:
            asked.append(told)
            await ask(told)
            told.texts = {0: told.text + ("?" if len(asked) > 8 else "")}

        client.ask = otherwise  # type: ignore[method-assign]
        texts = Texts(client, d.http, "auto")
        assert await texts.ask(5) == ""
        assert texts.compared_with == RECORD


def test_the_longest_pause_counts_from_the_fault_on() -> None:
    def stream(*arrivals_s: float) -> Told:
        told = Told("Hello", 10, streamed=True)
        told.arrivals_s.extend(arrivals_s)
        return told

    streams = [stream(1.0, 6.0, 9.0), stream(8.9, 9.5, 13.0), stream(1.0, 8.0)]
    assert longest_pause_s(streams, 8.5) == 3.5
    assert longest_pause_s([stream(5.0, 11.0)], 8.0) == 3.0, "the fault fell into it"
    assert longest_pause_s(streams, 20.0) is None
