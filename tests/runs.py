"""Each run on a machine has a number of its own, and what a killed run has left is removed, and
nothing else.

The number is in the environment of every process that the run starts, and in the names of its
network namespaces. Who holds a number lives; the kernel takes it back from a run that was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import psutil

from serve_app.local import processes
from serve_app.local.ports import Claims

_CLAIMS = Claims("runs")
_NUMBERS = range(1, 255)  # a byte of its networks' addresses


@cache
def number() -> int:
    """The number of this run."""
    return next(one for one in _NUMBERS if _CLAIMS.take(one))


def folder_prefix() -> str:
    """What the names of this run's temporary folders begin with. A dead run may have had the same
    number.
    """
    return f"hermes-run-{number()}-{os.getpid()}-"


def begin() -> None:
    """Remove what dead runs have left, and mark what this one will start."""
    sweep()
    if "HERMES_KEEP_SERVICES" not in os.environ:  # what is kept belongs to no run
        os.environ[processes.RUN] = str(number())


def sweep() -> None:
    """Remove what dead runs have left."""
    found = {_run_of(pid) for pid in psutil.pids()}
    found |= {run for run, _, _ in _networks()} | {run for run, _ in _folders()}
    for run in found - {0}:
        ours = run == number()
        if ours or _CLAIMS.take(run):
            _remove(run)
            if not ours:
                _CLAIMS.give_back(run)


def _remove(run: int) -> None:
    shared: set[str] = set()
    folders: set[str] = set()
    while alive := _processes(run, folders):
        shared |= processes.shared_memory(alive)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    processes.forget_shared_memory(shared)
    folders |= {str(folder) for owner, folder in _folders() if owner == run}
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for owner, kind, name in _networks():
        if owner == run:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(kind, "del", name)


def _processes(run: int, folders: set[str]) -> list[int]:
    """What lives of a run: on its hosts, by its mark, below such a process or in one's Ray folder.
    These folders are added to `folders`.
    """
    pids = {pid for pid in psutil.pids() if _run_of(pid) == run}
    for owner, kind, name in _networks():
        if (owner, kind) == (run, "netns"):
            pids.update(map(int, ip("netns", "pids", name).split()))
    for pid in list(pids):
        pids.update(processes.descendants(pid))
    for pid in pids:
        folder = _environment(pid).get("RAY_TMPDIR", "")
        if Path(folder).name.startswith("hs-"):
            folders.add(folder)
    for folder in folders:
        pids.update(processes.marked("RAY_TMPDIR", folder))
    return [pid for pid in pids - {os.getpid()} if processes.is_alive(pid)]


def _run_of(pid: int) -> int:
    """The run that a process belongs to; 0: none."""
    found = _environment(pid).get(processes.RUN, "")
    return int(found) if found.isdecimal() else 0


def _environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):  # it may end while we look, or be another user's
        return dict(psutil.Process(pid).environ())
    return {}


def _folders() -> list[tuple[int, Path]]:
    """The temporary folders of runs, but not this one's, and the run of each."""
    found = []
    for one in Path(tempfile.gettempdir()).glob("hermes-run-*"):
        name = re.match(r"hermes-run-(\d+)-\d+-", one.name)
        if name and name[0] != folder_prefix():
            found.append((int(name[1]), one))
    return found


def _networks() -> list[tuple[int, str, str]]:
    """Run, kind and name of every namespace and link that runs have made, namespaces first."""
    found = []
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # not every machine has `ip`
        for kind, told in (("netns", ip("netns", "list")), ("link", ip("-oneline", "link"))):
            names = re.finditer(r"(?:^|\s)(hermes(\d+)-[\d-]+)", told)
            found += [(int(name[2]), kind, name[1]) for name in names]
    return found


def ip(*arguments: str) -> str:
    """Run `ip`."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
