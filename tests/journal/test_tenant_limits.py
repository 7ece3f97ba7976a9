"""The limits of a tenant hold over all ingresses, exactly: the script that accepts a request counts
it, and the one that ends it gives back what it has not used.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable
from serve_app.policy.tenant_limits import MINUTE, Limits, Standing, month_of
from serve_app.policy.tenants import Tenant
from serve_app.redis.keyspace import limits_key, twins_key
from tests.journal.in_process import in_process, settings_of
from tests.journal.journal_helpers import OPENED, World, add, added, world
from tests.journal.limited import BEGIN_MS, STILL, Clients, clients_of, without_reservation


@pytest.fixture
def sections() -> dict[str, Any]:
    return STILL


def standing(receipt: Any) -> Standing:
    assert isinstance(receipt.standing, Standing)
    return receipt.standing


def left(receipt: Any) -> tuple[int, int]:
    """The remaining requests and tokens that the client is told."""
    headers = standing(receipt).headers("/v1/completions", BEGIN_MS)
    return tuple(int(headers[f"x-ratelimit-remaining-{what}"]) for what in ("requests", "tokens"))  # type: ignore[return-value] # two


# -- faults that other gateways have had -----------------------------------------------------------


async def test_three_ingresses_have_one_limit_and_not_one_each(w: World) -> None:
    """LiteLLM's fault BerriAI/litellm#40291: limit x replicas."""
    async with clients_of(w, requests_per_minute=10) as clients:
        taken = await asyncio.gather(*(clients.accepts() for _ in range(30)))
        assert sum(one is not None for one in taken) == 10


async def test_five_at_a_time_do_not_pass_a_limit_on_tokens(w: World) -> None:
    """LiteLLM's fault BerriAI/litellm#18730: tokens a minute bypassed by concurrency."""
    async with clients_of(w, tokens_per_minute=100) as clients:
        taken = await asyncio.gather(*(clients.accepts(15) for _ in range(5)))
        assert sum(one is not None for one in taken) == 3
        assert await clients.accepts(5), "a smaller one has place"


async def test_what_runs_at_a_time_is_counted_over_all_ingresses(w: World) -> None:
    """LiteLLM's fault BerriAI/litellm#16011: a limit on parallel requests for each worker."""
    async with clients_of(w, concurrent_requests=4) as clients:
        taken = await asyncio.gather(*(clients.accepts() for _ in range(12)))
        running = [one for one in taken if one]
        assert len(running) == 4
        refusal = await clients.refused()
        assert (refusal.reason, refusal.retry_after_s) == (Reason.CONCURRENCY_LIMIT, 1.0)
        assert "4 of your requests wait or run" in refusal.message
        for number in range(2):
            if number:
                await clients.cancel(running[number])
            else:
                await clients.answer(running[number])
            assert await clients.accepts(at=0)
            assert not await clients.accepts(at=1)


# -- what is counted -------------------------------------------------------------------------------


async def test_a_minute_begins_anew_and_what_is_left_never_rises_in_it(w: World) -> None:
    async with clients_of(w, requests_per_minute=9, tokens_per_minute=300) as clients:
        for _ in range(2):
            last = (9, 300)
            for number in range(9):
                receipt = await clients.send(10)
                assert left(receipt) == (8 - number, last[1] - 20)
                last = left(receipt)
                await clients.answer(receipt, 1, 1)
                clients.now_ms += 1_000
            refusal = await clients.refused(10)
            assert refusal.reason == Reason.RATE_LIMIT_EXCEEDED
            assert refusal.more_headers["x-ratelimit-remaining-requests"] == "0"
            assert refusal.more_headers["x-ratelimit-reset-requests"] == "51s"
            assert refusal.retry_after_s == 51.0
            clients.now_ms += 51_000


async def test_what_an_answer_takes_beyond_its_reservation_is_paid_in_the_next_minutes(
    w: World,
) -> None:
    async with clients_of(w, tokens_per_minute=100) as clients:
        receipt = await clients.send(20)
        await clients.answer(receipt, 20, 230)  # 210 more than the 40 that are reserved
        assert left_tokens(await clients.send(20)) == 20, "in this minute nothing changes"
        clients.now_ms += MINUTE
        refusal = await clients.refused(1)
        assert refusal.more_headers["x-ratelimit-remaining-tokens"] == "0"
        assert await clients.accepts(path="/tokenize"), "which takes none"
        clients.now_ms += 2 * MINUTE
        assert left_tokens(await clients.send(5)) == 80, "10 were still to be paid"
        clients.now_ms += MINUTE
        assert left_tokens(await clients.send(5)) == 90


def left_tokens(receipt: Any) -> int:
    headers = standing(receipt).headers("/v1/completions", BEGIN_MS)
    return int(headers["x-ratelimit-remaining-tokens"])


async def test_what_one_answer_leaves_pays_for_what_another_takes_more(w: World) -> None:
    async with clients_of(w, tokens_per_minute=100) as clients:
        short, long = await clients.send(20), await clients.send(20)
        await clients.answer(short, 5, 5)
        await clients.answer(long, 20, 60)
        clients.now_ms += MINUTE
        assert left_tokens(await clients.send(5)) == 80


@pytest.mark.parametrize("dies", [False, True], ids=["by a worker", "from outside"])
async def test_an_end_gives_back_what_was_taken_and_once(w: World, dies: bool) -> None:
    async with clients_of(
        w, concurrent_requests=9, background_tokens=500, tokens_per_month=1_000
    ) as clients:
        staying, receipt = await clients.send(10), await clients.send(40, background=True)
        month = month_of(clients.now_ms)
        minute = clients.now_ms // MINUTE
        before = {"w": minute, "m": month, "r": 2, "t": 100}
        assert await clients.kept() == {**before, "u": 100, "c": 2, "b": 80}
        if dies:
            writer = await w.writer()
            attempt, _ = await writer.open(receipt.request_id, 1, b"nonce", OPENED)
            add(attempt, 1, 2)
            await added(attempt, 3)
            assert await clients.cancel(receipt)
            used = 3
        else:
            await clients.answer(receipt, 30, 3)
            used = 33
        after = {**before, "u": 20 + used, "c": 1, "d": used - 80}
        assert await clients.kept() == after
        assert not await clients.cancel(receipt)
        assert await clients.kept() == after
        await clients.cancel(staying)
        assert await clients.kept() == {**before, "u": used, "d": used - 100}


async def test_what_was_taken_is_given_back_though_the_policy_has_changed(w: World) -> None:
    async with clients_of(w, concurrent_requests=3, background_tokens=100) as clients:
        receipts = [await clients.send(10, background=True) for _ in range(2)]
        others = clients.with_limits(concurrent_requests=2)
        assert not await others.accepts()
        without = clients.with_limits()
        unlimited = await without.send()
        assert unlimited.standing is None
        await without.answer(unlimited)
        await without.answer(receipts[0])
        assert await others.accepts()
        await others.answer(receipts[1])
        kept = await clients.kept()
        assert (kept["c"], kept.get("b", 0)) == (1, 0)


async def test_a_request_without_a_reservation_gives_nothing_back(w: World) -> None:
    """It was accepted before its tenant had limits, or its end is an older version's."""
    async with clients_of(w, concurrent_requests=1) as clients:
        receipt = await clients.send()
        await clients.answer(without_reservation(receipt))
        assert (await clients.kept())["c"] == 1


async def test_a_tenant_without_limits_costs_no_key(w: World) -> None:
    async with clients_of(w) as clients:
        await clients.answer(await clients.send())
        assert await clients.kept() == {}


async def test_the_month_counts_what_was_used_and_begins_anew(w: World) -> None:
    async with clients_of(w, tokens_per_month=100) as clients:
        receipt = await clients.send(40)
        refusal = await clients.refused(20)
        assert refusal.reason == Reason.QUOTA_EXCEEDED
        assert refusal.headers()["x-should-retry"] == "false"
        assert "80 of your 100 tokens of this month" in refusal.message
        await clients.answer(receipt, 40, 10)
        again = await clients.send(20)
        assert not await clients.accepts(20)
        month = month_of(clients.now_ms)
        clients.now_ms += int((refusal.retry_after_s or 0) * 1000)
        assert month_of(clients.now_ms) == month + 1
        last = await clients.send(20)
        await clients.answer(again, 0, 0)
        assert (await clients.kept())["u"] == 40, "an older month's are nobody's any more"
        await clients.answer(last, 0, 0)
        assert (await clients.kept()).get("u", 0) == 0


async def test_background_tokens_are_those_of_what_has_not_ended(w: World) -> None:
    async with clients_of(w, background_tokens=100) as clients:
        receipts = [await clients.send(20, background=True) for _ in range(2)]
        refusal = await clients.refused(20, background=True)
        assert refusal.reason == Reason.CONCURRENCY_LIMIT
        assert "hold 80 of 100 tokens, and this one needs about 40" in refusal.message
        assert await clients.accepts(1_000), "with a reader"
        assert await clients.with_limits(background_tokens=50).accepts(1_000)
        assert await clients.accepts(10, background=True)
        await clients.answer(receipts[0])
        assert await clients.accepts(20, background=True)


async def test_what_alone_is_too_large_is_refused_in_words(w: World) -> None:
    async with clients_of(w, tokens_per_minute=100, background_tokens=60) as clients:
        refusal = await clients.refused(51)
        assert (refusal.reason, refusal.retry_after_s) == (Reason.RATE_LIMIT_EXCEEDED, None)
        assert "Request too large: it needs about 102 tokens" in refusal.message
        assert refusal.headers()["x-should-retry"] == "false"
        assert (
            "60 that you may use in the background"
            in (await clients.refused(31, background=True)).message
        )
        assert await clients.kept() == {}


async def test_without_a_small_limit_of_its_own_an_answer_is_expected_to_be_as_others(
    w: World,
) -> None:
    async with clients_of(w, tokens_per_minute=10_000) as clients:
        for most in (0, 100_000):
            receipt = await clients.send(10, most=most)
            assert receipt.facts.reserved
            assert receipt.facts.reserved.tokens == 10 + 256


@pytest.mark.parametrize("minutes", [-1, -60 * 24 * 40])
async def test_a_clock_that_is_behind_opens_no_earlier_minute_and_one_set_back_closes_none(
    w: World, minutes: int
) -> None:
    async with clients_of(w, requests_per_minute=1, tokens_per_month=1_000) as clients:
        await clients.send()
        clients.now_ms += minutes * MINUTE
        receipt = await clients.accepts(at=2)
        assert (receipt is not None) == (minutes < -1)


# -- what takes nothing ----------------------------------------------------------------------------


async def test_a_repeat_takes_nothing_and_is_never_refused(w: World) -> None:
    async with clients_of(w, requests_per_minute=2, concurrent_requests=2) as clients:
        first = await clients.send(key="a key")
        again = await clients.send(key="a key")
        assert (again.repeat, again.request_id) == (True, first.request_id)
        assert left_requests(again) == 1
        await clients.send()
        assert (await clients.refused()).reason == Reason.RATE_LIMIT_EXCEEDED
        for at in range(3):
            assert (await clients.send(key="a key", at=at)).request_id == first.request_id
            assert not await clients.accepts(key="another key", at=at)
        assert (await clients.kept())["r"] == 2


def left_requests(receipt: Any) -> int:
    headers = standing(receipt).headers("/v1/completions", BEGIN_MS)
    return int(headers["x-ratelimit-remaining-requests"])


async def test_a_full_redis_takes_nothing(w: World) -> None:
    async with clients_of(w, requests_per_minute=2) as clients:
        async with w.full():
            with pytest.raises(RedisUnavailable):
                await clients.send()
        assert await clients.kept() == {}
        receipt = await clients.send()
        async with w.full():
            await clients.answer(receipt)
        assert (await clients.kept()).get("c", 0) == 0


# -- what refusals cost ----------------------------------------------------------------------------


def sent_by(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the commands that the ingresses send from now on."""
    sizes: list[int] = []
    for ingress in clients.ingresses:
        link = ingress.base.link
        call: Callable[..., Any] = link.call

        async def calling(commands: Any, *more: Any, call: Any = call, **how: Any) -> Any:
            sizes.extend(sum(len(str(word)) for word in one[3:]) for one in commands)
            return await call(commands, *more, **how)

        monkeypatch.setattr(link, "call", calling)
    return sizes


async def test_a_flood_beyond_the_minute_does_not_reach_redis(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with clients_of(w, requests_per_minute=5) as clients:
        for _ in range(5):
            await clients.send()
        for at in range(3):
            assert not await clients.accepts(at=at)
        sizes = sent_by(clients, monkeypatch)
        for _ in range(100):
            assert (await clients.refused()).reason == Reason.RATE_LIMIT_EXCEEDED
        assert sizes == []
        clients.now_ms += MINUTE
        assert await clients.accepts()


async def test_a_flood_beyond_what_may_run_brings_redis_no_bodies(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with clients_of(w, many=1, concurrent_requests=2) as clients:
        receipts = [await clients.send() for _ in range(2)]
        assert not await clients.accepts()
        sizes = sent_by(clients, monkeypatch)
        for _ in range(100):
            assert not await clients.accepts()
        assert len(sizes) == 100
        assert max(sizes) < 200
        await clients.answer(receipts[0])
        assert await clients.accepts()


async def test_a_refused_request_is_no_twin(redis_url: str, namespace: str) -> None:
    async with (
        world(redis_url, namespace, ingress={"lost_reader_grace_s": 60.0}) as w,
        clients_of(w, requests_per_minute=1) as clients,
    ):
        receipt = await clients.send(at=0)
        before = await w.redis.get(twins_key(namespace, receipt.facts.twins))
        for body in (b"{}" * 500, b"{}", b"[]"):
            assert not await clients.accepts(at=0, body=body)
        assert await w.redis.get(twins_key(namespace, receipt.facts.twins)) == before
        assert len([key async for key in w.operator.scan_iter(twins_key(namespace, "*"))]) == 1
        assert await w.redis.exists(limits_key(namespace, "t"))


# -- what clients are told -------------------------------------------------------------------------

CHAT = {"model": "hermes-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


async def test_every_answer_to_a_tenant_with_limits_tells_what_is_left(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(requests_per_minute=1_000, tokens_per_minute=100_000)
    async with in_process(settings_of(redis_url, namespace)) as d:
        monkeypatch.setattr(d.ingress.api_keys, "tenant", lambda *_: Tenant("t", limits=limits))
        for stream, prefer in ((False, ""), (True, ""), (False, "respond-async")):
            body = {**CHAT, "stream": stream}
            answer = await d.http.post(
                "/v1/chat/completions", json=body, headers={"prefer": prefer}
            )
            assert answer.status_code in (200, 202), answer.text
            told = answer.headers
            assert told["x-ratelimit-limit-requests"] == "1000"
            assert told["x-ratelimit-limit-tokens"] == "100000"
            assert int(told["x-ratelimit-remaining-requests"]) < 1_000
            assert 0 < int(told["x-ratelimit-remaining-tokens"]) < 100_000
            assert re.fullmatch(r"1m0s|[0-5]?[0-9]s", told["x-ratelimit-reset-tokens"])


async def test_a_refusal_is_in_the_clients_protocol(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(requests_per_minute=1)
    async with in_process(settings_of(redis_url, namespace)) as d:
        monkeypatch.setattr(d.ingress.api_keys, "tenant", lambda *_: Tenant("t", limits=limits))
        for path, prefix in (
            ("/v1/chat/completions", "x-ratelimit-remaining-requests"),
            ("/v1/messages", "anthropic-ratelimit-requests-remaining"),
        ):
            while True:  # a minute may end meanwhile
                headers = {"prefer": "respond-async"}
                answer = await d.http.post(path, json=CHAT, headers=headers)
                if answer.status_code == 429:
                    break
                assert answer.status_code == 202, answer.text
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert answer.headers["x-hermes-reason"] == "rate_limit_exceeded"
            assert answer.headers[prefix] == "0"
            assert int(answer.headers["retry-after"]) > 0


async def test_the_metrics_show_what_redis_has_told_with_an_answer(w: World) -> None:
    async with clients_of(w, 2, requests_per_minute=4, tokens_per_month=1_000) as clients:
        (ingress, _), name = clients.ingresses, "hermes_tenant_limit_used_ratio"

        def shown(limit: str) -> float | None:
            ingress.tenants.show_limits(clients.now_ms)
            registry = ingress.base.telemetry.registry
            return registry.get_sample_value(name, {"tenant": "t", "limit": limit})

        for at in (1, 1, 1, 0):  # most at the other ingress
            await clients.send(at=at)
        assert shown("requests_per_minute") == 1
        assert shown("tokens_per_month") == 4 * 10 / 1_000
        assert shown("tokens_per_minute") is None
        clients.now_ms += 2 * MINUTE
        assert shown("requests_per_minute") == 0
        assert await clients.accepts(at=0)
        assert shown("requests_per_minute") == 0.25
        count = ingress.base.telemetry.registry.get_sample_value
        assert count("hermes_tenant_requests_admitted_total", {"tenant": "t"}) == 2
