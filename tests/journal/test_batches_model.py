"""A batch whose leader is killed between any two of its commands and writes: the next one makes of
it what it would have been.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from pathlib import Path

import pytest

from serve_app import timings
from serve_app.batches import job, leading
from serve_app.batches.record import BatchState
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import usage_key
from tests.journal.batching import STILL, Bench, Knife, bench
from tests.journal.journal_helpers import World
from tests.tables import Failures

_MOST_COMMANDS = 60
PROMPTS = ["p0", "p1", "p2"]


@pytest.fixture
def sections() -> dict[str, object]:
    return STILL


async def killed_at(at: Bench, knife: Knife) -> bool:
    """Kill a leader at that command, and check what the next one makes of its batch. Returns
    whether there was such a command.
    """
    at.worker.prompts.clear()
    at.worker.calls.clear()
    async with at.leader(knife):
        batch = await at.create(PROMPTS)
        over = asyncio.create_task(at.over(batch))
        dead = asyncio.create_task(knife.dead.wait())
        await asyncio.wait([over, *([] if knife.lives else [dead])], return_when=FIRST_COMPLETED)
        dead.cancel()
    async with at.leader():
        found = await over
    told = (found.state, found.total, found.completed, found.failed)
    assert told == (BatchState.COMPLETED, 3, 3, 0)
    lines = await at.lines(found.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == PROMPTS
    assert found.error_file_id == ""
    assert (found.usage.prompt, found.usage.output) == (9, 15), "each is counted once"
    assert sorted(at.worker.prompts) == PROMPTS, "none is computed twice"
    assert len({request_id for request_id, _ in at.worker.calls}) == 3, "none is accepted twice"
    assert await at.w.redis.hget(events_key(at), batch.facts.id) == b"1", "its end is told once"
    assert await at.keys() == []
    assert await at.files.delete("t", found.output_file_id)
    left = [path async for path in at.storage.under("files")]
    assert left == [batch.facts.input_path], "nothing else was written"
    await at.storage.delete(left)
    return knife.dead.is_set()


def events_key(at: Bench) -> str:
    return usage_key(at.w.settings.namespace, 0)


DEATHS = {
    "before it is executed": (False, False),
    "behind it": (True, False),
    "only its answer is lost": (True, True),
}


@pytest.mark.parametrize(
    "how",
    [
        "before it is executed",
        "only its answer is lost",
        pytest.param("behind it", marks=pytest.mark.nightly),  # as before the next one
    ],
)
async def test_a_leader_may_die_between_any_two_commands(
    w: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(timings, "BATCH_RETRY_S", (0.01,))
    monkeypatch.setattr(timings, "BATCH_REFUSED_S", (0.01,))
    monkeypatch.setattr(timings, "BATCH_RENEW_S", 0.05)
    monkeypatch.setattr(job, "_A_TAKE", 2)  # so that lines are taken twice
    async with bench(w, tmp_path) as at:

        def telling(settings: object, event: str, subject: str, *_: object) -> list[Command]:
            return [("HINCRBY", events_key(at), subject, 1)]

        monkeypatch.setattr(leading, "telling", telling)
        dies = True
        with Failures() as failures:
            for number in range(1, _MOST_COMMANDS):
                with failures.of(number):
                    dies = await killed_at(at, Knife(number, *DEATHS[how]))
                if not dies:
                    break
        assert not dies
        assert number > 20, "it has as many commands"
