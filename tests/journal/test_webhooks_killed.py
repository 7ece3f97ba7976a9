"""Senders that are killed as processes, and how soon an event is told."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.http_server import sending, serving, whole
from tests.journal.in_process import door
from tests.journal.journal_helpers import World
from tests.journal.receiving import (
    SECRET,
    nothing_waits,
    receivers,
    sender,
    subjects,
    tell,
    verified,
    world_with,
)
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
OK = sending(whole(200, b""))
KILLS, EACH = 20, 10
PROCESS = """
import asyncio, sys
from serve_app import timings
from serve_app.settings import Settings
from tests.journal.receiving import sender
timings.WEBHOOK_LEASE_S, timings.WEBHOOK_LOOK_S = 1.0, 0.02

async def run():
    async with sender(Settings.model_validate_json(sys.argv[1])):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(run())
"""


@pytest.mark.nightly
async def test_twenty_killed_processes_lose_nothing(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is killed while it delivers; the next one begins beside what it has left."""
    monkeypatch.setenv("HOOKS", SECRET)

    def slowly(asked: object, wire: object) -> None:
        time.sleep(0.01)
        OK(asked, wire)  # type: ignore[arg-type] # passed on

    with serving(slowly) as server:
        world_with(w, **receivers(a=server.url))
        given = w.settings.model_dump_json(exclude_unset=True)
        expected: set[str] = set()
        for kill in range(KILLS):
            names = [f"resp_{kill}_{number}" for number in range(EACH)]
            expected.update(names)
            command = sys.executable, "-c", PROCESS, given
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE)
            try:
                assert process.stdout is not None
                assert await process.stdout.readline() == b"ready\n"
                before = len(server.asked)
                await tell(w.link, w.settings, *names)
                await eventually(lambda: len(server.asked) > before + kill % EACH)  # noqa: B023
            finally:
                process.kill()
                await process.wait()
        monkeypatch.setattr("serve_app.timings.WEBHOOK_LOOK_S", 0.02)
        async with sender(w.settings):
            await eventually(lambda: nothing_waits(w))
        assert subjects(server).keys() == expected
        ids = {(one.headers["webhook-id"], verified(one)["data"]["id"]) for one in server.asked}
        assert len(ids) == len(expected)


@pytest.mark.clock
async def test_an_end_is_told_within_two_seconds(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is woken: between two looks there is a second."""
    monkeypatch.setenv("HOOKS", SECRET)
    took_s = []
    with serving(OK) as server:
        async with door(redis_url, namespace, webhooks=receivers(a=server.url)) as at:
            for number in range(1, 101):
                request_id = await at.detached("a lighthouse")
                await at.http.delete(f"/v1/requests/{request_id}")
                began_s = time.monotonic()
                await eventually(lambda: len(server.asked) == number)  # noqa: B023
                took_s.append(time.monotonic() - began_s)
    took_s.sort()
    print(f"told after {took_s[50] * 1000:.0f} ms (p50), {took_s[98] * 1000:.0f} ms (p99)")
    assert took_s[98] <= 2.0
