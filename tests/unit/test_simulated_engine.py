"""What the simulated engine makes in a pause of the journal's writer, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from scripts.simulation import virtual_time
from serve_app.clock import RedisClock
from serve_app.journal.attempt_log import AttemptLog, Pause
from serve_app.journal.entries import AttemptFacts, Entry, RequestFacts, RequestLine
from serve_app.observability.metrics import Telemetry
from serve_app.settings import Settings
from workers import simulated_engine
from workers.attempt import Attempt
from workers.replay import recorded

TOKENS = 7
FACTS = RequestFacts("standard", "t", "s", "m", True, 1, 2, "")
OPENED = AttemptFacts("replica-1", "simulated", 1)
SETTINGS = {"engine": {"kind": "simulated", "args": {"tokens_per_s": 100.0}}}


def lasting() -> Pause:
    pause = Pause(3_600.0)
    pause.on = True
    return pause


async def answer(journal: list[Entry], pause: Pause) -> tuple[list[Entry], list[int]]:
    """The journal with another attempt in it, which completes the answer, and when its entries came
    in ms.
    """
    loop, entries, came_ms = asyncio.get_running_loop(), list(journal), []
    epoch = 1 + sum(entry.id.opens for entry in entries)
    entries.append(Entry.opening(epoch, b"nonce", OPENED))

    def write(attempt: AttemptLog) -> None:
        while (entry := attempt.take()) is not None:
            entries.append(entry)
            came_ms.append(round(loop.time() * 1e3))
            attempt.accepted(entry)

    log = AttemptLog("req", "key", epoch, b"nonce", "", write)
    log.pause = pause
    part = recorded(entries) if epoch > 1 else None
    attempt = Attempt(log, FACTS, OPENED, Telemetry(), RedisClock(), part)
    engine = simulated_engine.SimulatedEngine(Settings.model_validate(SETTINGS))
    await engine.start()
    body = {"stream": True, "max_tokens": TOKENS, "prompt": "Hello"}
    line = RequestLine("POST", "/v1/completions", "", [])
    await engine.serve("req", line, msgspec.json.encode(body), attempt)
    await engine.stop()
    attempt.stop()
    return entries, came_ms


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a coroutine, and the engine's clock with it."""

    def run(work: Any) -> Any:
        async def scene() -> Any:
            clock = virtual_time.VirtualClock(asyncio.get_running_loop())
            monkeypatch.setattr(simulated_engine, "SYSTEM", clock)
            return await work

        return virtual_time.run(scene())

    return run


def outputs(entries: list[Entry]) -> list[list[int]]:
    return [
        output[2]
        for entry in entries
        if entry.outputs
        for output in msgspec.json.decode(entry.outputs)
    ]


def body(entries: list[Entry]) -> bytes:
    return b"".join(entry.body for entry in entries)


def words(answer: bytes) -> str:
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(msgspec.json.decode(event)["choices"][0]["text"] for event in events)


def test_in_a_pause_the_first_token_and_the_end_wait_for_nothing(virtual: Any) -> None:
    entries, came_ms = virtual(answer([], lasting()))
    assert outputs(entries) == [[1], [2, 3, 4, 5, 6, 7]]
    assert came_ms == [10, 70, 70]
    assert body(entries).count(b"\n\n") == 3
    alone, _ = virtual(answer([], Pause()))
    assert outputs(alone) == [[token] for token in range(1, TOKENS + 1)]
    assert words(body(entries)) == words(body(alone))
    assert body(entries).count(b'"length"') == 1


def test_the_end_of_a_pause_brings_what_waits(virtual: Any) -> None:
    pause = lasting()

    async def scene() -> Any:
        loop = asyncio.get_running_loop()
        loop.call_later(0.035, pause.end)
        loop.call_later(0.055, pause.end)  # nothing waits
        return await answer([], pause)

    entries, came_ms = virtual(scene())
    assert outputs(entries) == [[1], [2, 3], [4], [5], [6], [7]]
    assert came_ms == [10, 35, 40, 50, 60, 70, 70]


def test_what_a_pause_has_merged_is_repeated_byte_by_byte(virtual: Any) -> None:
    pause = lasting()

    async def scene() -> Any:
        asyncio.get_running_loop().call_later(0.045, pause.end)
        return await answer([], pause)

    whole, _ = virtual(scene())
    assert outputs(whole)[1] == [2, 3, 4]
    cut = [entry for entry in whole if entry.id.epoch <= 1][:3]
    resumed, _ = virtual(answer(cut, Pause()))
    assert body(resumed).startswith(body(cut))
    assert words(body(resumed)) == words(body(whole))
    assert outputs(resumed) == [[1], [2, 3, 4], [5], [6], [7]]
