"""Child processes that are always ended: exactly they and what descends from them, by pid, never by
name.
"""

import os
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.request import ProxyHandler, build_opener

from scripts.local.ports import is_taken

from .errors import SystemFailed
from .processes import Scope, members, read_processes

_MARK_VARIABLE = "HERMES_BENCH_MARK"
_TAIL_LINES = 40
_KILL_ROUNDS = 5


class Family:
    """The processes of one system; an environment variable that they inherit finds those that
    daemonised.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self._mark = f"{_MARK_VARIABLE}={uuid.uuid4().hex}"
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def scope(self) -> Scope:
        """Everything this family has started."""
        return Scope(roots=frozenset(child.pid for child in self._started), marks=(self._mark,))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` in a session of its own, its output appended to the family's log."""
        name, _, value = self._mark.partition("=")
        log: IO[bytes]
        with self.log_path.open("ab") as log:
            child = subprocess.Popen(
                list(command),
                env={**environment, name: value},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(child)
        return child

    def run(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        """Run ``command`` to its end, which must be a good one."""
        child = self.start(command, environment)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failure(f"{command[0]} took more than {timeout_s:.0f} s") from None
        if code != 0:
            raise self.failure(f"{' '.join(command)} ended with {code}")

    def wait_for(self, url: str, child: subprocess.Popen[bytes], timeout_s: float) -> None:
        """Return when ``url`` answers a GET with 200; fail when ``child`` ends or the time is
        over.
        """
        self._wait(lambda: answers(url), url, child, timeout_s)

    def wait_for_port(self, port: int, child: subprocess.Popen[bytes], timeout_s: float) -> None:
        """Return when ``port`` of this machine accepts connections; fail as ``wait_for`` does."""
        self._wait(lambda: is_taken(port), f"port {port}", child, timeout_s)

    def _wait(
        self,
        is_ready: Callable[[], bool],
        what: str,
        child: subprocess.Popen[bytes],
        timeout_s: float,
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_ready():
            if time.monotonic() > deadline_s:
                raise self.failure(f"{what} did not answer within {timeout_s:.0f} s")
            try:
                # A server tells nobody that it is ready; its end, at least, is an event.
                child.wait(0.25)
            except subprocess.TimeoutExpired:
                continue
            raise self.failure(f"it ended with {child.returncode} before it was ready")

    def failure(self, reason: str) -> SystemFailed:
        """An error with ``reason`` and the end of the log."""
        tail = (
            self.log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            if self.log_path.exists()
            else []
        )
        return SystemFailed(
            "\n".join([f"{self.name}: {reason}", *(f"    | {line}" for line in tail)])
        )

    def end(self, grace_s: float = 10.0) -> int:
        """Ask the whole family to end, kill what has not after ``grace_s``; return how many were
        killed.
        """
        if not self._started:
            return 0
        self._signal(signal.SIGTERM, grace_s)
        killed = 0
        for _ in range(_KILL_ROUNDS):
            # One that was killed may have started another just before, so the table is read again.
            count = self._signal(signal.SIGKILL, grace_s)
            killed += count
            if count == 0:
                break
        return killed

    def _signal(self, number: signal.Signals, patience_s: float) -> int:
        watched = _watch(members(read_processes(), self.scope))
        try:
            for handle in watched.values():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
            _wait_all(watched, patience_s, self._started)
        finally:
            for handle in watched.values():
                os.close(handle)
        return len(watched)


def _watch(pids: Iterable[int]) -> dict[int, int]:
    """A pidfd for each: a handle that can never come to mean another process."""
    handles: dict[int, int] = {}
    for pid in pids:
        try:
            handles[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
    return handles


def _wait_all(
    handles: Mapping[int, int], timeout_s: float, own: Iterable[subprocess.Popen[bytes]]
) -> None:
    """Return when all have ended or the time is over."""
    poll = select.poll()
    for handle in handles.values():
        poll.register(handle, select.POLLIN)
    waiting = set(handles.values())
    deadline_s = time.monotonic() + timeout_s
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for handle, _ in poll.poll(left_s * 1e3):
            poll.unregister(handle)
            waiting.discard(handle)
    for child in own:
        child.poll()


def answers(url: str) -> bool:
    """Whether a GET answers 200 now."""
    try:
        # No proxy: what is started here is on this machine.
        with build_opener(ProxyHandler({})).open(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
