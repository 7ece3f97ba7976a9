"""How long `ray start --head` takes on a busy machine, as the chart starts it and as Ray does by
itself: `.venv/bin/python -m scripts.local.ray_start_time [starts of each] [busy loops]`.

The chart gives Ray's agents fixed ports, so that the raylet does not wait until they have chosen
some. The two ways alternate: whatever else the machine does concerns both.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.local import ports, processes, ray_cluster, surroundings
from scripts.local.environment import ROOT

LOOP = "while True: pass"
STARTED = "Ray runtime started."
WAYS = ("the chart's", "Ray's own")
LIMIT_S = 120.0


@contextmanager
def busy(loops: int, folder: Path) -> Iterator[None]:
    """So many processes that compute without an end."""
    environment = dict(os.environ)
    command = [sys.executable, "-c", LOOP]
    pids = [processes.start(command, folder / "loop.log", environment, ROOT) for _ in range(loops)]
    try:
        yield
    finally:
        for pid in pids:
            processes.end(pid)


def start_s(way: str, state: Path) -> float | None:
    """From `ray start` until it says that Ray has started; None if it gave up."""
    folder = ray_cluster.short_folder(state)
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--head", "--block", "--disable-usage-stats", "--include-dashboard=true"]
    options += ["--node-ip-address=127.0.0.1", "--num-cpus=0", "--object-store-memory=134217728"]
    for name in ("port", "dashboard-port", "ray-client-server-port", "metrics-export-port"):
        options.append(f"--{name}={ports.free_port()}")
    options.append(f"--dashboard-agent-listen-port={ports.free_port()}")
    environment = {**surroundings.kept(os.environ), "RAY_TMPDIR": str(folder)}
    if way == WAYS[0]:
        options.append(f"--dashboard-agent-grpc-port={ports.free_port()}")
        options.append(f"--runtime-env-agent-port={ports.free_port()}")
        environment["RAY_agent_register_timeout_ms"] = "120000"
    log = state / "ray.log"
    begun_s = time.monotonic()
    pid = processes.start([str(ray_cluster.RAY), "start", *options], log, environment, state)
    try:
        while processes.is_alive(pid) and time.monotonic() < begun_s + LIMIT_S:
            if STARTED in log.read_text(errors="replace"):
                return time.monotonic() - begun_s
            time.sleep(0.05)
        return None
    finally:
        ray_cluster.end(state, pid)


def main(starts: int = 3, loops: int = 6) -> None:
    """Print each start, then a row for each way."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the loops, too
    took_s: dict[str, list[float | None]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name, busy(loops, Path(name)):
        for number in range(starts):
            for way in WAYS if number % 2 else reversed(WAYS):
                state = Path(name) / f"{number}-{WAYS.index(way)}"
                state.mkdir()
                took_s[way].append(seconds := start_s(way, state))
                print(way, "gave up" if seconds is None else f"{seconds:.1f} s", flush=True)
    print(f"{loops} busy loops on {os.cpu_count()} cores")
    print(f"{'way':<14}{'starts':>8}{'gave up':>9}{'fastest, s':>12}{'median':>8}{'slowest':>9}")
    for way, found in took_s.items():
        done_s = sorted(seconds for seconds in found if seconds is not None)
        print(f"{way:<14}{len(found):>8}{len(found) - len(done_s):>9}", end="")
        if done_s:
            print(f"{done_s[0]:>12.1f}{statistics.median(done_s):>8.1f}{done_s[-1]:>9.1f}", end="")
        print(flush=True)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
