"""The chart's Redis, run by its own start script, is killed again and again under 16 streams."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scripts.chaos_testing.failover import load
from serve_app.local import processes
from serve_app.settings import Settings
from tests.chart.chart_redis import ChartRedis
from tests.journal.journal_helpers import redis_settings
from tests.running_time import RunningTime
from tests.waiting import eventually

STREAMS, KILLS, LONGEST_PAUSE_S = 16, 3, 2.0


async def pauses_s(chart: ChartRedis, namespace: str, redis_section: dict[str, Any]) -> list[float]:
    """Kill it under streams that lose nothing. Returns the longest pause after each kill."""
    settings = Settings.model_validate({"namespace": namespace, "redis": redis_section})
    redis: Any = Redis.from_url(settings.redis.url, protocol=2)

    async def answers() -> bool:
        try:
            return bool(await redis.ping())
        except (RedisError, OSError):
            return False

    async def on_disk() -> bool:
        """Whether the file holds all that was answered, see `until_written`."""
        return int((await redis.info("persistence"))["aof_buffer_length"]) == 0

    await eventually(answers)
    found = []
    async with load(settings, STREAMS, events_per_s=20) as streams:
        for _ in range(KILLS):
            await streams.until_all_go_on()
            await eventually(answers)
            await eventually(on_disk)
            killed_s = asyncio.get_running_loop().time()
            with RunningTime() as running:
                os.kill(chart.server(), signal.SIGKILL)
                await streams.until_all_go_on()
                stood_s = asyncio.get_running_loop().time() - killed_s - running.now_s()
            found.append(max(stream.pause_s(killed_s) for stream in streams.streams) - stood_s)
        await streams.finish()
        assert all(stream.whole for stream in streams.streams)
        assert await streams.forgotten() == 0
        assert streams.waiting, "nobody was accepted meanwhile"
    await redis.aclose()
    return found


async def test_kills_cost_streams_not_a_byte(tmp_path: Path, namespace: str) -> None:
    chart = ChartRedis(tmp_path / "redis", "", namespace)
    chart.start()
    try:
        await pauses_s(chart, namespace, redis_settings(chart.url))
    finally:
        processes.end(chart.pid)


@pytest.mark.clock
async def test_each_kill_costs_streams_a_short_pause(tmp_path: Path, namespace: str) -> None:
    # A start takes about as long as with a file of some 100 MB: 50 µs for each entry.
    chart = ChartRedis(tmp_path / "redis", "key-load-delay 50\n", namespace)
    chart.start()
    try:
        found = await pauses_s(chart, namespace, {"url": chart.url})
    finally:
        processes.end(chart.pid)
    print("longest pause after each kill, s:", [round(pause, 2) for pause in found])
    assert max(found) <= LONGEST_PAUSE_S
