"""A batch whose leader is killed between any two of its commands and writes: the next one makes of
it what it would have been.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve_app.batches.record import BatchState
from tests.journal.batching import STILL, Bench, Knife, bench
from tests.journal.journal_helpers import World
from tests.tables import Failures

_MOST_COMMANDS = 60
PROMPTS = ["p0", "p1", "p2"]


@pytest.fixture
def sections() -> dict[str, object]:
    return STILL


async def killed_at(at: Bench, number: int, after: bool) -> bool:
    """Kill a leader at that command, and check what the next one makes of its batch. Returns
    whether there was such a command.
    """
    knife = Knife(number, after)
    at.worker.prompts.clear()
    at.worker.calls.clear()
    async with at.leader(knife):
        batch = await at.create(PROMPTS)
        over = asyncio.create_task(at.over(batch))
        dead = asyncio.create_task(knife.dead.wait())
        await asyncio.wait([over, dead], return_when=asyncio.FIRST_COMPLETED)
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
    assert await at.keys() == []
    assert await at.files.delete("t", found.output_file_id)
    left = [path async for path, _ in at.storage.under("files")]
    assert left == [batch.facts.input_path], "nothing else was written"
    await at.storage.delete(left)
    return knife.dead.is_set()


async def test_a_leader_may_die_between_any_two_commands(w: World, tmp_path: Path) -> None:
    async with bench(w, tmp_path) as at:
        with Failures() as failures:
            for after in (False, True):
                dies = True
                for number in range(1, _MOST_COMMANDS):
                    with failures.of(number, after):
                        dies = await killed_at(at, number, after)
                    if not dies:
                        break
                assert not dies
                assert number > 20, "it has as many commands"
