"""Makes small defects in a copy of the working tree, one at a time, and runs the tests that the
gate has for that place: they must fail. The defects are in `scripts/mutants.toml`.

A defect that only a real engine or a real service shows is declared with its `tier`. It is left
out, unless it is named or `--all` is given.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "mutants.toml"
GATE = ("-m", "not clock and not nightly", "-x", "-q", "-p", "no:cacheprovider")
_LIMIT_S = {"": 240.0, "engine": 600.0, "service": 900.0}
"""By tier. A test that hangs longer has found its defect."""
_ONE_TEST_S = {"": 60, "engine": 300, "service": 300}
_ENDS_WITHIN_S = 30.0
_FAILED, _NOTHING_FAILED = 1, 0
_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One defect: `old` becomes `new` in a file.

    Args:
        tests: files of tests, and `-k` expressions behind `-k`.
        tier: the folder of the gate's tests that find it, if starting what they need takes minutes.
        note: why no faster test finds it.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    tier: str = ""
    note: str = ""

    def source(self, root: Path) -> str:
        """The file with the defect.

        Raises:
            SystemExit: `old` is not there exactly once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            sys.exit(
                f"mutant {self.name}: its old text is {text.count(self.old)} times in {self.file}, "
                "and must be there once: correct scripts/mutants.toml"
            )
        return text.replace(self.old, self.new)


def row(mutant: Mutant, seconds: str, what: str) -> str:
    return f"{mutant.name:38} {mutant.area:13} {seconds:>7}  {what}"


def read_mutants() -> list[Mutant]:
    """All defects, each of which can be made."""
    found = [
        Mutant(name=name, **{**fields, "tests": tuple(fields["tests"])})
        for name, fields in tomllib.loads(LIST.read_text()).items()
    ]
    for mutant in found:
        mutant.source(ROOT)
    return found


class Copy:
    """A copy of the working tree, whose code is what its tests import."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        listed = subprocess.check_output(command, cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():  # to a folder
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        waiting = folder / "tests" / "waiting.py"  # what a defect prevents need not be waited for
        waiting.write_text(waiting.read_text().replace("PATIENCE_S = 180.0", "PATIENCE_S = 30.0"))
        (folder / ".venv").symlink_to(ROOT / ".venv")
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "HERMES_DATA": os.environ.get("HERMES_DATA", str(ROOT / ".hermes" / "data")),
        }

    @contextmanager
    def with_defect(self, mutant: Mutant) -> Iterator[None]:
        """The copy has this defect while the block runs."""
        file = self.root / mutant.file
        original, times = file.read_bytes(), file.stat()
        file.write_text(mutant.source(self.root))
        try:
            yield
        finally:  # with the time of the original, to which its byte code belongs
            file.write_bytes(original)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Run tests. Returns pytest's exit status, None if they hung, and what they printed."""
        command = (sys.executable, "-m", "pytest", *GATE, *tests)
        with tempfile.TemporaryFile("w+") as printed:
            output: Any = {"stdout": printed, "stderr": subprocess.STDOUT}
            pytest = subprocess.Popen(
                command, cwd=self.root, env=self._environment, start_new_session=True, **output
            )
            status: int | None = None
            try:
                status = pytest.wait(limit_s)
            except subprocess.TimeoutExpired:  # USR1: pytest ends what it started
                pytest.send_signal(signal.SIGUSR1)
                with suppress(subprocess.TimeoutExpired):
                    pytest.wait(_ENDS_WITHIN_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(pytest.pid, signal.SIGKILL)
                pytest.wait()
            printed.seek(0)
            return status, printed.read()

    def finds(self, mutant: Mutant) -> bool:
        """Run a defect's tests with it, and print what they made of it."""
        began_s = time.monotonic()
        with self.with_defect(mutant):
            tests = (*mutant.tests, "-o", f"timeout={_ONE_TEST_S[mutant.tier]}")
            status, printed = self.run(tests, _LIMIT_S[mutant.tier])
        first = _FIRST_FAILURE.search(printed)
        if status is None:
            found, what = True, "(the tests hung)"
        elif status == _FAILED and first is not None:
            found, what = True, first[1]
        elif status == _NOTHING_FAILED:
            found, what = False, "SURVIVED"
        else:  # what no test can import is no defect that a test finds
            found, what = False, f"BROKEN: pytest ended with {status}\n{printed}"
        print(row(mutant, f"{time.monotonic() - began_s:.1f}", what), flush=True)
        return found

    def check_without_defect(self, mutants: Sequence[Mutant]) -> None:
        """A test that fails anyway finds nothing."""
        parts = {mutant.tests for mutant in mutants if "-k" in mutant.tests}
        whole = {path for mutant in mutants if "-k" not in mutant.tests for path in mutant.tests}
        for tests in (*parts, *([tuple(sorted(whole))] if whole else [])):
            status, printed = self.run(tests, limit_s=3_600)
            if status != _NOTHING_FAILED:
                raise SystemExit(f"{' '.join(tests)}: failed without any defect:\n{printed}")


def main(words: Sequence[str] | None = None) -> int:
    """The command; its exit status is 1 if a defect survived."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these defects")
    parser.add_argument("--area", help="only the defects of one area")
    parser.add_argument("--all", action="store_true", help="also those of other tiers")
    asked = parser.parse_args(words)
    mutants = read_mutants()
    if unknown := set(asked.names) - {mutant.name for mutant in mutants}:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    chosen = [
        mutant
        for mutant in mutants
        if asked.area in (None, mutant.area) and (not asked.names or mutant.name in asked.names)
    ]
    now = [mutant for mutant in chosen if asked.names or asked.all or not mutant.tier]
    with tempfile.TemporaryDirectory(prefix="hermes-mutants-") as folder:
        copy = Copy(Path(folder).resolve())
        copy.check_without_defect(now)
        found = sum(copy.finds(mutant) for mutant in now)
    for mutant in chosen:
        if mutant not in now:
            print(row(mutant, "-", f"left out: {mutant.tests[0]} finds it. {mutant.note}"))
    print(f"{found} of {len(now)} found")
    return 0 if found == len(now) else 1


if __name__ == "__main__":
    sys.exit(main())
