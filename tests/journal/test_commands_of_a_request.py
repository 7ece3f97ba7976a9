"""What a request costs in Redis, by Redis's own count: a real ingress and a real worker with the
simulated engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from serve_app import timings
from serve_app.contract import AttemptResult, CallResult, CompletionStats, Reason
from serve_app.policy.tenant_limits import Limits
from serve_app.policy.tenants import Tenant
from serve_app.settings.webhooks import WebhookSettings
from tests.journal.in_process import Door, calling, in_process, worker_process
from tests.journal.journal_helpers import World
from tests.waiting import eventually

MANY = 10
ADMITTED = ("evalsha", "xadd", "xadd", "pexpire", "set", "zremrangebyrank", "pexpire")
ADMITTED_BY_KEY = (*ADMITTED, "get", "xrevrange")
CLAIMED = ("xreadgroup",)
OPENED = ("xadd", "xrange", "getrange")
ACKNOWLEDGED = ("xdel", "xack")
ENDED = (
    *("evalsha", "xdel", "xadd", "xadd", "hget", "hset", "xtrim", "pexpire", "unlink"),
    *ACKNOWLEDGED,
)
"""The last bytes, the terminal entry, and the end of the queue entry, in
one transaction.
"""
RECORD = ("evalsha", "xrevrange", "xlen")
TWINS = ("set", "pubsub", "getdel")
"""Without an idempotency key a retry may join it: it is listed among its twins, until it ends."""
LIMITED = ("get", "set", "zcard")
"""In the script that accepts it, and in that which ends it, if its tenant has limits."""
RUNNING = ("pexpire",)
"""If its tenant has a limit on requests at a time; and a `ZRANGEBYSCORE`, a `ZADD` and a `ZREM`."""
ANSWERED = ("publish",)
"""The wake-up of the opening goes with that of the end."""
EACH = Counter((*ADMITTED, *TWINS, *CLAIMED, *OPENED, *ANSWERED, *ENDED))
BACKGROUND = {"time", "zadd", "zrem", "zremrangebyscore", "zrangebyscore"}
"""What processes do to renew their leases, whether there are requests or not. A `ZADD` lists a
request, too.
"""
PERIODS = (
    *("DEADLINE_SWEEP_S", "TAKE_OVER_S", "DEPTHS_LOOK_S", "OPENING_WAKE_S", "READER_RENEW_S"),
    *("LEASE_RENEW_S", "LEASE_PATIENCE_S", "BATCH_RENEW_S", "SUBSCRIPTION_PING_S"),
    *("FOLLOWER_SILENCE_S", "WRITER_SILENCE_S"),
)


@pytest.fixture
def sections() -> dict[str, Any]:
    return {"engine": {"kind": "simulated"}, "telemetry": {"snapshot_period_s": 3_600}}


def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing is done by the clock, so it does not count how long the requests take."""
    for name in PERIODS:
        monkeypatch.setattr(timings, name, 1e6)
    monkeypatch.setattr(timings, "CLAIM_BLOCK_MS", 100_000)


async def calls(w: World) -> Counter[str]:
    """How often Redis has executed each command."""
    stats = await w.operator.info("commandstats")
    names = {name: name.removeprefix("cmdstat_").partition("|")[0] for name in stats}
    return sum((Counter({names[name]: stats[name]["calls"]}) for name in stats), Counter[str]())


async def ask(d: Door) -> None:
    """Send a request, and wait until its queue entry is gone and its cost is settled."""
    body = {"model": "hermes-tiny", "prompt": "warm up", "max_tokens": 1}
    answer = await d.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    await eventually(lambda: not d.ingress.dispatcher.in_flight)


def paid(d: Door) -> float:
    """What the tenants of `standard` have been charged."""
    counters = d.ingress.dispatcher._scheduler.lines["standard"].counters
    return sum([*counters._idle.values(), *counters._waiting.values()])


@pytest.mark.parametrize("silent", [False, True], ids=["", "a worker that does not tell"])
async def test_a_request_costs_no_more_commands(
    w: World, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """Where a worker does not tell what was written, the journal is read for that; nor does it tell
    then that its end has removed the queue entry.
    """

    async def told(_: str, answer: Awaitable[AttemptResult]) -> AttemptResult:
        return AttemptResult((await answer).outcome) if silent else await answer

    async with in_process(w.settings, around=told) as d:
        still(monkeypatch)
        await ask(d)
        first = paid(d)
        before = await calls(w)
        for _ in range(MANY):
            await ask(d)
        count = await calls(w) - before
        each = {name: n // MANY for name, n in count.items() if name not in BACKGROUND}
        untold = Counter((*RECORD, *ACKNOWLEDGED)) if silent else Counter[str]()
        assert Counter(each) == EACH + untold
        assert paid(d) == pytest.approx((1 + MANY) * first)
        assert d.ingress.dispatcher._scheduler.lengths._judged == 1 + MANY


async def test_an_idempotency_key_costs_no_connection_and_no_round_trip(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_process(w.settings) as d:
        still(monkeypatch)
        await ask(d)
        opened = (await w.operator.info("stats"))["total_connections_received"]
        before = await calls(w)
        for number in range(MANY):
            d.http.headers["idempotency-key"] = f"key {number}"
            await ask(d)
        count = await calls(w) - before
        each = {name: n // MANY for name, n in count.items() if name not in BACKGROUND}
        assert Counter(each) == EACH - Counter((*ADMITTED, *TWINS)) + Counter(ADMITTED_BY_KEY)
        assert (await w.operator.info("stats"))["total_connections_received"] == opened


async def test_limits_of_its_tenant_cost_no_round_trip(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(100_000, 10**9, 1_000, 10**9, 0, 10**12)
    async with in_process(w.settings) as d:
        monkeypatch.setattr(d.ingress.api_keys, "tenant", lambda *_: Tenant("t", limits=limits))
        still(monkeypatch)
        await ask(d)
        before = await calls(w)
        for _ in range(MANY):
            await ask(d)
        count = await calls(w) - before
        each = {name: n // MANY for name, n in count.items() if name not in BACKGROUND}
        assert Counter(each) == EACH + Counter((*LIMITED, *LIMITED, *RUNNING))


async def test_its_end_costs_one_command_for_each_webhook_and_none_without(w: World) -> None:
    hook = {"url": "http://127.0.0.1:1", "secret": "env:HOOKS"}
    added = []
    for endpoints in ({}, {"a": hook}, {"a": hook, "b": hook}):
        webhooks = WebhookSettings.model_validate({"endpoints": endpoints})
        async with in_process(w.settings.model_copy(update={"webhooks": webhooks})) as d:
            before = await calls(w)
            request_id = await d.detached("a lighthouse", max_tokens=1)
            answer = await d.http.get(f"/v1/requests/{request_id}/response")
            assert answer.status_code == 200
            added.append((await calls(w) - before)["xadd"])
    assert [count - added[0] for count in added] == [0, 1, 2]


async def test_a_stream_that_is_broken_off_costs_what_was_written_and_teaches_nothing(
    w: World,
) -> None:
    answers: list[AttemptResult] = []

    async def told(_: str, answer: Awaitable[AttemptResult]) -> AttemptResult:
        answers.append(await answer)
        return answers[-1]

    async with in_process(w.settings, around=told) as d:
        body = {"model": "hermes-tiny", "prompt": "on and on", "stream": True}
        asked = {**body, "max_tokens": 100_000}
        async with d.http.stream("POST", "/v1/completions", json=asked) as response:
            async for _ in response.aiter_lines():
                break
            name = response.headers["x-request-id"]
            assert (await d.http.delete(f"/v1/requests/{name}")).status_code == 200
        await eventually(lambda: not d.ingress.dispatcher.in_flight)
        ((outcome, written, acknowledged),) = answers
        assert outcome == CallResult.ENDED
        assert not acknowledged, "who ends it from outside does so"
        assert written is not None
        assert 0 < written.tokens < 10_000
        assert not written.whole
        assert 2 * written.tokens < paid(d) < 2 * written.tokens + 1_000, "and the prompt"
        assert d.ingress.dispatcher._scheduler.lengths._judged == 0


async def test_a_worker_tells_that_it_has_not_begun_a_request_that_was_cancelled_before(
    w: World,
) -> None:
    await w.admit()
    await w.endings.end("req_1", Reason.CANCELLED)
    async with worker_process(w.settings) as worker:
        answer = await calling(worker)("req_1", 1, "s", "")
    assert answer == AttemptResult(CallResult.ENDED, CompletionStats(0, whole=False, begun=False))


async def test_the_end_removes_its_queue_entry_whoever_called(w: World) -> None:
    await w.admit()
    (entry,) = await w.queue().claim(1)
    async with worker_process(w.settings) as worker:
        answer = await calling(worker)("req_1", 1, "s", "")
    assert answer.acknowledged == entry.entry_id
    assert await w.redis.xlen(entry.stream) == 0
    assert (await w.depths())["standard"].claimed == 0
