"""Starts processes in sessions of their own, and ends exactly those."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from pathlib import Path

import psutil

RUN = "HERMES_RUN"
"""The variable with the number of the run of tests. It goes on to whatever the run starts."""

# A name followed by "(deleted)" no longer exists.
_SHARED = re.compile(r"/dev/shm/((?:psm_|sem\.mp-|vllm_dist_|nccl-)\S+)$", re.MULTILINE)
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def start(command: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path) -> int:
    """Start a process in a session of its own, with its output in `log`. Returns its pid."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env={**environment, **({RUN: os.environ[RUN]} if RUN in os.environ else {})},
            cwd=cwd,
            start_new_session=True,
        )
    return child.pid


def until(came: Callable[[], bool], within_s: float, pid: int = 0, every_s: float = 0.05) -> bool:
    """Wait for something. Returns whether it came in time, and before the process `pid` ended."""
    deadline = time.monotonic() + within_s
    while not came():
        if time.monotonic() >= deadline or (pid and not is_alive(pid)):
            return False
        time.sleep(every_s)
    return True


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    return not all(map(_ended, _processes([pid])))


def descendants(pid: int) -> list[int]:
    """The pids below a process, parents before their children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def command_line(pid: int) -> str:
    """A process's arguments, or its title if it has set one; empty after it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline()).strip()
    return ""


def marked(variable: str, value: str) -> list[int]:
    """The pids whose environment has `variable=value`: everything that a start has led to, even if
    it detached itself.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it may end while we look, or be another user's
            if process.environ().get(variable) == value:
                found.append(process.pid)
    return found


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Names of the shared memory that these processes have mapped and that Python's
    `multiprocessing` (`psm_`, `sem.mp-`), vLLM or NCCL created. psutil is not used, because it
    makes the kernel add up every mapping while the process waits.
    """
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it may end while we look
            found.update(_SHARED.findall((Path("/proc") / str(pid) / "maps").read_text()))
    return found


def forget_shared_memory(names: set[str]) -> None:
    """Remove those of these that no process maps any more."""
    for name in names - (shared_memory(psutil.pids()) if names else set()):
        (Path("/dev/shm") / name).unlink(missing_ok=True)


def end(pid: int, timeout_s: float = 15.0) -> None:
    """End a process and all its descendants: first with SIGTERM, then with SIGKILL. None of them
    remains as a zombie.
    """
    family = list(_processes([pid, *descendants(pid)]))
    with contextlib.suppress(psutil.NoSuchProcess):
        for first in family[:1]:
            first.terminate()
            until(partial(_ended, first), timeout_s)
    for member in filterfalse(_ended, family):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    for member in family:
        reap(member.pid)


def reap(pid: int, within_s: float = 30.0) -> None:
    """Collect the exit status of a child; a process that adopts orphans has them as children,
    too.
    """
    with contextlib.suppress(ChildProcessError):  # it is not our process
        until(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), within_s, every_s=0.01)


def _processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Those processes that exist. Each object is distinct from a later process with the same
    pid.
    """
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() in _ENDED
    return True


def tail(log: Path, lines: int = 20) -> str:
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
