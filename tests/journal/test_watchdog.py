"""What `scripts/chaos` counts as a stalled request."""

from __future__ import annotations

import asyncio

from scripts.chaos_testing.watchdog import Watchdog
from tests.journal.journal_helpers import World
from tests.waiting import eventually


async def test_a_claim_that_no_ingress_works_on_is_found_in_a_real_redis(
    w: World, namespace: str
) -> None:
    await w.admit("req_lost")
    await w.queue("ingress-1").claim(1)
    await w.admit("req_waits")  # no engine has room
    dog = Watchdog(w.operator, w.settings.model.name, namespace, within_s=1.5)
    watching = asyncio.create_task(dog.watch())
    await eventually(lambda: dog.findings)
    assert list(dog.findings) == ["req_lost"]
    assert "claimed by ingress-1" in dog.findings["req_lost"]
    watching.cancel()
