"""Failures that do not concern the engine, by `kill -9`: real Ray Serve, Redis and HAProxy,
simulated engine.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from scripts.chaos_testing.parts import FAULTS, Parts
from scripts.chaos_testing.traffic import Told
from serve_app.client import ReconnectingTransport
from serve_app.local.environment import ROOT
from tests.service.disturbance import attempts, on_disk, simulated_text, under, whole_again
from tests.service.support import CHAT, Running, asking, openai_client, text_of_chunks, together
from tests.waiting import until

pytestmark = pytest.mark.disturbs
TOKENS = 320  # 8 s


@pytest.fixture(autouse=True)
def whole(simulated: Running) -> None:
    whole_again(simulated, 3)


MORE = [pytest.mark.nightly, pytest.mark.outage]


def more(test: Any) -> Any:
    """A test for the night, with production's limits."""
    return pytest.mark.nightly(pytest.mark.outage(test))


OFTEN, RARELY = ("ingress", "redis"), ("haproxy", "controller", "ingress-hang", "redis-slow")


@pytest.mark.parametrize("kind", [*OFTEN, *(pytest.param(kind, marks=MORE) for kind in RARELY)])
def test_a_stream_outlives(simulated: Running, kind: str) -> None:
    async def strike(parts: Parts, told: list[Told]) -> None:
        if kind == "redis":
            await asyncio.to_thread(on_disk, simulated)
        fault = FAULTS[kind]
        pid = parts.pids(fault.kind)[-1]
        await fault.strike(parts, pid)

    # Only silence tells a client that an ingress hangs.
    silent_s = 6.0 if kind == "ingress-hang" else 60.0
    under(simulated, strike, simulated_text, TOKENS, silent_s=silent_s)


@contextmanager
def attached(url: str, key: str) -> Iterator[OpenAI]:
    """The unmodified SDK behind `hermes-serve attach`."""
    words = [sys.executable, "-P", "-m", "serve_app.cli.main", "attach", url, "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        (here,) = re.findall(r"(http://\S+)/v1 until", process.stdout.readline())
        yield openai_client(here, key)
        process.terminate()


@contextmanager
def reconnecting(url: str, key: str) -> Iterator[OpenAI]:
    with httpx.Client(transport=ReconnectingTransport(), timeout=30) as http:
        yield openai_client(url, key, http)


@more
@pytest.mark.parametrize("kind", ["ingress", "haproxy"])
@pytest.mark.parametrize("through", [reconnecting, attached])
def test_the_sdk_over_what_reconnects_does_not_notice(
    simulated: Running, kind: str, through: Any
) -> None:
    parts = Parts(simulated.service)
    with through(simulated.url, simulated.keys["acme"]) as sdk:
        text = ""
        chunks = sdk.chat.completions.create(**asking("Do not notice.", 240, stream=True))
        for number, chunk in enumerate(chunks):
            text += chunk.choices[0].delta.content or ""
            if number == 20:
                for pid in parts.pids(kind):
                    parts.kill(pid)
    assert text == simulated_text("Do not notice.", 240)


@more
@pytest.mark.clock
def test_the_unmodified_sdk_sits_out_engines_that_stand_still(simulated: Running) -> None:
    """Comments keep the connection alive, and are none of the SDK's business."""
    parts = Parts(simulated.service)
    arrivals_s, text = [], ""

    def send(number: signal.Signals) -> None:
        for pid in parts.pids("worker"):
            parts.send(pid, number)

    mended = threading.Timer(4, send, [signal.SIGCONT])
    for chunk in simulated.sdk.chat.completions.create(**asking("Wait.", 200, stream=True)):
        text += chunk.choices[0].delta.content or ""
        arrivals_s.append(time.monotonic())
        if len(arrivals_s) == 20:
            send(signal.SIGSTOP)
            mended.start()
    mended.join()
    longest_s = max(after - before for before, after in pairwise(arrivals_s))
    assert longest_s > 1, "longer than a heartbeat"
    assert text == simulated_text("Wait.", 200)


@pytest.mark.nightly
def test_who_sends_again_because_an_ingress_died_gets_the_first_answer(simulated: Running) -> None:
    """As unmodified SDKs do before the first byte, and agents in mid-stream."""
    prompts = [f"Once and no more: {number}." for number in range(6)]
    sdk = simulated.sdk.with_options(max_retries=10)
    retried, listed = [], partial(simulated.http.get, "/v1/requests", params={"limit": 100})
    before = {one["id"] for one in listed().json()["data"]}

    def whole(prompt: str) -> str:
        answer = sdk.chat.completions.with_raw_response.create(**asking(prompt, TOKENS))
        retried.append(answer.retries_taken)
        return answer.parse().choices[0].message.content or ""

    def streamed(prompt: str) -> str:
        while True:
            try:
                return text_of_chunks(
                    sdk.chat.completions.create(**asking(prompt, TOKENS, stream=True))
                )
            except (APIError, httpx.HTTPError):
                retried.append(1)

    def new() -> set[str]:
        page = listed().json()["data"]
        return {one["id"] for one in page if one["state"] in ("running", "completed")} - before

    def kill() -> str:
        until("all run", lambda: len(new()) == len(prompts))
        parts = Parts(simulated.service)
        parts.kill(parts.pids("ingress")[-1])
        return ""

    asked: list[Callable[[], str]] = [
        partial(streamed if n % 2 else whole, one) for n, one in enumerate(prompts)
    ]
    texts = together([*asked, kill])
    assert texts == [*(simulated_text(one, TOKENS) for one in prompts), ""]
    assert any(retried)
    assert len(new()) == len(prompts), "nothing is computed twice"


def test_a_worker_that_is_killed_hands_its_streams_on(simulated: Running) -> None:
    workers = Parts(simulated.service).pids("worker")

    async def strike(parts: Parts, told: list[Told]) -> None:
        for pid in workers[:2]:
            parts.kill(pid)

    told = under(simulated, strike, simulated_text, TOKENS, count=12)
    assert max(attempts(told)) >= 2


@more
def test_an_engine_that_stands_still_is_sick_whatever_its_process_says(simulated: Running) -> None:
    async def strike(parts: Parts, told: list[Told]) -> None:
        async with httpx.AsyncClient(headers=simulated.headers, timeout=60) as http:
            body = simulated.body("STANDSTILL, please", 40, stream=True)
            standing = asyncio.create_task(http.post(f"{simulated.url}{CHAT}", json=body))
            await asyncio.sleep(7)
            standing.cancel()
            await asyncio.gather(standing, return_exceptions=True)

    under(simulated, strike, simulated_text, TOKENS, count=12)


@more
def test_all_processes_at_once_and_a_start_afterwards(simulated: Running) -> None:
    """Everything but Ray's own daemons dies; Ray and Redis start it again."""

    async def strike(parts: Parts, told: list[Told]) -> None:
        await asyncio.to_thread(on_disk, simulated)
        for kind in ("controller", "haproxy", "ingress", "worker"):
            for pid in parts.pids(kind):
                parts.kill(pid)
        (redis,) = parts.pids("redis")
        parts.kill(redis)
        await asyncio.to_thread(parts.service.restart_redis)

    told = under(simulated, strike, simulated_text, TOKENS, give_up_s=400)
    assert min(attempts(told)) >= 1
    until("it is ready", lambda: simulated.http.get("/readyz").status_code == 200)
