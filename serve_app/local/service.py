"""The service: a rendered Serve config on a private Ray and Redis, with its state in one folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from serve_app.cli.serve_api import (
    DashboardFails,
    application_status,
    deploy,
    failure,
    with_scaling,
)
from serve_app.local import logs, ports, preflight, processes, ray_cluster, redis_server

STATE_FILE = "service.json"
_ASKED_EACH = 5
"""How often to ask per ingress so that each has certainly answered, because a proxy spreads the
requests.
"""
_TOLD_EVERY_S = 5.0
_SICK_FOR_S = 60.0
"""Serve also calls a deployment unhealthy while a busy machine keeps a replica from answering."""


@dataclass
class Service:
    """Everything that was started, so that it can be stopped. `pids`: the processes that we
    started, by name.
    """

    state_dir: str
    url: str = ""
    dashboard_url: str = ""
    redis_url: str = ""
    model: str = ""
    pids: dict[str, int] = field(default_factory=dict)

    def save(self) -> None:
        """Save after every step, so that a half-started service can be stopped too."""
        folder = Path(self.state_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{STATE_FILE}.new"  # in one step, so that nobody reads a part of it
        file.touch(mode=0o600)  # it contains Redis's password
        file.write_text(json.dumps(asdict(self), indent=2))
        file.replace(folder / STATE_FILE)

    @classmethod
    def load(cls, state_dir: Path) -> Service | None:
        """The service of a folder, if one was started there, with those processes that exist.

        Raises:
            RuntimeError: the folder's file is damaged.
        """
        path = state_dir / STATE_FILE
        if not path.exists():
            return None
        try:
            found = cls(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            raise RuntimeError(preflight.damaged(path)) from None
        folder = state_dir.resolve()
        found.pids = {k: pid for k, pid in found.pids.items() if preflight.is_ours(pid, folder)}
        return found

    @property
    def running(self) -> bool:
        return any(processes.is_alive(pid) for pid in self.pids.values())

    def down(self) -> None:
        """Stop what was started, newest first, and nothing else."""
        if self._ending.parent.exists():
            self._ending.touch()
        if "ray" in self.pids:
            ray_cluster.end(Path(self.state_dir), self.pids["ray"])
        elif self.state_dir:
            ray_cluster.sweep(Path(self.state_dir))  # of a service that did not start
        for name in ("cable", "redis"):
            if name in self.pids:
                processes.end(self.pids[name])
        (Path(self.state_dir) / STATE_FILE).unlink(missing_ok=True)
        self._ending.unlink(missing_ok=True)

    @property
    def _ending(self) -> Path:
        return Path(self.state_dir) / "ending"

    @property
    def is_being_ended(self) -> bool:
        """Whether some process is stopping it or has stopped it."""
        return self._ending.exists() or not (Path(self.state_dir) / STATE_FILE).exists()

    def restart_redis(self) -> None:
        """Start the private Redis again on its folder and port, once the old one has released the
        port.

        Raises:
            RuntimeError: it did not start; the message contains the end of its log.
        """
        folder = Path(self.state_dir) / "redis"
        port = redis_server.port_of(folder)  # the URL may lead to something in front of Redis
        processes.until(lambda: not ports.is_taken(port), within_s=20)
        processes.reap(self.pids["redis"], within_s=0)
        host = urlsplit(self.redis_url).hostname or ""
        self.pids["redis"] = redis_server.start(
            folder, port, "" if host == "127.0.0.1" else host
        ).pid
        self.save()


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by `changes`, section by section."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = (
            merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return result


ON_CPU_ONLY = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
"""Variables of `cluster/local_cpu.yaml` that are for engines on the CPU."""


def render(config: Path, port: int, args: Mapping[str, Any]) -> dict[str, Any]:
    """A Serve config file with another port and other settings."""
    document: dict[str, Any] = yaml.safe_load(config.read_text())
    document["http_options"]["port"] = port
    application = document["applications"][0]
    engine = args.get("engine")
    kind = engine.get("kind") if isinstance(engine, Mapping) else None
    if kind and kind != application["args"]["engine"].get("kind", "vllm"):
        del application["args"]["engine"]  # another engine's arguments do not apply to this one
    application["args"] = merged(application["args"], args)
    if application["args"]["workers"].get("device") == "gpu":
        for name in ON_CPU_ONLY:
            application["runtime_env"]["env_vars"].pop(name, None)
    return document


def start(
    state_dir: Path,
    config: Path,
    port: int,
    args: Mapping[str, Any],
    redis_url: str | None = None,
    haproxy: bool = True,
    environment: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda _: None,
    timeout_s: float = 300,
    place: ray_cluster.Place = ray_cluster.HERE,
    kept_logs: Path | None = None,
) -> Service:
    """Start everything and wait until it is ready.

    Args:
        timeout_s: give up after this time without any progress, see `wait_ready`.
        kept_logs: where to keep Ray's and vLLM's logs if it does not start; default: the state
            folder.

    Raises:
        RuntimeError: something did not start; the message says what and why, and where the logs
            are.
    """
    service = Service(str(state_dir), url=f"http://127.0.0.1:{port}")
    service.save()
    variables = dict(environment or {})
    try:
        if redis_url is None and "HERMES_REDIS_URL" not in variables:
            tell("Redis: private, append-only file on")
            redis = redis_server.start(state_dir / "redis")
            service.pids["redis"], redis_url = redis.pid, redis.url()
        if redis_url is not None:
            # In the nodes' environment: Serve shows its config, with a password, to anyone.
            variables["HERMES_REDIS_URL"] = redis_url
        service.redis_url = variables["HERMES_REDIS_URL"]
        service.save()
        tell("Ray: one private node")
        pid, service.dashboard_url = ray_cluster.start(state_dir, haproxy, variables, place=place)
        service.pids["ray"] = pid
        service.save()
        document = render(config, port, args)
        with_scaling(document["applications"][0])
        service.model = document["applications"][0]["args"]["model"]["name"]
        service.save()
        (state_dir / "serve.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        tell(f"Serve: deploying {config.name}")
        deploy(service.dashboard_url, document)
        source = document["applications"][0]["args"]["model"].get("source", "")
        wait_ready(service, tell, timeout_s, source)
    except (RuntimeError, DashboardFails) as error:
        kept = logs.keep(state_dir, kept_logs or state_dir / "logs")
        service.down()
        why = logs.cause(kept)
        raise RuntimeError(
            "\n".join([str(error), *([why] if why else []), f"logs: {kept}"])
        ) from None
    except BaseException:
        service.down()
        raise
    return service


def look_after(service: Service, tell: Callable[[str], None]) -> None:
    """Wait until Ray ends. If the private Redis is killed, restart it on its file; nothing is lost.

    Raises:
        RuntimeError: Redis does not start again.
    """
    while processes.is_alive(service.pids["ray"]):
        if "redis" in service.pids and not processes.is_alive(service.pids["redis"]):
            service.restart_redis()
            tell("Redis had ended; it runs again, on its append-only file")
        time.sleep(0.2)


_ASKING: dict[str, Any] = {"verify": False}
"""It is plain HTTP on this machine, for which no certificates need to be read."""


def readiness(url: str) -> dict[str, Any]:
    """`/readyz`, or why it cannot be read."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=5, **_ASKING).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def takes_chats(url: str, model: str) -> bool:
    """Whether the model answers messages, asked for one token: without a chat template it only
    completes text.
    """
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, **_ASKING)
    except httpx.HTTPError:
        return True  # nobody knows
    return answer.is_success or b"chat template" not in answer.content


def is_whole(ready: Mapping[str, Any]) -> bool:
    """Whether `/readyz` reports every replica."""
    return bool(
        ready.get("ready")
        and ready["workers"] >= ready["workers_wanted"]
        and ready["ingresses"] >= ready["ingresses_wanted"]
    )


def wait_ready(
    service: Service, tell: Callable[[str], None], timeout_s: float, source: str = ""
) -> None:
    """Wait until every ingress reports every wanted worker; each ingress sees Serve's replicas for
    itself.

    Args:
        timeout_s: give up after this time without progress in Serve's states, downloads or loading.
        source: of the model that is downloaded or loaded.

    Raises:
        RuntimeError: the deployment failed or made no progress; the message is Serve's.
    """
    deadline = time.monotonic() + timeout_s
    said = moved = ""
    told_s, well_s = 0.0, time.monotonic()
    in_a_row = 0
    while True:
        status = application_status(service.dashboard_url)
        sick = status.get("status") == "UNHEALTHY"
        well_s = well_s if sick else time.monotonic()
        if status.get("status") == "DEPLOY_FAILED" or time.monotonic() > well_s + _SICK_FOR_S:
            raise RuntimeError(f"the deployment failed: {failure(status)}")
        ready = readiness(service.url)
        in_a_row = in_a_row + 1 if is_whole(ready) else 0
        if in_a_row and in_a_row >= _ASKED_EACH * ready["ingresses_wanted"]:
            return
        if in_a_row:
            continue
        line = _progress(status, ready)
        now_s = time.monotonic()
        if line != said:
            said, deadline = line, now_s + timeout_s
            tell(line)
        if (now := logs.loading(Path(service.state_dir), source)) != moved:
            moved, deadline = now, now_s + timeout_s
            if now_s > told_s + _TOLD_EVERY_S:
                told_s = now_s
                tell(moved)
        if now_s > deadline:
            raise RuntimeError(
                f"not ready, and nothing has moved for {timeout_s:.0f} s: {moved or said}"
            )
        time.sleep(0.25)


def _progress(status: Mapping[str, Any], ready: Mapping[str, Any]) -> str:
    parts = []
    for name, deployment in sorted(status.get("deployments", {}).items()):
        states = [replica["state"] for replica in deployment.get("replicas", [])]
        running = states.count("RUNNING")
        wanted = max(len(states), running)
        parts.append(f"{name} {running}/{wanted} running")
    if not parts:
        return "Serve: building the application"
    return "Serve: " + ", ".join(parts) + (f" ({ready['problem']})" if ready.get("problem") else "")
