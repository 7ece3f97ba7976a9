"""Batches on services whose processes die by `kill -9`: real Ray Serve, Redis and HAProxy."""

from __future__ import annotations

import pytest

from scripts.chaos_testing.parts import Parts
from tests.service.batching import Batch
from tests.service.disturbance import on_disk, simulated_text, whole_again
from tests.service.support import Running
from tests.waiting import until

pytestmark = pytest.mark.disturbs
LINES, KILLED_AT, TOKENS = 64, 27, 200
REAL_TOKENS = 40


@pytest.mark.parametrize(
    "killed",
    [
        ["worker"],
        # Its lease lasts 30 s here; tests/journal/test_batches_run.py has the same.
        pytest.param(["ingress", "worker"], marks=pytest.mark.nightly),
    ],
    ids=" and ".join,
)
def test_a_batch_outlives(simulated: Running, killed: list[str]) -> None:
    whole_again(simulated, 3)
    prompts = {f"line-{number}": f"Tell me of the sea, {number}." for number in range(LINES)}
    batch = Batch(simulated, prompts, TOKENS)
    until("some lines are done", lambda: batch.done() >= KILLED_AT)
    holding = until("a line runs", batch.holders)
    assert len(holding) == 2
    for kind, pid in zip(("ingress", "worker"), holding, strict=True):
        if kind in killed:
            Parts(simulated.service).kill(pid)
    batch.check(lambda prompt: simulated_text(prompt, TOKENS))
    whole_again(simulated, 3)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_lines_on_the_real_engine_are_answered_as_without_kills(service: Running) -> None:
    """Ingresses, workers, engine cores and Redis die while 300 lines are worked on."""
    prompts = {f"line-{number}": f"What is {number} times {number}?" for number in range(300)}
    unbroken = {prompt: service.text(prompt, REAL_TOKENS) for prompt in prompts.values()}
    batch, parts = Batch(service, prompts, REAL_TOKENS), Parts(service.service)
    for number, kind in enumerate(("worker", "ingress", "redis", "engine"), 1):
        until("lines are done", lambda number=number: batch.done() >= 55 * number)  # type: ignore[misc]
        if kind == "redis":
            on_disk(service)
            parts.kill(*parts.pids("redis"))
            service.service.restart_redis()
        else:
            parts.kill(parts.pids(kind)[-1])
    batch.check(unbroken.__getitem__)
    whole_again(service, 2)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_lines_outlive_fifty_kills(simulated: Running) -> None:
    """Ingresses, workers and Redis die in turn; one line of a hundred is refused."""
    whole_again(simulated, 3)
    prompts = {f"line-{number}": f"Tell me of the sea, {number}." for number in range(10_000)}
    batch, parts = Batch(simulated, prompts, 8, [*prompts][::100]), Parts(simulated.service)
    for number in range(1, 51):
        until(f"{number}", lambda least=190 * number: batch.done() >= least)  # type: ignore[misc]
        kind = ("ingress", "worker", "redis")[number % 3]
        if kind == "redis":
            on_disk(simulated)
            parts.kill(*parts.pids("redis"))
            simulated.service.restart_redis()
        elif alive := parts.pids(kind):
            parts.kill(alive[-1])
    batch.check(lambda prompt: simulated_text(prompt, 8))
    whole_again(simulated, 3)
