"""Data that cannot be decoded ends no loop, hides nothing else, and is kept as a dead letter."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from serve_app import timings
from serve_app.cli import dead
from serve_app.contract import WorkerLease
from serve_app.journal.entries import REQUEST_ID, Entry
from serve_app.journal.reader import JournalReader
from serve_app.loops import Loops
from serve_app.observability.metrics import Telemetry
from serve_app.observability.metrics_pages import Snapshots, merge_pages
from serve_app.redis.keyspace import ingresses_key, metrics_key, workers_key
from serve_app.request_queue import QueueEntry
from serve_app.requests.dead_letters import DeadLetters, UnreadableLetter
from serve_app.requests.deadlines import Deadlines
from tests.journal.in_process import door
from tests.journal.ingresses import REPLICA, ended, serving
from tests.journal.journal_helpers import World
from tests.tables import Failures
from tests.waiting import eventually

LATER_MS = 10**14
GOOD = {
    **{"r": "req_good", "t": "t", "s": "s", "c": "7", "i": "7", "o": "0", "k": ""},
    "d": str(LATER_MS),  # what is overdue may be removed before it is claimed
}
MALFORMED: dict[str, dict[str, Any]] = {
    "without a deadline": {name: GOOD[name] for name in GOOD if name != "d"},
    "a deadline that is no number": {**GOOD, "d": "soon"},
    "a deadline of many digits": {**GOOD, "d": "9" * 5_000},
    "a cost below nothing": {**GOOD, "c": "-1"},
    "a request id that is no text": {**GOOD, "r": b"\xff\xfe"},
    "an empty request id": {**GOOD, "r": ""},
    "an endless request id": {**GOOD, "r": "r" * 10_000},
}


def unread(w: World) -> DeadLetters:
    return DeadLetters(w.link, w.settings.namespace, 100)


async def test_unreadable_queue_entries_become_dead_letters_and_hide_no_others(
    w: World, redis_url: str, namespace: str
) -> None:
    stream = w.stream("standard")
    for fields in MALFORMED.values():
        await w.redis.xadd(stream, fields)
    await w.admit("req_1")

    async def letters() -> list[UnreadableLetter]:
        return [one async for one in unread(w).each() if isinstance(one, UnreadableLetter)]

    async def all_kept() -> bool:
        return len(await letters()) >= len(MALFORMED)

    async with serving(w) as (_, ingress):
        await eventually(lambda: ended(w, "req_1"))
        await eventually(all_kept)  # one that a busy Redis did not take is tried again
        assert ingress.base.loops.failing == []
        count = ingress.base.telemetry.registry.get_sample_value
        assert count("hermes_loop_restarts_total", {"loop": "dispatcher"}) == 0
    kept = await letters()
    assert len(kept) == len(MALFORMED)
    assert all(letter.source.startswith(f"{stream} ") for letter in kept)
    good = {name.encode(): value.encode() for name, value in GOOD.items()}
    assert good | {b"d": b"soon"} in [letter.fields for letter in kept]
    async with door(redis_url, namespace) as at:
        words = ["list", "--url", f"http://127.0.0.1:{at.port}"]
        done = await asyncio.to_thread(CliRunner().invoke, dead.letters, words)  # has its own loop
    assert done.exit_code == 0, done.stderr
    shown = done.stdout
    assert f"{len(MALFORMED)} that nobody could read:" in shown
    assert "d=soon" in shown
    assert "r=<10000 bytes>" in shown


@pytest.mark.parametrize("facts", [b"no json", b"{}"])
async def test_a_request_with_an_unreadable_journal_ends_with_journal_lost(
    w: World, facts: bytes
) -> None:
    await w.admit("req_1")
    await w.redis.xadd(w.store.key("req_1"), {"n": b"nonce", "m": facts}, id="1-0")
    await w.queue("ingress-2").claim(1)
    async with serving(w):
        await eventually(lambda: ended(w, "req_1"))
    assert await w.ending() == ("failed", "journal_lost")
    assert [type(letter) async for letter in unread(w).each()] == [UnreadableLetter]


@pytest.mark.parametrize("defect", [KeyError("ours"), ValueError("ours"), TypeError("ours")])
@pytest.mark.parametrize("where", ["_tell_wait", "_call"])
async def test_a_defect_of_ours_ends_no_request_unless_it_stays(
    w: World, monkeypatch: pytest.MonkeyPatch, where: str, defect: Exception
) -> None:
    monkeypatch.setattr(timings, "DEFECT_RETRY_S", (0.01, 0.01))
    async with serving(w) as (_, ingress):
        attempts = ingress.dispatcher._attempts
        step, left = getattr(attempts, where), Counter(req_1=2, req_bad=10**6)

        async def awaited(entry: QueueEntry, *args: Any) -> Any:
            fail(entry)
            return await step(entry, *args)

        def fail(entry: QueueEntry, *args: Any) -> Any:
            left[entry.request_id] -= 1
            if left[entry.request_id] >= 0:
                raise defect
            return step(entry, *args) if where == "_tell_wait" else None

        setattr(attempts, where, fail if where == "_tell_wait" else awaited)
        for name in ("req_bad", "req_1"):
            await w.admit(name)
        await eventually(lambda: ended(w, "req_1"))
        await eventually(lambda: ended(w, "req_bad"))
    assert await w.ending("req_1") == ("completed", "")
    assert await w.ending("req_bad") == ("failed", "internal")
    assert [letter async for letter in unread(w).each()] == []


async def test_a_journal_that_nobody_can_read_is_said_to_be_lost_and_hides_no_others(
    redis_url: str, namespace: str, w: World
) -> None:
    asked = {"model": "hermes-tiny", "input": "Hi", "background": True}
    async with door(redis_url, namespace) as at:
        bad, good = [
            (await at.http.post("/v1/responses", json=asked)).json()["id"] for _ in range(2)
        ]
        name = bad.removeprefix("resp_")
        await w.redis.xadd(w.store.key(name), {"n": b"nonce", "m": b"no json"}, id="1-0")
        one, response = f"/v1/requests/{name}", f"/v1/responses/{bad}"
        with Failures() as failures:
            for method, path in (
                *(("GET", path) for path in (one, f"{one}/events", f"{one}/response", response)),
                *(("DELETE", one), ("DELETE", response), ("POST", f"{response}/cancel")),
                *(("GET", f"{response}/input_items"), ("POST", "/v1/responses")),
            ):
                with failures.of(method, path):
                    body = {"input": "?", "previous_response_id": bad} if "POST" in method else None
                    answer = await at.http.request(method, path, json=body)
                    told = (answer.status_code, answer.json()["error"]["code"])
                    assert told == (410, "journal_lost")
        listed = (await at.http.get("/v1/requests")).json()["data"]
        assert [found["id"] for found in listed] == [good.removeprefix("resp_")]


async def test_a_client_of_an_unreadable_request_is_answered_at_its_deadline(
    redis_url: str, namespace: str, w: World
) -> None:
    async with door(redis_url, namespace) as at:
        asking = at.posted("Hi", **{"x-request-timeout-seconds": "0.2"})
        (name,) = await at.waiting(1)
        await w.operator.delete(w.store.key(name))
        await w.operator.xadd(w.store.key(name), {"r": b"{}", "m": b"no json"}, id="0-1")
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")


async def test_a_late_request_with_an_unreadable_journal_keeps_no_other_from_expiring(
    w: World,
) -> None:
    for name in ("req_bad", "req_late"):
        await w.admit(name, timeout_s=-300)
    await w.redis.xadd(w.store.key("req_bad"), {"n": b"nonce", "m": b"no json"}, id="1-0")
    w.told_the_time()
    await Deadlines(w.link, w.settings.namespace, w.endings, Loops()).sweep()
    assert await w.ending("req_late") == ("expired", "deadline")
    (left,) = await w.redis.xrange(w.stream("standard"))
    assert left[1][b"r"] == b"req_bad", "for who claims it"


async def test_an_unreadable_wake_up_is_dropped_and_the_next_ones_arrive(w: World) -> None:
    hub = await w.hub()
    before = hub._connection
    await w.admit()
    follower = hub.follow_new("req_1")
    await w.redis.publish(w.channel, b"\xc1 no message pack")
    await w.opened(await w.writer())
    await eventually(lambda: follower.reader.attempts == 1)
    assert hub._connection is before


async def test_followers_of_an_unreadable_journal_end_and_delay_no_others(w: World) -> None:
    hub = await w.hub()
    await w.admit("req_bad", wake="elsewhere")
    await w.admit("req_1", wake="elsewhere")
    bad, good = await hub.follow("req_bad", 0), await hub.follow("req_1", 0)
    waiting = [asyncio.create_task(_watched(follower)) for follower in (bad, good)]
    await w.redis.xadd(w.store.key("req_bad"), {"n": b"nonce", "m": b"no json"}, id="1-0")
    await eventually(lambda: bad.reader.ending)
    assert bad.reader.ending is not None
    assert bad.reader.ending.reason == "journal_lost"
    await w.opened(await w.writer())
    await eventually(lambda: good.reader.attempts == 1)
    for task in waiting:
        task.cancel()


async def test_a_defect_in_a_reader_ends_that_reader_alone(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = await w.hub()
    before, bad, good = hub._connection, hub.follow_new("req_1"), hub.follow_new("req_1")

    def feed(_: JournalReader, entry: Entry) -> None:
        raise KeyError("ours")

    defective = type("Defective", (JournalReader,), {"feed": feed})
    monkeypatch.setattr(bad, "reader", defective(position=REQUEST_ID))
    await w.admit()
    await w.opened(await w.writer())
    await eventually(lambda: good.reader.attempts == 1)
    assert bad.reader.ending is not None
    assert bad.reader.ending.reason == "internal"
    assert hub._connection is before
    assert await w.ending() == ("", "")


async def _watched(follower: Any) -> None:
    while True:
        await follower.wait()


async def test_an_unreadable_member_hides_no_others(w: World, namespace: str) -> None:
    async with serving(w) as (_, ingress):
        workers, names = (b"replica|many", b"\xff|3", b""), (b"\xff\xfe", b"")
        await w.redis.zadd(workers_key(namespace), dict.fromkeys(workers, LATER_MS))
        await w.redis.zadd(ingresses_key(namespace), dict.fromkeys(names, LATER_MS))
        looked = ingress.membership._trust._looked_s
        await eventually(lambda: ingress.membership._trust._looked_s > looked)
        assert WorkerLease(REPLICA, 8) in ingress.membership.members.workers
        assert "ingress-1" in ingress.membership.members.names


async def test_an_unreadable_metrics_page_hides_no_others(w: World, namespace: str) -> None:
    one = Snapshots(w.link, namespace, "one", Telemetry(), 60, Loops())
    await w.redis.set(metrics_key(namespace, "two"), b"no zlib")
    assert set(await one.pages(["two"])) == {"one"}
    page = merge_pages({"one": b"up 1\n", "two": b"\xff", "three": b"{{{ 1\n"}, CollectorRegistry())
    assert b'up{replica="one"} 1\n' in page
