"""The surroundings of a service that we start: its environment, its logs, its model's download, its
shared memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from serve_app.local import __main__ as quickstart
from serve_app.local import (
    environment,
    logs,
    ports,
    preflight,
    ray_cluster,
    service,
    surroundings,
)
from serve_app.settings import Settings
from tests.tables import each

CORE = "(EngineCore pid=71) ERROR 11-22 10:00:00 [core.py:1095] "
NEEDED = "ValueError: To serve at least one request with the max seq len, 4.00 GiB are needed"
REFUSED = "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error."


@each(
    "lines, wanted",
    [
        (  # An engine's own word goes before what the replica made of it.
            [
                f"{CORE}Traceback (most recent call last):",
                f"{CORE}{NEEDED}",
                "RuntimeError: Engine core initialization failed. See root cause above.",
                "ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica:hermes:Worker.init()",
                "ConnectionError: something else",
            ],
            NEEDED,
        ),
        (["Traceback (most recent call last):", REFUSED], REFUSED),  # without an engine
        (["INFO 11-22 10:00:00 [core.py:1] Loading weights"], ""),  # nobody told one
    ],
)
def test_the_line_that_says_why_nothing_started(
    tmp_path: Path, lines: list[str], wanted: str
) -> None:
    (tmp_path / "ray").mkdir(exist_ok=True)
    (tmp_path / "ray" / "worker-1-01000000-7.err").write_text("\n".join(lines))
    assert logs.cause(tmp_path) == wanted


@each(
    "name, line",
    [
        ("ray/gcs_server.out", "[2026-11-28 06:00:00,123 C 71 71] (gcs_server) gcs.cc:1: port 1"),
        ("ray/dashboard.log", "2026-11-28 06:00:00 ERROR ImportError: grpcio is too old"),
        ("ray.log", "RuntimeError: port 1"),
    ],
)
def test_without_replicas_rays_first_error_says_why(tmp_path: Path, name: str, line: str) -> None:
    folder = tmp_path / name.replace("/", "-")
    (log := folder / name).parent.mkdir(parents=True)
    later = "[2026-11-28 06:00:01,123 E 71 71] (raylet) the GCS is gone\nValueError: an echo"
    log.write_text("\n".join(["starting", line, *["more"] * 60, later]))
    (log.parent / "raylet.out").touch()
    assert logs.cause(folder)
    assert line.endswith(logs.cause(folder))


def test_a_serve_whose_api_fails_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a grpcio-reflection that is newer than grpcio: 500 to everything."""
    failing = tmp_path / "bin" / "ray"
    failing.parent.mkdir()
    failing.write_text(
        f"#!{sys.executable}\n"
        "import http.server, os, re, sys\n"
        "logs = os.environ['RAY_TMPDIR'] + '/ray/session_latest/logs'\n"
        "os.makedirs(logs)\n"
        "open(logs + '/dashboard.log', 'w').write('ImportError: grpcio is too old\\n')\n"
        "class Failing(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_error(500, explain='what it says')\n"
        "port = re.search(r'--dashboard-port=(\\d+)', ' '.join(sys.argv))[1]\n"
        "http.server.HTTPServer(('127.0.0.1', int(port)), Failing).serve_forever()\n"
    )
    failing.chmod(0o755)
    monkeypatch.setattr(ray_cluster, "_FAILS", 3)
    real = ray_cluster.start
    monkeypatch.setattr(
        ray_cluster, "start", lambda *words, **more: real(*words, **{**more, "ray": failing})
    )
    config = environment.ROOT / "cluster" / "local_cpu.yaml"
    with pytest.raises(RuntimeError, match="answers 500") as failed:
        service.start(tmp_path / "state", config, ports.free_port(), {})
    assert "what it says" in str(failed.value)
    assert "ImportError: grpcio is too old" in str(failed.value)


def test_of_the_environment_only_what_describes_the_machine_goes_on() -> None:
    machine = dict.fromkeys("PATH HOME LC_ALL CUDA_VISIBLE_DEVICES HF_TOKEN PIP_CERT".split(), "x")
    others = """RAY_ADDRESS RAY_AUTH_TOKEN VLLM_HOST_IP HERMES_REDIS_URL HERMES_KEYS_FILE
        OTEL_SERVICE_NAME http_proxy HTTPS_PROXY NO_PROXY PYTHONPATH PYTHONSTARTUP LD_PRELOAD SECRET
    """
    assert surroundings.kept({**machine, **dict.fromkeys(others.split(), "x")}) == machine


def options(*words: str) -> argparse.Namespace:
    return quickstart.arguments([*words])


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "replicas"), [(1, 1, 1), (8, 1, 8), (8, 4, 2), (6, 4, 1)]
)
def test_as_many_replicas_as_the_gpus_can_hold(
    gpus: int, tensor_parallel: int, replicas: int
) -> None:
    asked = options("--tensor-parallel-size", str(tensor_parallel))
    workers = quickstart.changes(asked, "gpu", gpus)["workers"]
    assert (workers["device"], workers["replicas"]) == ("gpu", replicas)
    assert quickstart.changes(options("--replicas", "3"), "gpu", gpus)["workers"]["replicas"] == 3
    assert "replicas" not in quickstart.changes(options(), "cpu", 0)["workers"]


@each("gpus, sequences, expected", [(1, 1024, 1024), (1, None, 256)])
def test_a_gpu_is_not_configured_as_a_cpu(gpus: int, sequences: int, expected: int) -> None:
    config = environment.ROOT / "cluster" / "local_cpu.yaml"
    given = quickstart.changes(options(), "gpu", gpus, sequences)
    application = service.render(config, 8000, given)["applications"][0]
    workers = Settings.model_validate(application["args"]).workers
    assert (workers.max_running_requests, workers.engine_stall_timeout_s) == (expected, 6.0)
    assert not set(application["runtime_env"]["env_vars"]).intersection(service.ON_CPU_ONLY)
    by_hand = quickstart.changes(options("--set", "workers.max_running_requests=9"), "gpu", 1, 1024)
    assert by_hand["workers"]["max_running_requests"] == 9
    on_cpu = service.render(config, 8000, quickstart.changes(options(), "cpu"))["applications"][0]
    assert set(service.ON_CPU_ONLY) <= set(on_cpu["runtime_env"]["env_vars"])


def test_any_setting_can_be_set_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ingress-replicas", "3", "--set", "order.claim_ahead=2", "--set", "model.name=a=b"]
    asked = options(*words, "--set", "engine.args.enforce_eager=false")
    changed = quickstart.changes(asked, "cpu")
    assert changed["order"] == {"claim_ahead": 2}
    assert changed["engine"] == {"kind": "vllm", "args": {"enforce_eager": False}}
    assert changed["model"] == {"name": "a=b"}
    assert changed["ingress"] == {"replicas": 3}
    for wrong in ("order.claim_ahead", "=2", "order..claim_ahead=2"):
        with pytest.raises(SystemExit):
            options("--set", wrong)
        assert f"'{wrong}' is not NAME=VALUE" in capsys.readouterr().err


def test_a_service_on_this_machine_keeps_files_in_its_folder() -> None:
    args = quickstart.changes(options("--state-dir", "/a"), "cpu")
    assert Settings.model_validate({"files": args["files"]}).files.storage == "/a/files"
    named = options("--state-dir", "/a", "--set", "files.storage=s3://bucket")
    assert quickstart.changes(named, "cpu")["files"] == {"storage": "s3://bucket"}


def test_the_service_is_named_after_its_folder_unless_it_is_named() -> None:
    mine, other = (options("--state-dir", folder) for folder in ("/a", "/b"))
    names = [quickstart.changes(asked, "cpu")["service"] for asked in (mine, mine, other)]
    assert names[0] == names[1] != names[2]
    assert names[0].endswith(":/a")
    Settings.model_validate({"service": names[0]})
    named = options("--set", "service=ours")
    assert quickstart.changes(named, "cpu")["service"] == "ours"


@each(
    "option, said",
    [
        *(
            (f"--port={port}", f"'{port}' is no port: choose one from 1 to 65535")
            for port in ("-1", "0", "65536", "70000", "http")
        ),
        ("--env=RAY_TMPDIR=/x", "RAY_TMPDIR is set by quickstart itself: remove it"),
        ("--set=redis.url=redis://h", "quickstart does not read redis.url: give --redis-url"),
    ],
)
def test_an_option_that_cannot_work_is_refused(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(option)
    assert said in capsys.readouterr().err


def test_only_the_shared_memory_of_killed_processes_is_removed(tmp_path: Path) -> None:
    theirs = SharedMemory(create=True, size=4096)
    make = (
        "import multiprocessing.resource_tracker as t, multiprocessing.shared_memory as s, sys, "
        "time\n"
        "t.register = lambda *a: None\n"
        "m = s.SharedMemory(create=True, size=4096); print(m.name, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "RAY_TMPDIR": str(ray_cluster.short_folder(tmp_path))}
    with subprocess.Popen(
        [sys.executable, "-c", make], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        ours = Path("/dev/shm") / child.stdout.readline().strip()
        ray_cluster.note_shared_memory(tmp_path)
        child.kill()
        child.wait()
        assert ours.exists(), "nobody was left to remove it"
        ray_cluster.sweep(tmp_path)
    try:
        assert not ours.exists()
        assert (Path("/dev/shm") / theirs.name).exists()
    finally:
        theirs.close()
        theirs.unlink()


def test_too_little_memory_is_a_sentence_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.memory_gb() > 0.1
    monkeypatch.setattr(preflight, "memory_gb", lambda: 4.0)
    assert "4 GB are free: end something, choose --replicas 1" in preflight.memory_problem(2)
    assert preflight.memory_problem(0) == ""


def test_the_gpus_are_the_drivers_and_of_those_the_chosen_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'GPU 0: A'\necho '  MIG 1g.5gb Device 0'\necho 'GPU 1: B'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert preflight.gpus() == 2
    for chosen, count in {"1": 1, "": 0, "-1": 0, "0,1": 2, "MIG-1": 1}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert preflight.gpus() == count, chosen


def test_a_ray_that_does_not_start_leaves_its_log_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bin" / "ray"
    broken.parent.mkdir()
    folder = "$RAY_TMPDIR/ray/session_latest/logs"
    broken.write_text(f"#!/bin/sh\nmkdir -p {folder}; echo why > {folder}/gcs_server.err; exit 1\n")
    broken.chmod(0o755)
    state = tmp_path / "state"
    real = ray_cluster.start
    monkeypatch.setattr(
        ray_cluster, "start", lambda *words, **more: real(*words, **{**more, "ray": broken})
    )
    with pytest.raises(RuntimeError, match="Ray did not start") as failed:
        service.start(state, environment.ROOT / "cluster" / "local_cpu.yaml", ports.free_port(), {})
    kept = Path(str(failed.value).split("logs: ")[-1])
    assert (kept / "ray" / "gcs_server.err").read_text() == "why\n"
    assert (kept / "redis.log").exists()
    assert not ray_cluster.short_folder(state).exists()
    assert not (state / "service.json").exists()


def quickstart_in(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A start that Redis's address ends at the latest, because nobody listens there."""
    nobody = f"redis://127.0.0.1:{ports.free_port()}"
    command = [
        sys.executable,
        "-m",
        "serve_app.local",
        *words,
        "--device",
        "cpu",
        "--redis-url",
        nobody,
    ]
    return subprocess.run(
        [*command, "--state-dir", str(state)],
        cwd=environment.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_one_state_folder_has_one_owner(tmp_path: Path) -> None:
    assert "Errno 111" in quickstart_in(tmp_path, "--prepared").stderr
    assert preflight.take(tmp_path) == ""
    done = quickstart_in(tmp_path, "--prepared")
    assert done.returncode == 1
    assert f"another scripts/quickstart works in {tmp_path}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_number_that_another_process_has_now_is_not_an_earlier_runs(tmp_path: Path) -> None:
    """After a reboot, or in a restarted container, it may be anybody's."""
    state = service.Service(str(tmp_path), pids={"redis": os.getpid(), "ray": os.getppid()})
    state.save()
    loaded = service.Service.load(tmp_path)
    assert loaded is not None
    assert loaded.pids == {}
    assert preflight.take(tmp_path) == ""
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as ours:
        state.pids["redis"] = ours.pid
        state.save()
        loaded = service.Service.load(tmp_path)
        assert loaded is not None
        assert loaded.pids == {"redis": ours.pid}
        ours.kill()


@each("name, ending", [("SIGHUP", 130), ("SIGTERM", 130)])
def test_a_closed_terminal_ends_it_as_ctrl_c_does(name: str, ending: int) -> None:
    code = (
        "import signal, sys, time\n"
        "from serve_app.local.__main__ import end_on_signals\n"
        "end_on_signals()\n"
        "try:\n"
        "    print(flush=True)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=environment.ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(getattr(signal, name))
        assert process.wait(30) == ending


def test_quickstart_looks_at_the_machine_first_also_in_an_active_environment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "serve_app.local", "--port", port, "--engine", "simulated"]
        done = subprocess.run(
            command, cwd=environment.ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert f"port {port} is taken: choose another with --port" in done.stderr
