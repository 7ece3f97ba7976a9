"""Which kind of process uses how much CPU: classifies command lines, finds a run's processes."""

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

Kind = str
GENERATOR: Kind = "load generator"
UNKNOWN: Kind = "other"
# A replica's title is ray::ServeReplica:<application>:<deployment>[.method]; only the deployment's
# own name tells its part.
_REPLICA = r"ray::ServeReplica:[^:]*:[^:]*"
_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"(\S*/)?redis-server(:|\s|$)", "redis-server"),
    (r"(\S*/)?haproxy(:|\s|$)", "haproxy"),
    (r"VLLM::EngineCore", "engine core"),
    (r"VLLM::Worker", "engine worker"),
    (r".*(vllm\.entrypoints|VLLM::APIServer|vllm serve)", "vllm api server"),
    (rf"(?i){_REPLICA}ingress", "ingress replica"),
    (rf"(?i){_REPLICA}(worker|llmserver|engine)", "worker replica"),
    (r"ray::ServeReplica:", "other replica"),
    (r"ray::ServeController", "serve controller"),
    (r"ray::(ProxyActor|HTTPProxy|HAProxyManager)", "serve proxy"),
    (r"ray::(DashboardAgent|RuntimeEnvAgent)", "ray daemons"),
    (r"ray::", "ray other"),
    (
        r"(\S*/)?(raylet|gcs_server|(log_monitor|monitor|dashboard|agent)\.py)(:|\s|$)",
        "ray daemons",
    ),
    (r".*/ray/(dashboard|_private)/", "ray daemons"),
)
"""How a command line begins, and the kind of such a process; the first that fits."""


def classify(command_line: str) -> Kind:
    """The kind of a process, from its command line (arguments joined by blanks) or process
    title.
    """
    return next((kind for form, kind in _KINDS if re.match(form, command_line, re.DOTALL)), UNKNOWN)


@dataclass(frozen=True)
class Process:
    """One line of the process table. ``born`` tells a process from a later one with the same pid;
    ``words`` are its arguments and its environment.
    """

    parent: int
    born: int
    cpu_s: float
    rss_bytes: int
    command_line: str
    words: str


def read_processes() -> dict[int, Process]:
    """This user's process table, by pid. Processes that end meanwhile are left out."""
    table: dict[int, Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error), process.oneshot():
            if process.uids().effective == os.getuid() and process.status() != psutil.STATUS_ZOMBIE:
                times, command_line = process.cpu_times(), " ".join(process.cmdline()).strip()
                table[process.pid] = Process(
                    process.ppid(),
                    # Of pid and start time, where psutil allows for changes of the machine's clock.
                    hash(process),
                    times.user + times.system,
                    process.memory_info().rss,
                    command_line,
                    "\0".join([command_line, *map("=".join, process.environ().items())]),
                )
    return table


def descendants(table: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """``roots``, and all that descend from them."""
    found, more = set[int](), set(roots)
    while more:
        found |= more
        more = {pid for pid, one in table.items() if one.parent in more} - found
    return found


def members(table: Mapping[int, Process], marks: Sequence[str]) -> set[int]:
    """The pids of ``table`` that have one of ``marks`` in their arguments or environment, with all
    that descend from them; without marks, every one of a known kind. This process is never among
    them, nor is a shell that was given a mark as an argument.
    """
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    if not marks:
        return {pid for pid, one in table.items() if classify(one.command_line) != UNKNOWN} - ours
    marked = {pid for pid, one in table.items() if any(mark in one.words for mark in marks)}
    return descendants(table, marked - ours) - ours


def apart(
    table: Mapping[int, Process], marks: Sequence[str], others: Iterable[Sequence[str]]
) -> tuple[set[int], set[int]]:
    """The pids of the system with ``marks``, and those of the ``others``, which are none of its."""
    strangers = set[int]().union(*(members(table, theirs) for theirs in others if theirs))
    return members(table, marks) - strangers, strangers


def cpu_by_kind(
    before: Mapping[int, Process], after: Mapping[int, Process], pids: set[int]
) -> dict[Kind, float]:
    """CPU seconds used between two readings of the table, by kind, over ``pids``.

    A process born in between counts from its birth; one that died in between cannot be seen any
    more.
    """
    used: defaultdict[Kind, float] = defaultdict(float)
    for pid in pids & after.keys():
        now, then = after[pid], before.get(pid)
        since_s = then.cpu_s if then is not None and then.born == now.born else 0.0
        used[classify(now.command_line)] += now.cpu_s - since_s
    return {kind: round(cpu_s, 3) for kind, cpu_s in sorted(used.items()) if cpu_s > 0}
