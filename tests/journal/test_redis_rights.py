"""Ready means that a request would be answered: whatever the service needs of Redis is taken away
from a live one, is named, and heals when it is given back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from scripts.local import processes, redis_server
from serve_app import timings
from tests import permits
from tests.journal.in_process import Door, in_process, settings_of
from tests.journal.journal_helpers import PrivateRedis
from tests.waiting import eventually

KEYS, CHANNELS = "keys", "channels"
TAKEN = {
    **{what: ([f"-{what.partition('|')[0]}"], [f"+{what}"]) for what in permits.needed()},
    KEYS: (["resetkeys"], ["~*"]),
    CHANNELS: (["resetchannels"], ["&*"]),
}
"""The rules of Redis's ACL that take something away, and that give it back."""
WORDS = {KEYS: "UNLINK", CHANNELS: "SUBSCRIBE"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    """One that permits what the check tries, and no more."""
    started = redis_server.start(tmp_path_factory.mktemp("redis"), namespace="*")
    yield permits.narrow(started)
    processes.end(started.pid)


@asynccontextmanager
async def rights(url: str) -> AsyncIterator[Any]:
    """Changes the rights of the service's user."""
    async with Redis.from_url(redis_server.as_operator(url), protocol=2) as operator:

        async def change(*rules: str) -> None:
            await operator.execute_command("ACL", "SETUSER", "hermes", *rules)  # type: ignore[no-untyped-call]

        yield change


def names(what: str, sentence: str) -> bool:
    """Whether a sentence says in Redis's own words what is missing."""
    command = WORDS.get(what, what.replace("|", " ").upper())
    return f"refuses {command}" in sentence and "NOPERM " in sentence


def refuses(d: Door, what: str) -> bool:
    return names(what, d.ingress.redis_watch.refused)


async def ready(d: Door) -> bool:
    return (await d.http.get("/readyz")).status_code == 200


async def test_a_service_says_what_it_lacks_refuses_requests_and_heals(
    server: redis_server.RedisServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "REDIS_CHECK_AGAIN_S", 0.1)
    settings = settings_of(server.url(), namespace)
    async with in_process(settings) as d, rights(server.url()) as change:
        await eventually(lambda: ready(d))
        for what, (taking, giving) in TAKEN.items():
            await change(*taking)
            await eventually(partial(refuses, d, what))
            answer = await d.http.get("/readyz")
            assert answer.status_code == 503
            assert names(what, answer.json()["problem"])
            assert (await d.post("Hi")).headers["x-hermes-reason"] == "journal_unavailable", what
            await change(*giving)
            await eventually(lambda: ready(d))
        assert (await d.post("Hi")).status_code == 200
        assert not any(d.ingress.base.loops._failed_s.values()), "no loop has ended"


async def test_an_outage_after_which_a_right_is_missing_does_not_end_as_ready(
    private_redis: PrivateRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is until the next try that nothing calls for."""
    monkeypatch.setattr(timings, "REDIS_CHECK_AGAIN_S", 1e6)
    async with in_process(settings_of(private_redis.url, namespace)) as d:
        await eventually(lambda: ready(d))
        private_redis.kill()
        await eventually(lambda: not d.ingress.membership.reachable)
        await private_redis.start()
        async with rights(private_redis.url) as change:
            await change("-xadd")
            await eventually(partial(refuses, d, "xadd"))
