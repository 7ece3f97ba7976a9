"""How long production's Redis takes to start, by the size of its append-only file:
`.venv/bin/python -m scripts.local.redis_start_time [MB ...]`.

Fills a private Redis as requests of 500 tokens do (each token an entry; at the end the transcript
takes their place), ends it, and waits until it answers again. On a busy machine the time of its one
core says more than the time that passes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import psutil
import redis

from scripts.local import processes, redis_server
from scripts.local.redis_server import RedisServer

SIZES_MB = (64, 128, 256, 512)
TOKENS = 500
ENTRY = b"x" * 330
TRANSCRIPT = b"z" * 4096
BODY = b"y" * 2048
LAST = "18446744073709551615-18446744073709551615"
RETENTION_S = 900
NEVER = {"auto-aof-rewrite-percentage": 0}
"""No rewrite: the file keeps every command."""


def size_mb(folder: Path) -> float:
    """All parts of the append-only file."""
    files = [file for file in folder.rglob("*.aof*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6


def request(client: redis.Redis, number: int) -> None:
    """What one request leaves in the file."""
    journal, body = f"hermes:j:{number}", f"hermes:b:{number}"
    pipe = client.pipeline(transaction=False)
    pipe.xadd(journal, {b"r": b"{}"}, id="0-1")
    pipe.set(body, BODY)
    for token in range(1, TOKENS + 1):
        pipe.xadd(journal, {b"o": ENTRY}, id=f"1-{token}", nomkstream=True)
    pipe.xadd(journal, {b"z": TRANSCRIPT}, id=LAST)
    pipe.xtrim(journal, maxlen=1, approximate=False)
    pipe.expire(journal, RETENTION_S)
    pipe.delete(body)
    pipe.execute()


def filled(folder: Path, wanted_mb: float) -> RedisServer:
    """A server whose file has that size."""
    server = redis_server.start(folder, settings=NEVER)
    client = redis.Redis.from_url(server.url("operator"))
    number = 0
    while size_mb(folder) < wanted_mb:
        request(client, number)
        number += 1
    client.close()
    return server


def restart_s(folder: Path, server: RedisServer) -> tuple[float, float]:
    """From its start until it executes commands: the time that passes, and its core's."""
    processes.end(server.pid)
    begun = time.monotonic()
    again = redis_server.start(folder, server.port, settings=NEVER)
    took_s = time.monotonic() - begun
    used = psutil.Process(again.pid).cpu_times()
    processes.end(again.pid)
    return took_s, used.user + used.system


def main(sizes_mb: list[float]) -> None:
    """Print a row for each size."""
    print(f"{'file, MB':>10} {'start, s':>10} {'of a core, s':>14} {'MB/s of it':>12}")
    for wanted_mb in sizes_mb:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            server = filled(folder, wanted_mb)
            has_mb = size_mb(folder)
            took_s, core_s = restart_s(folder, server)
            speed = has_mb / max(core_s, 0.01)
            print(f"{has_mb:>10.0f} {took_s:>10.1f} {core_s:>14.1f} {speed:>12.0f}", flush=True)


if __name__ == "__main__":
    main([float(word) for word in sys.argv[1:]] or list(SIZES_MB))
