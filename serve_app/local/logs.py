"""Logs of Ray and vLLM: keeps them after a failed start, finds the line that explains the failure,
and shows whether downloading and loading a model makes progress; this may take an hour.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from serve_app.local import model_fit, ray_cluster

# "(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:99] ValueError: …", or a traceback's last line
# without all that.
_ERROR = re.compile(
    r"^(?P<who>\(\w+ pid=\d+\))?.*?(?:^|\s)(?P<error>(?:\w+\.)*\w*(?:Error|Exception): .+)$"
)
# Messages of the other processes after one has failed.
_ECHOES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "ray::",
    "RayTaskError",
)
# vLLM's log lines and progress bars.
_LOADING = re.compile(r"\[\w+\.py:\d+\]\s*(?P<told>.+)|^(?:\(.*?\)\s*)?(?P<bar>\S.*\d%.*)")
# "[2026-11-22 10:00:00,000 E 7 7] (gcs_server) gcs.cc:1: …", of Ray's own processes
_RAY_ERROR = re.compile(r"^\[\S+ \S+ [EFC] \d+ \d+\] (?P<error>.+)$")
_RAY_LOGS = ("gcs_server*", "raylet*", "dashboard*", "ray*.log")
_TAIL_BYTES = 4096
_SHOWN = 110


def folders(state: Path) -> Iterator[Path]:
    """The log folders of the Ray of a state folder, one per node."""
    first = ray_cluster.short_folder(state)
    for node in (first, *sorted(first.glob("node-*"))):
        logs = node / "ray" / "session_latest" / "logs"
        if logs.exists():
            yield logs


def keep(state: Path, kept: Path) -> Path:
    """Copy all logs to `kept`, replacing those of an earlier start; Ray's own folder will be
    deleted.
    """
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for number, logs in enumerate(folders(state)):
        place = kept / (f"node-{number}" if number else "ray")
        for log in (path for path in logs.rglob("*") if path.is_file() and not path.is_symlink()):
            target = place / log.relative_to(logs)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Ray renames a process's log when it assigns a role to the process.
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(log, target)
    for log in (*state.glob("*.log"), *state.glob("redis/*.log")):
        shutil.copy(log, kept)
    return kept


def cause(kept: Path) -> str:
    """The last error of an engine's processes, otherwise of the replica around it, otherwise the
    first of Ray's own processes; empty if there is none.
    """
    found: dict[bool, str] = {}
    for path in sorted(kept.rglob("worker-*.*"), key=lambda log: log.stat().st_mtime):
        for line in path.read_text(errors="replace").splitlines():
            if (match := _ERROR.match(line)) and not any(echo in line for echo in _ECHOES):
                found[match["who"] is not None] = match["error"]
    return found.get(True) or found.get(False) or _of_ray(kept)


def _of_ray(kept: Path) -> str:
    for path in (path for name in _RAY_LOGS for path in sorted(kept.rglob(name)) if path.is_file()):
        for line in path.read_text(errors="replace").splitlines():
            if match := _RAY_ERROR.match(line) or _ERROR.match(line):
                return match["error"]
    return ""


def loading(state: Path, source: str) -> str:
    """The loading of a service's model as one line, which changes whenever something has moved.

    Args:
        source: a folder, a built-in name, or a hub id, whose downloaded bytes are counted.
    """
    size = 0
    with contextlib.suppress(PermissionError):  # HOME may be closed to this user
        for blob in model_fit.downloaded(source).glob("blobs/*"):
            with contextlib.suppress(FileNotFoundError):  # complete now, and renamed
                size += blob.stat().st_blocks * 512  # its length may be the full one from the start
    parts = [f"model: {size / 1e9:.2f} GB here"] if size else []
    for folder in folders(state):
        for log in sorted(folder.glob("worker-*.*")):
            with contextlib.suppress(FileNotFoundError), log.open(errors="replace") as file:
                file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
                found = [*filter(None, map(_LOADING.search, re.split(r"[\r\n]+", file.read())))]
                parts += [f"engine: {(m['told'] or m['bar'])[:_SHOWN]}" for m in found[-1:]]
    return "; ".join(parts)
