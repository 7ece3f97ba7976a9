"""A Redis that accepts and does not answer, and connections that die without a word."""

from __future__ import annotations

import asyncio
import time

import pytest
from half_open import proxy
from journal_helpers import OPENED, eventually, world

from serve_app.errors import JournalUnavailable, RequestRefused
from serve_app.ingress.runtime import Ingress
from serve_app.journal.connection import RedisLink
from serve_app.journal.writer import JournalWriter
from serve_app.membership import Membership
from serve_app.routing.fleet import Fleet


def test_a_subscription_that_has_died_without_a_word_is_noticed_within_five_seconds(
    redis_url: str, namespace: str
) -> None:
    async def main() -> None:
        async with proxy(redis_url) as way, world(way.url, namespace) as w, world(redis_url, namespace) as beside:
            hub = await w.hub()
            before = hub._connection
            assert before is not None
            way.dead = True
            began_s = time.monotonic()
            await eventually(lambda: not before.usable)
            assert time.monotonic() - began_s < 5
            way.dead = False
            await eventually(lambda: hub._connection is not before and hub._connection is not None)
            await eventually(beside.subscribers)

    asyncio.run(main())


def test_who_waits_for_a_connection_shares_one_attempts_failure(redis_url: str, namespace: str) -> None:
    """One after another, the twelfth would wait for twelve seconds."""

    async def main() -> None:
        async with proxy(redis_url) as way, world(way.url, namespace) as w:
            way.dead = True
            link, writer = RedisLink(w.settings.redis), JournalWriter(w.settings)
            calls = [link.call([("PING",)]) for _ in range(12)]
            opens = [writer.open(f"req_{n}", 1, b"nonce", OPENED) for n in range(12)]
            began_s = time.monotonic()
            answers = await asyncio.gather(*calls, *opens, return_exceptions=True)
            assert time.monotonic() - began_s < 2
            assert {type(answer) for answer in answers} == {JournalUnavailable}
            with pytest.raises(JournalUnavailable):  # and who comes right after is told at once
                await link.call([("PING",)])
            assert time.monotonic() - began_s < 2
            way.dead = False
            await eventually(lambda: answered(link))
            await link.close()
            await writer.stop()

    asyncio.run(main())


async def answered(link: RedisLink) -> bool:
    try:
        return await link.call([("PING",)]) == ["PONG"] or True
    except JournalUnavailable:
        return False


@pytest.mark.parametrize("connected", [True, False], ids=["stops answering", "never answered"])
def test_an_admission_is_refused_within_two_seconds(redis_url: str, namespace: str, connected: bool) -> None:
    async def main() -> None:
        async with proxy(redis_url) as way, world(way.url, namespace) as w:
            way.dead = not connected
            ingress = Ingress(w.settings, "ingress-1", "session-1", None, Fleet())  # type: ignore[arg-type]
            if connected:
                await ingress._link.call([("PING",)])
                way.dead = True
            began_s = time.monotonic()
            refusals = await asyncio.gather(
                *(admit(ingress, {"idempotency-key": str(n)} if n % 2 else {}) for n in range(40))
            )
            assert time.monotonic() - began_s < 2.5
            assert {refusal.reason for refusal in refusals} == {"journal_unavailable"}
            assert len({refusal.headers()["retry-after-ms"] for refusal in refusals}) > 20, "or all come back at once"
            await ingress._link.close()

    asyncio.run(main())


async def admit(ingress: Ingress, headers: dict[str, str]) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        await ingress.admission.admit("t", "/v1/completions", "", headers, b"{}", {}, "")
    return refused.value


def test_a_lease_that_cannot_be_renewed_for_want_of_an_answer_is_known_soon(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with proxy(redis_url) as way, world(way.url, namespace) as w:
            ingress = Ingress(w.settings, "ingress-1", "session-1", None, Fleet())  # type: ignore[arg-type]
            membership: Membership = ingress.membership
            await membership.join_as_ingress("ingress-1", "session-1", lambda: False)
            assert membership.reachable
            way.dead = True
            began_s = time.monotonic()
            await eventually(lambda: not membership.reachable)
            assert time.monotonic() - began_s < 8
            way.dead = False
            await eventually(lambda: membership.reachable)
            await membership.leave()

    asyncio.run(main())
