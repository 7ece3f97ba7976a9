"""Which kind of process uses how much CPU: classifies command lines, finds a run's processes."""

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    """One line of the process table. ``born`` tells a process from a later one with the same
    pid.
    """

    pid: int
    parent: int
    born: int
    cpu_s: float
    command_line: str
    rss_bytes: int = 0


@dataclass(frozen=True)
class Scope:
    """Which processes belong to a system: those with a mark in arguments or environment, and
    descendants.

    ``roots`` are pids; marks find what daemonised itself away from its parent. With neither,
    everything of this user counts that has a known kind and belongs to no other scope.
    """

    roots: frozenset[int] = frozenset()
    marks: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether nothing was said about which processes belong to it."""
        return not self.roots and not self.marks


def read_processes() -> dict[int, Process]:
    """This user's process table, by pid. Processes that end meanwhile are left out."""
    table: dict[int, Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error), process.oneshot():
            if process.uids().effective == os.getuid() and process.status() != psutil.STATUS_ZOMBIE:
                table[process.pid] = _read_process(process)
    return table


def _read_process(process: psutil.Process) -> Process:
    times = process.cpu_times()
    command_line = " ".join(process.cmdline()).strip()
    # The hash is of pid and start time, where psutil allows for changes of the machine's clock.
    born = hash(process)
    cpu_s, rss_bytes = times.user + times.system, process.memory_info().rss
    return Process(process.pid, process.ppid(), born, cpu_s, command_line, rss_bytes)


def _environment(pid: int) -> str:
    try:
        variables = psutil.Process(pid).environ()
    except psutil.Error:
        return ""
    return "\0".join(f"{name}={value}" for name, value in variables.items())


def descendants(table: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """``roots`` that exist, and all that descend from them."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in table]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def _self_and_ancestors(table: Mapping[int, Process]) -> set[int]:
    """The shell that was given a mark as an argument must not bring all it ever started into the
    scope.
    """
    line: set[int] = set()
    pid = os.getpid()
    while pid in table and pid not in line:
        line.add(pid)
        pid = table[pid].parent
    return line


def members(table: Mapping[int, Process], scope: Scope, others: Iterable[Scope] = ()) -> set[int]:
    """The pids of ``table`` that belong to ``scope``, this process never among them."""
    if scope.is_open:
        taken: set[int] = set().union(
            *(members(table, other) for other in others if not other.is_open)
        )
        found = {
            pid for pid, process in table.items() if classify(process.command_line) != UNKNOWN
        } - taken
    else:
        marked = {
            process.pid
            for process in table.values()
            for mark in scope.marks
            if mark in process.command_line or mark in _environment(process.pid)
        } - _self_and_ancestors(table)
        found = descendants(table, scope.roots | marked)
    return found - {os.getpid()}


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
