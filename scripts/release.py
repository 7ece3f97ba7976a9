"""Makes what a release consists of, into one folder: wheel, source, chart, recipes of the images,
OpenAPI, dashboard, a bill of materials for each lock file, notes, and the hashes of all.

It needs no network. The same commit gives the same bytes: every time in an archive is the
commit's, every mode 644 or 755, and names are sorted.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import helm_python
import httpx
import yaml

from serve_app import __version__
from serve_app.cluster.replicas import Replicas
from serve_app.contract import AttemptResult
from serve_app.local.environment import LOCKS, ROOT
from serve_app.processes import IngressProcess
from serve_app.settings import Settings

CHART = "helm/hermes-serve"
BILLS = ("cpu", "gpu", "local")
"""The lock files of which an installation consists."""
IMAGE_FILES = ("cluster/haproxy-start", "LICENSE")
NOTES_LINES = 60


def main(words: list[str] | None = None) -> None:
    """Check that this commit can be released, and make everything.

    Raises:
        SystemExit: it cannot; one sentence says why.
    """
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    parser.add_argument(
        "--dirty", action="store_true", help="of the files as they are, committed or not"
    )
    options = parser.parse_args(words)
    if problem := not_releasable(options.dirty):
        sys.exit(f"scripts/release: {problem}")
    make(options.out)
    for line in (options.out / "SHA256SUMS").read_text().splitlines():
        print(line)


def not_releasable(dirty: bool) -> str:
    """Why this tree is no release; empty if it is one."""
    if not dirty and (changed := git("status", "--porcelain").strip()):
        return f"commit or remove what is changed, or give --dirty:\n{changed}"
    chart = yaml.safe_load((ROOT / CHART / "Chart.yaml").read_text())
    wanted = re.sub(r"(a|b|rc)(\d+)$", r"-\1.\2", __version__), __version__
    if (found := (chart["version"], chart["appVersion"])) != wanted:
        return f"{CHART}/Chart.yaml has version and appVersion {found}: they have to be {wanted}"
    heading, summary = notes_of((ROOT / "CHANGELOG.md").read_text())
    if __version__ not in heading or not summary:
        return f"CHANGELOG.md has to begin with a summary of {__version__}, before its lists"
    return ""


def make(out: Path) -> None:
    """Make everything in a folder, which is emptied first."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    seconds = int(git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        export(source, seconds)
        wheel = packages(source, out, seconds)
        chart(source, out, seconds)
        images(source, wheel, out, seconds)
    write_json(out / "openapi.json", openapi())
    dashboard = f"{CHART}/files/dashboard.json"
    shutil.copyfile(ROOT / dashboard, out / "grafana-dashboard.json")
    for name in BILLS:
        bill = bill_of_materials((LOCKS / f"{name}.lock").read_text(), name, seconds)
        write_json(out / f"sbom-{name}.cdx.json", bill)
    (out / "NOTES.md").write_text(notes((ROOT / "CHANGELOG.md").read_text()))
    hashes = [f"{digest(file)}  {file.name}\n" for file in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(hashes))


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    ).stdout


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_json(file: Path, document: object) -> None:
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


# -- archives --------------------------------------------------------------------------------------


def export(folder: Path, seconds: int) -> None:
    """Copy the files that git knows, with links in place of links."""
    for name in git("ls-files", "-z").split("\0")[:-1]:
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy, follow_symlinks=False)
        if not copy.is_symlink():
            copy.chmod(0o755 if copy.stat().st_mode & 0o100 else 0o644)
        os.utime(copy, (seconds, seconds), follow_symlinks=False)


def archive(file: Path, folder: Path, names: Iterable[str], seconds: int) -> None:
    """A `.tar.gz` of files below a folder, with nothing of this machine or hour in it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            data = (folder / name).read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), seconds
            entry.mode = 0o755 if (folder / name).stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(data))
    file.write_bytes(gzip.compress(packed.getvalue(), mtime=0))


def repack(made: Path, file: Path, seconds: int) -> None:
    """Pack the content of a `.tar.gz` anew."""
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(made) as tar:
            tar.extractall(name, filter="data")
        archive(file, Path(name), files_of(Path(name)), seconds)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def packages(source: Path, out: Path, seconds: int) -> Path:
    """Build the wheel and the source archive with this environment's setuptools. Returns the
    wheel.
    """
    made = source.parent / "packages"
    made.mkdir()
    build = "from setuptools import build_meta as b; b.build_sdist({0!r}); b.build_wheel({0!r})"
    subprocess.run(
        [sys.executable, "-I", "-c", build.format(str(made))],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(seconds)},
        umask=0o022,  # of the files that setuptools makes
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    repack(sdist, out / sdist.name, seconds)
    return Path(shutil.copy(wheel, out))


def chart(source: Path, out: Path, seconds: int) -> None:
    """Package the chart as `helm package` does."""
    made = Path(helm_python.package(source / CHART, destination=source.parent))
    repack(made, out / made.name, seconds)


def images(source: Path, wheel: Path, out: Path, seconds: int) -> None:
    """What the images are built of, without this repository: the wheel takes the place of the
    stage that builds it.
    """
    folder = source.parent / "images"
    for name in (*IMAGE_FILES, *(str(path) for path in recipes(source))):
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, copy)
        if copy.suffix == ".Dockerfile":
            copy.write_text(of_wheel(copy.read_text(), wheel.name))
    shutil.copy2(wheel, folder)
    version = f"images-{__version__}"
    folder.rename(source.parent / version)
    names = [f"{version}/{name}" for name in files_of(source.parent / version)]
    archive(out / f"{version}.tar.gz", source.parent, names, seconds)


def recipes(source: Path) -> Iterator[Path]:
    for path in sorted((source / "cluster" / "docker").glob("*.Dockerfile")):
        yield path.relative_to(source)
        lock = path.name.replace(".Dockerfile", ".lock")
        yield (LOCKS / lock).relative_to(ROOT)


def of_wheel(recipe: str, wheel: str) -> str:
    """A Dockerfile whose first stage copies a wheel in place of building it."""
    built = re.compile(r"^WORKDIR /src\n(?:COPY .*\n)+RUN pip wheel .*\n", re.MULTILINE)
    copied, count = built.subn(f"COPY {wheel} /wheels/\n", recipe)
    assert count == 1, "the stage that builds the wheel has changed"
    return copied


# -- documents -------------------------------------------------------------------------------------


def openapi() -> object:
    """What the service says at `/openapi.json`, of an ingress that is not started."""

    async def nobody(*_: object) -> AttemptResult:
        raise AssertionError("no request is sent")

    async def ask() -> object:
        ingress = IngressProcess(Settings(), "release", "release", nobody, Replicas())
        transport = httpx.ASGITransport(ingress.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return (await http.get("/openapi.json")).raise_for_status().json()

    return asyncio.run(ask())


_PIN = re.compile(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:\w+(?: \\)?\n)+)", re.MULTILINE)


def bill_of_materials(lock: str, name: str, seconds: int) -> object:
    """The packages of a lock file in CycloneDX's form, each with its wheels' hashes."""
    components = []
    for package, version, hashes in _PIN.findall(lock):
        url = f"pkg:pypi/{re.sub('[-_.]+', '-', package).lower()}@{version.replace('+', '%2B')}"
        wheels = [
            {
                "type": "distribution",
                "url": url,
                "hashes": [{"alg": "SHA-256", "content": content}],
            }
            for content in re.findall(r"sha256:(\w+)", hashes)
        ]
        component = {"type": "library", "bom-ref": url, "name": package, "version": version}
        components.append({**component, "purl": url, "externalReferences": wheels})
    made = datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
    of = {"type": "application", "name": f"hermes-serve, {name}.lock", "version": __version__}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, __version__ + lock)}",
        "version": 1,
        "metadata": {"timestamp": made, "component": of},
        "components": components,
    }


def notes_of(changelog: str) -> tuple[str, str]:
    """Heading and summary of the newest version; the summary stands before its lists."""
    section = changelog.split("\n## ")[1]
    heading, _, rest = section.partition("\n")
    return heading, rest.split("\n### ")[0].strip()


def notes(changelog: str) -> str:
    """One page about the release.

    Raises:
        ValueError: the summary is too long.
    """
    _, summary = notes_of(changelog)
    text = f"""# hermes-serve {__version__}

{summary}

The whole list is in CHANGELOG.md.

```
pip install hermes_serve-{__version__}-py3-none-any.whl && hermes-serve up
sha256sum --check SHA256SUMS
```
"""
    if len(text.splitlines()) > NOTES_LINES:
        raise ValueError(f"the notes have more than {NOTES_LINES} lines: shorten the summary")
    return text


if __name__ == "__main__":
    main()
