"""The ingress that works on batches shows how far they are, and no other does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from serve_app import timings
from serve_app.batches.record import BatchState
from serve_app.batches.runner import BatchRunner
from serve_app.contract import Reason
from tests.journal.batching import STILL, bench
from tests.journal.journal_helpers import World
from tests.waiting import eventually


@pytest.fixture
def sections() -> dict[str, object]:
    return STILL


def registry_of(runner: BatchRunner) -> CollectorRegistry:
    """The one of its metrics."""
    found = CollectorRegistry()
    for one in runner.parts.telemetry._made.values():
        found.register(one)
    return found


async def test_a_leader_shows_what_its_batches_do_until_another_leads(
    w: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "BATCH_SHOW_S", 0.01)
    monkeypatch.setattr(timings, "BATCH_RENEW_S", 0.01)
    monkeypatch.setattr(timings, "BATCH_SEGMENT_S", 0.0)
    monkeypatch.setattr(timings, "BATCH_TICK_S", 0.01)
    async with bench(w, tmp_path) as at, at.leader() as leader:
        page = registry_of(leader)

        def shows(name: str, **labels: str) -> float | None:
            return page.get_sample_value(f"hermes_batch{name}", labels)

        async def are(expected: float | None, name: str, **labels: str) -> None:
            await eventually(lambda: shows(name, **labels) == expected)

        at.worker.held["held"] = held = asyncio.Event()
        at.worker.fails["fails"] = Reason.POISON
        batch = await at.create(["p0", "held", "fails"])
        await are(1, "_lines_done_total", outcome="completed")
        await are(1, "_lines_done_total", outcome="failed")
        await are(1, "_lines", state="in_flight")
        await are(0, "_lines", state="waiting")
        await are(1, "es", state="in_progress")
        spare_s = shows("_spare_seconds", batch=batch.facts.id)
        assert spare_s is not None
        assert 0 < spare_s < 3_600
        held.set()
        await at.over(batch)
        assert shows("_lines_done_total", outcome="completed") == 2
        await are(None, "es", state="in_progress")
        await are(None, "_spare_seconds", batch=batch.facts.id)

        at.worker.held["held"] = asyncio.Event()
        cancelled = await at.create(["held"])
        await are(1, "_lines", state="in_flight")
        await at.batches.cancel("t", cancelled.facts.id)
        assert (await at.over(cancelled)).state is BatchState.CANCELLED
        assert shows("_lines_done_total", outcome="cancelled") == 1

        await are(0, "_lines", state="in_flight")
        leader.may_lead = lambda: False
        await are(None, "_lines", state="in_flight")
