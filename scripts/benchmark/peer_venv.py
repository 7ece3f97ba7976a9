"""Ray Serve LLM's environment: it is pinned to another vLLM than this project, so it gets one of
its own.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from .errors import SystemFailed

LOCK = Path(__file__).with_name("ray-serve-llm.lock")
_TORCH = "torch==2.13.0"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def ensure_ray_serve_llm(folder: Path) -> Path:
    """The interpreter of the environment below ``folder``, made when missing or when the lock has
    changed.
    """
    python, stamp = folder / "venv/bin/python", folder / "installed"
    wanted = hashlib.sha256(LOCK.read_bytes() + _TORCH.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(
        f"installing Ray Serve LLM with its own vLLM into {folder} (once; some minutes) …",
        file=sys.stderr,
    )
    folder.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")])
    install = [str(python), "-m", "pip", "install", "--quiet", "--quiet", "--no-deps"]
    # The CPU index goes to torch's own command only: an unreachable index would be tried for every
    # package.
    _run([*install, "--retries", "0", "--extra-index-url", _TORCH_INDEX, _TORCH])
    _run([*install, "--requirement", str(LOCK)])
    stamp.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, timeout=1800)
    except subprocess.CalledProcessError as failed:
        raise SystemFailed(f"{' '.join(command)} ended with {failed.returncode}") from failed
