"""The virtual environment `.venv`: made once from pinned lock files; standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKS = ROOT / "scripts" / "locks"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VENV_FIX = "Debian and Ubuntu keep a part of Python's venv apart: apt install python3.11-venv"
_NO_NETWORK = ("Failed to establish a new connection", "name resolution", "ProxyError", "(from versions: none)")


def lock_files(device: str, development: bool) -> list[Path]:
    """The lock files of an environment."""
    return [LOCKS / f"{device}.lock", *([LOCKS / "dev.lock"] if development else [])]


def is_ready(locks: Sequence[Path]) -> bool:
    """Whether `.venv` holds what these lock files pin."""
    stamps = _stamps()
    return PYTHON.exists() and all(stamps.get(lock.name) == _digest(lock) for lock in locks)


def make_ready(locks: Sequence[Path]) -> None:
    """Install what is missing, and what an earlier run left half done.

    Raises:
        SystemExit: it failed, or was interrupted: one sentence that says what to do.
    """
    if is_ready(locks):
        return
    try:
        _install(locks)
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted: the same command goes on with what is missing") from None


def mend_venv() -> None:
    """Make `.venv`, or mend what an interrupted installation has left of it."""
    if not _has_pip():
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
        if made.returncode:
            raise SystemExit(f"{made.stdout}{made.stderr}\npython -m venv failed; {VENV_FIX}")
    for folder in VENV.glob("lib/python*/site-packages/*.dist-info"):
        if not (folder / "RECORD").exists():  # pip writes it last, and would take the package for installed
            shutil.rmtree(folder)


def _install(locks: Sequence[Path]) -> None:
    mend_venv()
    for lock in locks:
        if _stamps().get(lock.name) == _digest(lock):
            continue
        print(f"  installing {lock.relative_to(ROOT)} ({_count(lock)} packages)", flush=True)
        torch = next((line for line in _pins(lock) if line.startswith("torch==")), None)
        if torch is not None and "+cpu" in torch:
            # PyTorch's CPU builds have an index of their own. Only torch may ask it: where it cannot be reached,
            # it would be tried again for each of the other packages.
            _pip("install", "--retries", "0", "--extra-index-url", TORCH_CPU_INDEX, torch)
        _pip("install", "-r", str(lock), of=_count(lock))
    _pip("install", "--no-build-isolation", "--editable", str(ROOT))
    stamps = {**_stamps(), **{lock.name: _digest(lock) for lock in locks}}
    new = _stamp_file().with_suffix(".new")
    new.write_text("".join(f"{name} {digest}\n" for name, digest in stamps.items()))
    new.replace(_stamp_file())


def _pip(command: str, *arguments: str, of: int = 1) -> None:
    """Run pip and show how far it is: it says nothing while it unpacks, which takes longest."""
    words = [str(PYTHON), "-I", "-m", "pip", command, "--no-deps", "--disable-pip-version-check", "--no-input"]
    installed = _installed()
    began = time.monotonic()
    with subprocess.Popen(
        [*words, "--progress-bar", "off", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        said: deque[str] = deque(maxlen=40)
        collected = [0]
        reader = threading.Thread(target=_count_lines, args=(pip.stdout, said, collected))
        reader.start()
        while pip.poll() is None:
            if of > 1:
                done = len(_installed() - installed)
                elapsed_s = time.monotonic() - began
                _show(f"  {elapsed_s:5.1f} s  found {min(collected[0], of)}/{of}, installed {min(done, of)}/{of}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                pip.wait(1 if sys.stdout.isatty() else 15)
        reader.join()
    if of > 1 and sys.stdout.isatty():
        print(flush=True)
    if pip.returncode:
        print("\n".join(said), file=sys.stderr)
        raise SystemExit(f"pip {command} failed; its last lines stand above{_why(said)}")


def _why(said: Iterable[str]) -> str:
    if any(words in line for line in said for words in _NO_NETWORK):
        return (
            ". It could not reach the package index: connect this machine, or tell pip of a proxy or a copy "
            "(PIP_PROXY, PIP_INDEX_URL, PIP_FIND_LINKS); the same command then goes on with what is missing"
        )
    return "; the same command goes on with what is missing"


def _has_pip() -> bool:
    """Whether there is an environment that was made to its end: pip comes last."""
    if not PYTHON.exists():
        return False
    asked = subprocess.run([str(PYTHON), "-I", "-m", "pip", "--version"], capture_output=True, check=False)
    return asked.returncode == 0


def _count_lines(lines: IO[str], said: deque[str], collected: list[int]) -> None:
    for line in lines:
        said.append(line.rstrip())
        collected[0] += line.startswith(("Collecting", "Requirement already", "Processing", "Obtaining"))


def _installed() -> set[Path]:
    return set(VENV.glob("lib/python*/site-packages/*.dist-info"))


def _show(line: str) -> None:
    print(f"\r{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def _pins(lock: Path) -> list[str]:
    lines = (line.strip() for line in lock.read_text().splitlines())
    return [line.split(" ")[0] for line in lines if line and not line.startswith("#")]


def _count(lock: Path) -> int:
    return len(_pins(lock))


def _digest(lock: Path) -> str:
    return hashlib.sha256(lock.read_bytes()).hexdigest()[:16]


def _stamp_file() -> Path:
    return VENV / "hermes-locks"


def _stamps() -> dict[str, str]:
    if not _stamp_file().exists():
        return {}
    lines = (line.split() for line in _stamp_file().read_text().splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}
