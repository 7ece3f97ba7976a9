"""Logs of Ray and vLLM: keeps them after a failed start, and finds the line that explains the
failure.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from scripts.local import ray_cluster

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
_TAIL_BYTES = 4096


def folders(state: Path) -> Iterator[Path]:
    """The log folders of the Ray of a state folder, one per node."""
    for node in (
        ray_cluster.short_folder(state),
        *sorted(ray_cluster.short_folder(state).glob("node-*")),
    ):
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
        shutil.copytree(logs, place, ignore=_not_plain, copy_function=_copy)
    for log in (*state.glob("*.log"), *state.glob("redis/*.log")):
        shutil.copy(log, kept)
    return kept


def _copy(source: str, target: str) -> None:
    with contextlib.suppress(
        FileNotFoundError
    ):  # Ray renames a process's log when it assigns a role to the process
        shutil.copy(source, target)


def _not_plain(folder: str, names: list[str]) -> list[str]:
    paths = [Path(folder) / name for name in names]
    return [
        path.name for path in paths if path.is_symlink() or not (path.is_file() or path.is_dir())
    ]


def cause(kept: Path) -> str:
    """The last error of an engine's processes, otherwise of the replica around it; empty if there
    is none.
    """
    found: dict[bool, str] = {}
    for path in sorted(kept.rglob("worker-*.*"), key=lambda log: log.stat().st_mtime):
        for line in path.read_text(errors="replace").splitlines():
            if (match := _ERROR.match(line)) and not any(echo in line for echo in _ECHOES):
                found[match["who"] is not None] = match["error"]
    return found.get(True) or found.get(False, "")


def _end(log: Path) -> str:
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


def loading(state: Path) -> list[str]:
    """The last message of each engine about loading."""
    said = []
    for logs in folders(state):
        for path in sorted(logs.glob("worker-*.*")):
            lines = re.split(r"[\r\n]+", _end(path))
            found = [
                match["told"] or match["bar"] for line in lines if (match := _LOADING.search(line))
            ]
            said += found[-1:]
    return said
