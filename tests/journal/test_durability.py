"""An ingress tells its operator of a Redis that would lose what it has accepted."""

from __future__ import annotations

import logging

import pytest
from redis.asyncio import Redis

from scripts.local import redis_server
from tests.journal.in_process import door
from tests.journal.journal_helpers import PrivateRedis
from tests.waiting import eventually

PROBLEM = "appendonly is no"


@pytest.mark.parametrize("kept", ["yes", "no"])
async def test_readyz_and_the_log_tell_of_a_redis_that_forgets(
    private_redis: PrivateRedis, namespace: str, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Redis.from_url(redis_server.as_operator(private_redis.url), protocol=2) as operator:
        await operator.config_set("appendonly", kept)
    caplog.set_level(logging.WARNING)
    async with door(private_redis.url, namespace) as d:
        await eventually(lambda: d.ingress.limits.memory.seen)  # it looks after the check
        told = (await d.http.get("/readyz")).json()["warnings"]
    assert any(PROBLEM in text for text in told) is (kept == "no")
    assert caplog.text.count(PROBLEM) == (kept == "no")
