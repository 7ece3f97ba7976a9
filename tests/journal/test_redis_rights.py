"""Ready means that a request would be answered: whatever the service needs of Redis is taken away
from a live one, is named, and heals when it is given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from scripts.local import processes, redis_server
from serve_app import timings
from serve_app.processes.ingress import IngressProcess
from serve_app.redis.check import Check, Finding
from serve_app.redis.info import FIELDS
from serve_app.settings import RedisSettings
from tests import permits
from tests.journal.in_process import Door, in_process, ingress_process, settings_of
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


async def test_everything_that_is_taken_away_is_named(server: redis_server.RedisServer) -> None:
    check = Check(RedisSettings(url=server.url()), "n")
    async with rights(server.url()) as change:
        assert await check.run() == ()
        for what, (taking, giving) in TAKEN.items():
            await change(*taking)
            found = await check.run()
            assert isinstance(found, Finding), what
            assert names(what, str(found)), (what, found)
            assert not found.step.passes
            await change(*giving)
            assert await check.run() == (), what
    check.close()


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


# -- INFO ------------------------------------------------------------------------------------------


class LeavingOut:
    """A real Redis whose answers lack a field of INFO."""

    def __init__(self, url: str) -> None:
        self._redis = urlsplit(url)
        self.left_out = b""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Yields its URL."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        login = self._redis.netloc.rpartition("@")[0]
        yield self._redis._replace(netloc=f"{login}@127.0.0.1:{port}").geturl()
        server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._redis.hostname, self._redis.port)
        await asyncio.wait(
            [
                asyncio.create_task(self._carry(reader, up_writer, b"")),
                asyncio.create_task(self._carry(up_reader, writer, b"\r\n")),
            ],
            return_when=asyncio.FIRST_COMPLETED,
        )
        writer.transport.abort()
        up_writer.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ending: bytes
    ) -> None:
        """Carry what is complete: every answer of Redis ends with a line's end."""
        rest = b""
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                whole, end, rest = (rest + data).rpartition(ending) if ending else (data, b"", b"")
                if field := self.left_out:
                    whole = whole.replace(b"\n%b:" % field, b"\n%b:" % field.upper())
                writer.write(whole + end)


def is_told(warning: str, ingress: IngressProcess) -> bool:
    return warning in ingress.redis_watch.warnings


async def test_a_field_of_info_that_is_missing_costs_a_warning_and_no_process(
    private_redis: PrivateRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "REDIS_CHECK_AGAIN_S", 0.1)
    monkeypatch.setattr(timings, "DEPTHS_LOOK_S", 0.01)
    nearly = LeavingOut(private_redis.url)
    async with (
        nearly.listening() as url,
        ingress_process(settings_of(url, namespace)) as ingress,
        rights(private_redis.url) as change,
    ):
        watch, memory = ingress.redis_watch, ingress.limits.memory
        await eventually(lambda: watch.usable and memory.seen)
        before = watch.warnings
        for field, then in FIELDS.items():
            nearly.left_out = field.encode()
            said = f"INFO does not tell {field}, so {then}"
            await eventually(partial(is_told, said, ingress))
            if field in ("used_memory", "maxmemory"):
                await eventually(lambda: memory.seen is None)
        nearly.left_out = b""
        await eventually(lambda: watch.warnings == before and memory.seen)
        await change("-info")
        await eventually(lambda: "it refuses INFO" in "".join(watch.warnings))
        await eventually(lambda: memory.seen is None)
        assert watch.usable
        await change("+info")
        await eventually(lambda: watch.warnings == before and memory.seen)
        assert not any(ingress.base.loops._failed_s.values()), "no loop has ended"
