"""`--idle`: what systems use while nobody asks for anything: CPU by kind of process, and commands
that Redis executes.
"""

import re
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence

from redis import Redis

from . import tables
from .processes import Kind, apart, cpu_by_kind, read_processes
from .report import write_document
from .stats import median
from .systems import System

_OFTEN_PER_S = 0.05
"""Rarer commands are not shown."""
_COMMAND = re.compile(r"^cmdstat_(\S+?):calls=(\d+)", re.MULTILINE)


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
    print(_cpu_table(cores))
    if often := {name: rate for name, rate in per_s.items() if rate >= _OFTEN_PER_S}:
        print(f"\n{_command_table(often)}")
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
        redis.set_response_callback("INFO", lambda reply, **_: reply)
        page = redis.execute_command("INFO", "commandstats")
    return {name: int(calls) for name, calls in _COMMAND.findall(page.decode())}


def _cpu_table(cores: Mapping[tuple[str, Kind], float]) -> str:
    lines = [
        [system, kind, f"{100 * used:.2f}", f"{3600 * used:.0f}"]
        for (system, kind), used in sorted(cores.items())
    ]
    return tables.markdown(["system", "kind of process", "% of a core", "CPU s per hour"], lines)


def _command_table(per_s: Mapping[str, float]) -> str:
    lines = [
        [name, f"{rate:.1f}"]
        for name, rate in sorted(per_s.items(), key=lambda item: item[1], reverse=True)
    ]
    lines.append(["all of them", f"{sum(per_s.values()):.1f}"])
    return tables.markdown(["Redis command", "per s"], lines)
