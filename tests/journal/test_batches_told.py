"""Webhooks tell of each batch's end once, and of none of its lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.batches.leading import Closed
from serve_app.batches.record import Batch, BatchState
from serve_app.contract import CHATS
from tests.http_server import Server, sending, serving, whole
from tests.journal.batching import STILL, Bench, bench
from tests.journal.in_process import in_process, settings_of
from tests.journal.journal_helpers import World
from tests.journal.receiving import (
    nothing_waits,
    per_request,
    quick,
    receivers,
    verified,
    world_with,
)
from tests.waiting import eventually

OK = sending(whole(200, b"thanks"))


@pytest.fixture
def sections() -> dict[str, object]:
    return STILL


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    return quick(monkeypatch)


def told(server: Server) -> list[tuple[str, str]]:
    """The type and the id of each event that was posted."""
    found = [verified(asked) for asked in list(server.asked)]
    return sorted((event["data"]["id"], event["type"]) for event in found)


async def ends(at: Bench) -> dict[BatchState, Batch]:
    """A batch for each way to end."""
    at.worker.held = {"cancelled": asyncio.Event()}
    cancelled = await at.create(["cancelled"])
    await eventually(lambda: "cancelled" in at.worker.begun)
    await at.batches.cancel("t", cancelled.facts.id)
    batches = {
        BatchState.COMPLETED: await at.create(["p0", "p1"]),
        BatchState.CANCELLED: cancelled,
        BatchState.FAILED: await at.create([]),
        BatchState.EXPIRED: await at.create(["expired"], window_s=0.0),
    }
    return {state: await at.over(batch) for state, batch in batches.items()}


async def test_each_end_is_told_once(w: World, tmp_path: Path) -> None:
    """Also if the leader repeats its last step."""
    with serving(OK) as server:
        world_with(w, **receivers(one=server.url))
        async with bench(w, tmp_path) as at, at.leader() as leader:
            found = await ends(at)
            assert {state: batch.state for state, batch in found.items()} == {s: s for s in found}
            for state, batch in found.items():
                await leader.parts.leading.over(batch, Closed(state, "", ""), 0)
            await eventually(lambda: len(server.asked) >= 4)
            await eventually(lambda: nothing_waits(w))
            expected = [(batch.facts.id, f"batch.{state}") for state, batch in found.items()]
            assert told(server) == sorted(expected)


async def test_a_batch_tells_where_its_client_said(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    """A whole service. The URL is refused as that of a request would be."""
    with serving(OK) as server:
        files = {"storage": str(tmp_path / "storage")}
        settings = settings_of(redis_url, namespace, webhooks=per_request(), files=files)
        body = {"model": settings.model.name, "messages": [{"role": "user", "content": "hi"}]}
        line = {"custom_id": "a", "method": "POST", "url": CHATS, "body": {**body, "max_tokens": 2}}
        asked = {"endpoint": CHATS, "completion_window": "1h", "requests": [line]}
        async with in_process(settings) as at:
            for url in ("https://evil.example.com/", "x" * 3_000):
                headers = {"x-hermes-webhook": url}
                refused = await at.http.post("/v1/batches", json=asked, headers=headers)
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "x-hermes-webhook"
            headers = {"x-hermes-webhook": f"{server.url}/done?key=1"}
            made = (await at.http.post("/v1/batches", json=asked, headers=headers)).json()
            assert server.url not in str(made), "it may be secret"
            await eventually(lambda: server.asked)
            assert told(server) == [(made["id"], "batch.completed")]
            assert server.asked[0].path == "/done?key=1"
