"""The composition root: settings → Serve application. The only place that knows Ray Serve's deployments.

`serve deploy cluster/<stage>.yaml` calls `build(args)` on the cluster.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve._private import http_util
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from serve_app.attempts import Outcome, WorkerLost
from serve_app.ingress.app import build_app
from serve_app.ingress.client_ids import make_up
from serve_app.ingress.runtime import Ingress as IngressRuntime
from serve_app.routing import fleet as of_process
from serve_app.settings import Settings, load_settings
from workers.engine import Engine
from workers.replica import WorkerReplica

log = logging.getLogger("hermes.deploy")

_A_LITTLE = 0.001
"""Of a custom resource: it says where, not how many."""

_SHORT_REQUESTS = 128
"""At a time, for which there is room beside the long ones: probes, states, `DELETE`."""


def make_engine(settings: Settings) -> Engine:
    """The engine that the settings name."""
    if settings.engine.kind == "simulated":
        from workers.simulated_engine import SimulatedEngine

        return SimulatedEngine(settings)
    from workers.vllm_engine import VllmEngine

    return VllmEngine(settings)


def _replica_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


@serve.deployment(name="Worker")
class Worker:
    """One replica is one engine."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        settings = load_settings(args)
        self._replica = WorkerReplica(settings, _replica_id(), make_engine(settings))
        await self._replica.start()

    async def execute(self, request_id: str, epoch: int, session: str, cause: str) -> str:
        """See `WorkerReplica.execute`."""
        return await self._replica.execute(request_id, epoch, session, cause)

    async def check_health(self) -> None:
        """Called by Serve; an exception makes it replace this replica."""
        await self._replica.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.stop()


@serve.deployment(name="Ingress")
@serve.ingress()
class Ingress:
    """One replica is one HTTP server and one dispatcher."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: dict[str, Any], workers: DeploymentHandle[Any]
    ) -> None:
        # Serve (2.60) reads the same header, and would cut the request with a bare 408 before our own answer.
        http_util.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER = "x-ray-serve-request-timeout-seconds"
        http_util.generate_request_id = make_up
        execute = workers.options(
            method_name="execute", request_serialization="pickle", response_serialization="pickle"
        )

        async def call(request_id: str, epoch: int, session: str, cause: str) -> Outcome:
            try:
                return Outcome(await execute.remote(request_id, epoch, session, cause))
            except Exception as error:  # whatever it was, the journal knows how far the attempt came
                last_line = (str(error).splitlines() or [""])[-1]
                raise WorkerLost(f"{type(error).__name__}: {last_line}") from error

        # Begins with the time at which the cluster was started, and outlives its head where Ray's state does.
        cluster = ray.get_runtime_context().get_session_name()
        self._runtime = IngressRuntime(load_settings(args), _replica_id(), cluster, call, of_process.fleet)
        await self._runtime.start()

    async def check_health(self) -> None:
        """Called by Serve; an exception makes it replace this replica."""
        self._runtime.loops.check_health()

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve after the constructor."""
        return build_app(self._runtime)

    async def __del__(self) -> None:
        if hasattr(self, "_runtime"):
            await self._runtime.stop()
        await super().__del__()  # type: ignore[misc]


def build(args: dict[str, Any]) -> Application:
    """The application of a settings tree.

    Raises:
        SettingsError: a key is unknown, malformed or impossible: one line that names the key and the fix.
    """
    settings = load_settings(args)
    if settings.engine.kind == "vllm":
        from workers.vllm_engine import engine_arguments

        try:
            engine_arguments(settings)
        except RuntimeError as error:  # vLLM for GPUs reads no arguments on a head without one: the workers will
            log.info("the engine's arguments are left to the workers: %s", error)
    workers = Worker.options(**_worker_options(settings)).bind(args)  # type: ignore[attr-defined]  # decorated
    ingress = Ingress.options(  # type: ignore[attr-defined]  # decorated
        num_replicas=settings.ingress.replicas,
        max_replicas_per_node=settings.ingress.max_replicas_per_node,
        max_ongoing_requests=settings.ingress.max_connections + settings.ingress.max_readers + _SHORT_REQUESTS,
        graceful_shutdown_timeout_s=settings.ingress.graceful_shutdown_timeout_s,
        ray_actor_options={
            "num_cpus": settings.ingress.cpus_per_replica,
            "resources": {settings.ingress.ray_resource: _A_LITTLE} if settings.ingress.ray_resource else {},
        },
    )
    return ingress.bind(args, workers)


def _worker_options(settings: Settings) -> dict[str, Any]:
    workers = settings.workers
    options: dict[str, Any] = {
        # Dispatchers never send more than the room; Serve's own limit must not refuse what they send.
        "max_ongoing_requests": 2 * workers.max_running_requests,
        "health_check_period_s": workers.health_check_period_s,
        "health_check_timeout_s": workers.health_check_timeout_s,
        "graceful_shutdown_timeout_s": workers.graceful_shutdown_timeout_s,
        "ray_actor_options": {"num_cpus": workers.cpus_per_replica, "num_gpus": workers.gpus},
        "request_router_config": RequestRouterConfig(
            request_router_class="serve_app.routing.serve_router:SessionRouter",
            request_router_kwargs={
                **settings.routing.model_dump(),
                "room": math.ceil(workers.max_running_requests / settings.ingress.replicas),
            },
        ),
    }
    scaling = workers.autoscaling
    if scaling is None:
        options["num_replicas"] = workers.replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(**scaling.model_dump())
    return options
