"""Which kind of process uses how much CPU: classifies command lines, finds a run's processes."""

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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


class Process(NamedTuple):
    """One line of the process table; ``words`` are its arguments and its environment."""

    parent: int
    kind: Kind
    cpu_s: float
    rss_bytes: int
    words: str


Table = Mapping[psutil.Process, Process]
"""psutil's objects tell a process from a later one with the same pid."""


def read_processes() -> Table:
    """This user's process table. Processes that end meanwhile are left out."""
    table: dict[psutil.Process, Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error), process.oneshot():
            if process.uids().effective == os.getuid() and process.status() != psutil.STATUS_ZOMBIE:
                times, command_line = process.cpu_times(), " ".join(process.cmdline()).strip()
                table[process] = Process(
                    process.ppid(),
                    classify(command_line),
                    times.user + times.system,
                    process.memory_info().rss,
                    "\0".join([command_line, *map("=".join, process.environ().items())]),
                )
    return table


def members(table: Table, marks: Sequence[str]) -> set[psutil.Process]:
    """Those of ``table`` that have one of ``marks`` in their arguments or environment, with all
    that descend from them; without marks, every one of a known kind. This process is never among
    them, nor is a shell that was given a mark as an argument.
    """
    ours = {psutil.Process(), *psutil.Process().parents()}
    if not marks:
        return {process for process, one in table.items() if one.kind != UNKNOWN} - ours
    found = set[psutil.Process]()
    more = {process for process, one in table.items() if any(mark in one.words for mark in marks)}
    while more := more - found - ours:
        found |= more
        pids = {process.pid for process in more}
        more = {process for process, one in table.items() if one.parent in pids}
    return found


def apart(
    table: Table, marks: Sequence[str], others: Iterable[Sequence[str]]
) -> tuple[set[psutil.Process], set[psutil.Process]]:
    """The processes of the system with ``marks``, and those of the ``others``, which are none of
    its.
    """
    strangers = set[psutil.Process]().union(
        *(members(table, theirs) for theirs in others if theirs)
    )
    return members(table, marks) - strangers, strangers


def cpu_by_kind(before: Table, after: Table, its: Iterable[psutil.Process]) -> dict[Kind, float]:
    """CPU seconds used between two readings of the table, by kind, over some processes.

    A process born in between counts from its birth; one that died in between cannot be seen any
    more.
    """
    used: defaultdict[Kind, float] = defaultdict(float)
    for process in its:
        since_s = before[process].cpu_s if process in before else 0.0
        used[after[process].kind] += after[process].cpu_s - since_s
    return {kind: round(cpu_s, 3) for kind, cpu_s in sorted(used.items()) if cpu_s > 0}
