"""What the demo does to the service: each fault ends one process, or replaces all of them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import yaml
from redis import Redis

import serve_app
import workers
from serve_app.cli import deploy_code, serve_api
from serve_app.local import processes, ray_cluster, redis_server
from serve_app.local.service import Service, is_whole, readiness
from serve_app.redis.keyspace import journal_key

_ENGINE_CORE = "VLLM::EngineCore"


class Victims:
    """The processes of one service, and who of them carries a request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def replicas(self, deployment: str) -> dict[str, int]:
        """The pids of a deployment's replicas, by their ids."""
        status = serve_api.application_status(self._service.dashboard_url)
        found = status.get("deployments", {}).get(deployment, {}).get("replicas", [])
        return {one["replica_id"]: one["pid"] for one in found if one.get("pid")}

    def engines(self) -> dict[str, int]:
        """The pid of each worker's engine core; the worker's own, if it has none."""
        return {name: core_of(pid) or pid for name, pid in self.replicas("Worker").items()}

    def everybody(self) -> set[int]:
        """The pids of every ingress, worker and engine."""
        ingresses = self.replicas("Ingress").values()
        found = {*ingresses, *self.replicas("Worker").values(), *self.engines().values()}
        return set(filter(processes.is_alive, found))  # Serve lists those that were just killed

    def kill_engine(self, state: dict[str, Any]) -> str:
        """Kill the engine that writes the answer. Returns what was killed."""
        pid = self.engines()[state["replica"]]
        self._kill(pid)
        return f"engine, pid {pid}"

    def kill_ingress(self, state: dict[str, Any]) -> str:
        """Kill the ingress that holds the client's connection."""
        url = redis_server.as_operator(self._service.redis_url)
        with Redis.from_url(url, protocol=2) as redis:
            ((_, fields),) = redis.xrange(journal_key("hermes", state["id"]), count=1)
        channel = str(json.loads(fields[b"m"])["wake"])  # it ends with the ingress's id
        pid = self.replicas("Ingress")[channel.rpartition(":")[2]]
        self._kill(pid)
        return f"ingress with the connection, pid {pid}"

    def kill_redis(self, _state: dict[str, Any]) -> str:
        """Kill Redis, and start it again on its append-only file, as a supervisor does."""
        pid = self._service.pids["redis"]
        self._kill(pid)
        threading.Thread(target=self._service.restart_redis, daemon=True).start()
        return f"Redis, pid {pid}"

    def _kill(self, pid: int) -> None:
        ray_cluster.note_shared_memory(Path(self._service.state_dir))
        os.kill(pid, signal.SIGKILL)


def core_of(worker: int) -> int | None:
    """The engine core below a process of vLLM."""
    of_worker = processes.descendants(worker)
    return next((p for p in of_worker if _ENGINE_CORE in processes.command_line(p)), None)


class Upgrade:
    """`serve deploy` of a new version of the code, with the same arguments of the engine."""

    def __init__(self, service: Service, victims: Victims, folder: Path) -> None:
        self._service, self._victims = service, victims
        self.version = f"{serve_app.__version__}+demo"
        packages = [_copy(package, folder) for package in (serve_app, workers)]
        about = packages[0] / "__init__.py"
        about.write_text(about.read_text().replace(serve_app.__version__, self.version))
        self._document = yaml.safe_load((Path(service.state_dir) / "serve.yaml").read_text())
        logging.disable(logging.INFO)  # Ray names each package
        deploy_code.with_code(self._document, service.dashboard_url, packages)
        logging.disable(logging.NOTSET)
        self.before: set[int] = set()

    def begin(self) -> str:
        """Deploy it. Returns what it replaces."""
        self.before = self._victims.everybody()
        serve_api.deploy(self._service.dashboard_url, self._document)
        return f"replaces pids {listed(self.before)}"

    def running(self) -> set[int]:
        """The pids of every ingress, worker and engine that runs now."""
        return self._victims.everybody()

    def serves(self) -> bool:
        """Whether the new version answers."""
        page = httpx.get(f"{self._service.url}/healthz", timeout=30)
        return bool(page.json().get("version") == self.version)

    def is_done(self) -> bool:
        """Whether none of the old processes is left, and the new ones serve.

        Raises:
            RuntimeError: the deployment failed; the message is Serve's.
        """
        status = serve_api.application_status(self._service.dashboard_url)
        if status.get("status") == "DEPLOY_FAILED":
            raise RuntimeError(f"the upgrade failed: {serve_api.failure(status)}")
        left = any(processes.is_alive(pid) for pid in self.before)
        return not left and is_whole(readiness(self._service.url))


def _copy(package: Any, folder: Path) -> Path:
    source = Path(package.__file__).parent
    skipped = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(source, folder / source.name, ignore=skipped))


def listed(pids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
