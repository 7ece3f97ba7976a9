"""Ready means that a request would be answered: whatever the service needs of Redis is taken away
from a live one, is named in Redis's own words, and heals when it is given back.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from serve_app import timings
from serve_app.local import processes, redis_server
from serve_app.loops import Loops
from serve_app.redis.check import Finding, ProblemLog, RedisWatch, Step
from serve_app.settings import RedisSettings
from tests import permits
from tests.journal.in_process import Door, in_process, settings_of
from tests.journal.journal_helpers import PrivateRedis
from tests.turned_clock import TurnedClock
from tests.waiting import PATIENCE_S, eventually

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
    async with Redis.from_url(
        redis_server.as_operator(url), protocol=2, socket_timeout=PATIENCE_S
    ) as operator:

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
    monkeypatch.setattr(timings, "REDIS_CHECK_RETRY_S", 0.05)
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
        await private_redis.start(namespace="others")
        await eventually(partial(refuses, d, CHANNELS))


async def test_a_right_that_a_request_lacks_is_told_after_that_request(
    private_redis: PrivateRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "REDIS_CHECK_AGAIN_S", 1e6)
    monkeypatch.setattr(timings, "REDIS_CHECK_RETRY_S", 0.02)
    async with (
        in_process(settings_of(private_redis.url, namespace)) as d,
        rights(private_redis.url) as change,
    ):
        await eventually(lambda: ready(d))
        await change("-xadd")
        assert (await d.post("Hi")).headers["x-hermes-reason"] == "journal_unavailable"
        await eventually(partial(refuses, d, "xadd"))
        await change("+xadd")
        await eventually(lambda: ready(d))


REFUSED_FOR_NOW: dict[str, tuple[list[tuple[str, ...]], list[tuple[str, ...]]]] = {
    "MISCONF ": (
        [("CONFIG", "SET", "save", "3600 1"), ("BGSAVE",)],
        [("CONFIG", "SET", "save", "")],
    ),
    "OOM ": ([("CONFIG", "SET", "maxmemory", "1")], [("CONFIG", "SET", "maxmemory", "8gb")]),
    "NOREPLICAS ": (
        [("CONFIG", "SET", "min-replicas-to-write", "1")],
        [("CONFIG", "SET", "min-replicas-to-write", "0")],
    ),
    "READONLY ": ([("REPLICAOF", "127.0.0.1", "1")], [("REPLICAOF", "NO", "ONE")]),
    "ERR max number of clients reached": (
        [
            ("CONFIG", "SET", "maxclients", "1"),
            ("CLIENT", "KILL", "TYPE", "normal"),
            ("CLIENT", "KILL", "TYPE", "pubsub"),
        ],
        [("CONFIG", "SET", "maxclients", "1000")],
    ),
}
"""Redis's words for it, what makes it say so, and what ends that."""


async def test_what_redis_refuses_for_now_is_told_in_its_words_and_once(
    private_redis: PrivateRedis,
    tmp_path: Path,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(timings, "REDIS_CHECK_AGAIN_S", 1e6)
    monkeypatch.setattr(timings, "REDIS_CHECK_RETRY_S", 0.02)
    (tmp_path / "data" / "dump.rdb").mkdir()  # so that it cannot save

    async def problem(d: Door) -> str:
        return str((await d.http.get("/readyz")).json()["problem"])

    async with (
        in_process(settings_of(private_redis.url, namespace)) as d,
        Redis.from_url(
            redis_server.as_operator(private_redis.url), protocol=2, socket_timeout=PATIENCE_S
        ) as operator,
    ):
        for words, (breaking, mending) in REFUSED_FOR_NOW.items():
            await eventually(lambda: ready(d))
            logged.clear()
            for command in breaking:
                await operator.execute_command(*command)  # type: ignore[no-untyped-call]

            async def told(words: str = words) -> bool:
                return words in await problem(d)

            await eventually(told)
            assert (await problem(d)).startswith("Redis cannot be used: ")
            tries = count_tries(d, monkeypatch)
            await eventually(lambda: len(tries) > 20)  # noqa: B023
            assert words in await problem(d)
            refused = await d.post("Hi")
            reasons = ("journal_unavailable", "storage_full")
            assert refused.headers["x-hermes-reason"] in reasons, words
            lines = [line for line in logged.messages if "cannot be used" in line]
            assert sum(words in line for line in lines) == 1, lines
            assert len(lines) <= 2, "and at most one of the network, before Redis said why"
            for command in mending:
                await operator.execute_command(*command)  # type: ignore[no-untyped-call]
        await eventually(lambda: ready(d))
        assert (await d.post("Hi")).status_code == 200


def count_tries(d: Door, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the check finds from now on."""
    watch, found = d.ingress.redis_watch, list[object]()
    found_before = type(watch)._found

    def note(what: Finding | tuple[str, ...]) -> None:
        found.append(what)
        found_before(watch, what)

    monkeypatch.setattr(watch, "_found", note)
    return found


def test_an_outage_whose_wordings_alternate_or_that_comes_and_goes_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hermes.redis")
    clock = TurnedClock()
    problems = ProblemLog(logging.getLogger("hermes.redis"), clock)
    for _ in range(150):
        clock.now_s += 0.5
        for what in ("closed", "reset", "max number of clients"):
            problems.problem(what)
    assert len(caplog.messages) == 3
    problems.usable()
    assert caplog.messages[3:] == ["Redis: usable"]
    caplog.clear()
    for _ in range(160):
        clock.now_s += 0.5
        problems.problem("closed")
        problems.usable()
    assert len(caplog.messages) <= 4, "a line and its end in each minute"
    clock.now_s += timings.REDIS_TELL_AGAIN_S
    for n in range(1000):
        problems.problem(f"used_memory {n}")
    assert len(problems._at_s) <= 16


def test_redis_own_words_outlive_what_the_network_says_of_the_same_outage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = TurnedClock()
    monkeypatch.setattr("serve_app.redis.check.SYSTEM", clock)
    watch = RedisWatch(RedisSettings(), "n", 1, Loops())
    closed = Finding(Step.CONNECT, "connection closed")
    full = Finding(Step.CLIENTS, "max number of clients")
    watch._found(closed)
    assert (watch.answer, watch.refused) == ("", "")
    for _ in range(20):
        watch._found(full)
        watch._found(closed)
        assert watch.answer == watch.refused == str(full)
        clock.now_s += 1
    watch._found(Finding(Step.STATE, "LOADING"))
    assert ("LOADING" in watch.answer, watch.refused) == (True, "")
    clock.now_s += timings.REDIS_ANSWER_COUNTS_S
    watch._found(closed)
    assert (watch.usable, watch.answer) == (False, ""), "by now it may be gone altogether"
    assert len(caplog.messages) == 3
