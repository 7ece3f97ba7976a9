"""The service detects a Redis that has lost accepted requests at a restart."""

from __future__ import annotations

import shutil
from pathlib import Path

from serve_app.errors import RedisUnavailable
from serve_app.observability.metrics import Telemetry
from serve_app.redis.durability import EVERYTHING, TRANSACTIONS, Durability
from serve_app.redis.keyspace import probe_key
from tests.journal.journal_helpers import PrivateRedis, World, world
from tests.waiting import eventually


def ingress(w: World) -> Durability:
    return Durability(w.redis, w.settings.namespace, Telemetry())


async def settle(*lookers: Durability) -> None:
    """Wait until what was written is seen again, because it only counts once it is on disk."""
    for _ in range(2):
        for looker in lookers:
            await looker.look()


async def restart(redis: PrivateRedis, *lookers: Durability) -> None:
    redis.kill()
    await redis.start()

    async def looked() -> bool:
        try:
            for looker in lookers:
                await looker.look()
        except RedisUnavailable:
            return False
        return True

    await eventually(looked)


async def test_a_redis_that_remembers_is_fine_after_every_restart(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with world(private_redis.url, namespace) as w:
        one, other = ingress(w), ingress(w)
        await settle(one, other)
        for _ in range(2):
            await restart(private_redis, one, other)
            assert (one.problem, other.problem) == ("", "")


async def test_dropped_transactions_are_told_by_every_ingress(
    private_redis: PrivateRedis, namespace: str
) -> None:
    """The operator deletes what Redis would drop at its start if `default` has no permissions."""
    async with world(private_redis.url, namespace) as w:
        one, other, late = ingress(w), ingress(w), ingress(w)
        await settle(one, other)
        assert await w.operator.delete(probe_key(namespace, "transaction")) == 1
        await restart(private_redis, one, other)
        await late.look()
        assert (one.problem, other.problem, late.problem) == (TRANSACTIONS,) * 3
        assert b"hermes_redis_forgets 1.0" in one._telemetry.page()
        await restart(private_redis, one)
        assert one.problem == "", "it was mended"


async def test_a_redis_that_comes_back_empty_is_reported_as_such(
    private_redis: PrivateRedis, namespace: str, tmp_path: Path
) -> None:
    async def looked(one: Durability) -> bool:
        try:
            await one.look()
        except RedisUnavailable:
            return False
        return True

    async with world(private_redis.url, namespace) as w:
        one = ingress(w)
        await settle(one)
        private_redis.kill()
        for file in (tmp_path / "data").glob("append*"):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        await private_redis.start()
        await eventually(lambda: looked(one))
        assert one.problem == EVERYTHING
