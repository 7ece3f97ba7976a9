"""The chart's Redis, run by its own start script, is killed again and again under 16 streams."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from scripts.chaos_testing.streams import load
from scripts.local import processes
from serve_app.errors import RedisUnavailable
from serve_app.redis.client import connect_redis, redis_call
from serve_app.settings import Settings
from tests.chart.chart_redis import ChartRedis
from tests.journal.journal_helpers import eventually
from tests.running_time import RunningTime

STREAMS, KILLS, LONGEST_PAUSE_S = 16, 3, 2.0


def test_each_kill_costs_streams_a_short_pause_and_not_a_byte(
    tmp_path: Path, namespace: str
) -> None:
    # A start takes about as long as with a file of some 100 MB: 50 µs for each entry.
    chart = ChartRedis(tmp_path / "redis", "key-load-delay 50\n", namespace)
    settings = Settings.model_validate({"namespace": namespace, "redis": {"url": chart.url}})
    redis = connect_redis(settings.redis)

    async def answers() -> bool:
        try:
            return bool(await redis_call(redis.ping))
        except RedisUnavailable:
            return False

    async def on_disk() -> bool:
        """Whether the file holds all that was answered, see `test_redis_is_killed`."""
        return int((await redis.info("persistence"))["aof_buffer_length"]) == 0

    async def main() -> None:
        await eventually(answers)
        async with load(settings, STREAMS, events_per_s=20) as streams:
            pauses_s = []
            for _ in range(KILLS):
                await streams.until_all_go_on()
                await eventually(on_disk)
                killed_s = asyncio.get_running_loop().time()
                with RunningTime() as running:
                    os.kill(chart.server(), signal.SIGKILL)
                    await streams.until_all_go_on()
                    stood_s = asyncio.get_running_loop().time() - killed_s - running.now_s()
                pause_s = max(stream.pause_s(killed_s) for stream in streams.streams)
                pauses_s.append(pause_s - stood_s)
            await streams.finish()
            print("longest pause after each kill, s:", [round(pause, 2) for pause in pauses_s])
            assert all(stream.whole for stream in streams.streams)
            assert await streams.forgotten() == 0
            assert streams.waiting, "nobody was accepted meanwhile"
            assert max(pauses_s) <= LONGEST_PAUSE_S
        await redis.aclose()

    chart.start()
    try:
        asyncio.run(main())
    finally:
        processes.end(chart.pid)
