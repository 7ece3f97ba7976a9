"""Starting processes in groups of their own, and ending exactly those; standard library only."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

_SHARED = re.compile(r"/dev/shm/((?:psm_|nccl-)\S+)$", re.MULTILINE)  # no longer, where "(deleted)" follows


def free_port() -> int:
    """A port on the loopback that nobody listens on at the moment.

    Below the range that outgoing connections take theirs from: there, a client that retries a server that is down can
    be connected to itself, and then holds the server's port.
    """
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def is_taken(port: int) -> bool:
    """Whether somebody listens on a loopback port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start(command: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path) -> int:
    """Start a process in a session of its own, output into `log`. Returns its pid."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=dict(environment), cwd=cwd,
            start_new_session=True,
        )  # fmt: skip
    return child.pid


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """The pids below a process, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):  # it may end while we look
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


def marked(variable: str, value: str) -> list[int]:
    """The pids whose environment has `variable=value`: what a start has led to, however it detached itself."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may end while we look, or be another user's
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Names of the shared memory that Python's `multiprocessing` (`psm_`) and NCCL have made, as these map it."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it may end while we look
            found.update(_SHARED.findall((Path("/proc") / str(pid) / "maps").read_text()))
    return found


def forget_shared_memory(names: set[str]) -> None:
    """Remove those of these that nobody maps any more."""
    everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    for name in names - (shared_memory(everybody) if names else set()):
        (Path("/dev/shm") / name).unlink(missing_ok=True)


def end(pid: int, timeout_s: float = 15.0) -> None:
    """End a process and all below it: asked first, then made to. None of them stays behind as a zombie of ours."""
    family = [pid, *descendants(pid)]
    for target, sign in _signals(family, timeout_s):
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, sign)
    for member in family:
        reap(member)


def reap(pid: int, within_s: float = 5.0) -> None:
    """Take note of the end of a child; orphans are children too, of whoever takes orphans in."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(ChildProcessError):  # it is not ours
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)


def _signals(family: list[int], timeout_s: float) -> Iterator[tuple[int, signal.Signals]]:
    yield family[0], signal.SIGTERM
    deadline = time.monotonic() + timeout_s
    while is_alive(family[0]) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(family[0], os.WNOHANG)
        time.sleep(0.05)
    for pid in family:
        if is_alive(pid):
            yield pid, signal.SIGKILL


def tail(log: Path, lines: int = 20) -> str:
    """The end of a log."""
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
