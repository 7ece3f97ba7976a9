"""Batches whose files are in S3 and whose Redis is three with Sentinels, as in production: both die
under them by `kill -9`. And how soon a batch that is cancelled ends.

    python -m pytest -s tests/service/test_batches_elsewhere.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.chaos_testing.parts import Parts
from scripts.chaos_testing.sentinels import Sentinels
from serve_app.local import ports
from serve_app.local import service as local
from tests.s3_server import S3Server, s3_server
from tests.service.batching import Batch
from tests.service.disturbance import simulated_text, whole_again
from tests.service.services import CONFIG, HELD, KEYS, Services, end, environment, let_in, limited
from tests.service.support import Running
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.disturbs, pytest.mark.timeout(1200)]
LINES, TOKENS, WITHIN_S = 600, 200, 600.0
FAILOVERS, UNMARKED = 2, 60
DONE, ENDLESS, RUNNING, CANCELLED_S = 32, 160, 64, 10.0
SETTINGS = {
    "engine": {"args": {"tokens_per_s": 20}},
    "workers": {"max_running_requests": 32},
    "queue": {"max_waiting_batch": 1_000},
}


def asking(name: str, lines: int, about: str = "the sea") -> dict[str, str]:
    """The prompts of such lines."""
    return {f"{name}-{number}": f"Tell me of {about}, {number}." for number in range(lines)}


class Elsewhere:
    """A service with three replicas of the simulated engine, its S3 and its Redis."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        for name in ("s3", "redis"):
            (folder / name).mkdir()
        self.s3: S3Server = stack.enter_context(s3_server(folder / "s3"))
        self.sentinels = Sentinels(folder / "redis")
        stack.callback(self.sentinels.stop)
        keys = {"HERMES_KEYS_FILE": str(let_in(folder, "acme", "@metrics"))}
        args = local.merged(limited("simulated", False), SETTINGS)
        service = local.start(
            folder / "service",
            CONFIG,
            ports.free_port(),
            local.merged(args, {"files": {"storage": self.s3.where}}),
            self.sentinels.url,
            environment={**environment(False), **self.s3.environment, **keys},
            timeout_s=900,
        )
        stack.callback(end, service)
        self.running = Running(service, KEYS)
        stack.callback(self.running.close)
        self.look_at(self.sentinels.primary())

    def look_at(self, port: int) -> None:
        """The tests look at this Redis."""
        vars(self.running)["redis"] = self.sentinels.server(port, decode_responses=False)

    def batch(self) -> Batch:
        """One that is under way, with a segment in the storage."""
        made = Batch(self.running, asking("line", LINES), TOKENS)
        until("a segment is written", made.completed)
        return made


@pytest.fixture(scope="module")
def elsewhere(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    services.end()  # memory is for one service
    with ExitStack() as stack:
        yield Elsewhere(tmp_path_factory.mktemp("e"), stack)


def check(batch: Batch) -> None:
    batch.check(lambda prompt: simulated_text(prompt, TOKENS), WITHIN_S)


def test_s3_dies_under_a_batch_and_then_the_ingress_that_leads(elsewhere: Elsewhere) -> None:
    """Its results are in no segment: the next ingress finds them in the journals."""
    batch, service = elsewhere.batch(), elsewhere.running
    elsewhere.s3.kill()
    marked = batch.completed()
    until("results wait", lambda: len([*batch.requests(ended=True)]) >= UNMARKED)
    assert batch.completed() == marked
    leader = until("a line runs", batch.holders)[0]
    Parts(service.service).kill(leader)
    elsewhere.s3.start()
    check(batch)
    whole_again(service, 3)


def test_redis_fails_over_under_a_batch(elsewhere: Elsewhere) -> None:
    batch, sentinels = elsewhere.batch(), elsewhere.sentinels
    for _ in range(FAILOVERS):
        primary, done = sentinels.primary(), batch.completed()
        sentinels.kill(primary)
        elsewhere.look_at(sentinels.until_failed_over(primary))
        until("more lines are done", lambda done=done: batch.completed() > done)  # type: ignore[misc]
        sentinels.all_back()
    check(batch)


@pytest.mark.clock
def test_a_cancelled_batch_ends_within_ten_seconds_with_what_is_done(elsewhere: Elsewhere) -> None:
    """While as many lines as there are places run, none of which would ever end, and more wait."""
    service, short, endless = (
        elsewhere.running,
        asking("short", DONE),
        asking("long", ENDLESS, HELD),
    )
    batch = Batch(service, short | endless, 8)

    def running() -> int:
        return sum(bool(worker) for _, worker in batch.requests(ended=False))

    until("the short ones are done", lambda: batch.done() == DONE)
    until("many others run", lambda: running() >= RUNNING)
    ran, began_s = running(), time.monotonic()
    batch.sdk.batches.cancel(batch.id)
    ended = batch.over()
    took_s = time.monotonic() - began_s
    print(f"\ncancelled_s={took_s:.1f} lines={DONE + ENDLESS} of_which_ran={ran}")
    assert ended.status == "cancelled"
    assert batch.lines(ended.output_file_id).keys() == short.keys()
    told = batch.lines(ended.error_file_id)
    assert told.keys() == endless.keys()
    assert {one["error"]["code"] for one in told.values()} == {"batch_cancelled"}
    assert took_s <= CANCELLED_S
    service.until_idle()
