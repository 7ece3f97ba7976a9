"""`--idle`: what systems use while nobody asks for anything: CPU by kind of process, and commands
that Redis executes.
"""

import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from redis import Redis

from .processes import Kind, apart, cpu_by_kind, read_processes
from .report import markdown, median, write_document
from .systems import System

_OFTEN_PER_S = 0.05
"""Rarer commands are not shown."""


def measure_idle(options: Namespace, arguments: Sequence[str], systems: Sequence[System]) -> int:
    """Measure, print and write; the command's exit status. All systems are idle at the same time,
    so they need not take turns.
    """
    cpu: defaultdict[tuple[str, Kind], list[float]] = defaultdict(list)
    commands: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        before, called = read_processes(), _commands(systems)
        began_s = time.monotonic()
        time.sleep(options.duration_s)  # the time that is measured
        after, took_s = read_processes(), time.monotonic() - began_s
        for system in systems:
            others = [one.marks for one in systems if one is not system]
            used = cpu_by_kind(before, after, apart(after, system.marks, others)[0])
            for kind, cpu_s in used.items():
                cpu[system.name, kind].append(cpu_s / took_s)
        for name, count in _commands(systems).items():
            commands[name].append((count - called.get(name, 0)) / took_s)
    cores = {key: median(per_round) for key, per_round in cpu.items()}
    per_s = {name: median(per_round) for name, per_round in commands.items()}
    of_cpu = [
        [system, kind, f"{100 * used:.2f}", f"{3600 * used:.0f}"]
        for (system, kind), used in sorted(cores.items())
    ]
    print(markdown(["system", "kind of process", "% of a core", "CPU s per hour"], of_cpu))
    often = {name: rate for name, rate in per_s.items() if rate >= _OFTEN_PER_S}
    of_redis = [[name, f"{often[name]:.1f}"] for name in sorted(often, key=often.__getitem__)]
    of_redis.append(["all of them", f"{sum(often.values()):.1f}"])
    print(f"\n{markdown(['Redis command', 'per s'], of_redis)}")
    write_document(
        options, ["scripts/bench", *arguments], commands_per_s=per_s, cores=[*cores.items()]
    )
    return 0


def _commands(systems: Sequence[System]) -> Mapping[str, int]:
    """How often Redis has executed each command. What scripts send counts, and so does this."""
    url = next((one.redis_url for one in systems if one.redis_url), "")
    if not url:
        return {}
    with Redis.from_url(url) as redis:
        page: Any = redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): said["calls"] for name, said in page.items()}
