"""What `scripts/chaos` counts as a stalled request."""

from __future__ import annotations

import asyncio

from scripts.chaos_testing.watchdog import WITHIN_S, Watchdog
from serve_app.journal.ids import TERMINAL_ID
from tests.journal.journal_helpers import World
from tests.waiting import eventually

SLOT = 1


def test_only_requests_that_stall_without_a_reason_are_found() -> None:
    dog = Watchdog(None, "m")  # type: ignore[arg-type]
    for second in range(2 * int(WITHIN_S)):
        claimed = {
            "req_moves": (f"1-{second // 10}", "a"),
            "req_stands": ("0-1", "a"),
            "req_ended": (str(TERMINAL_ID), "a"),
            "req_is_taken_over": ("0-1", "ab"[second // 10 % 2]),
        }
        dog.seen({"req_waits": "0-1"}, claimed, room=0, passed_s=1.0)
    assert set(dog.findings) == {"req_stands"}
    for _ in range(int(WITHIN_S) + 1):
        dog.seen({"req_waits": "0-1"}, {}, room=SLOT, passed_s=1.0)
    assert set(dog.findings) == {"req_stands", "req_waits"}
    assert "though there is room" in dog.findings["req_waits"]


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
