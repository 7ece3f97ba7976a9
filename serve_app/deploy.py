"""The composition root: builds the Serve application from the settings. Besides the router, only
this module uses Ray Serve.

`serve deploy cluster/<stage>.yaml` calls `build(args)` on the cluster.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve._private import http_util, replica
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RequestRouter
from uvicorn import config as uvicorn_config

from serve_app.cluster import replicas as of_process
from serve_app.cluster.direct_calls import why_lost
from serve_app.cluster.serve_router import OVERRIDDEN
from serve_app.contract import AttemptResult
from serve_app.errors import SettingsError
from serve_app.foundation import freeze_heap
from serve_app.ingress.client_connections import HttpProtocol
from serve_app.processes import IngressProcess, WorkerProcess, make_engine, most_calls
from serve_app.settings import Settings, load_settings

log = logging.getLogger("hermes.deploy")

_A_LITTLE = 0.001
"""Amount of the custom resource per replica. It is tiny because the resource only decides where
replicas run, not how many.
"""

_HEADERS_OF_SERVE = (
    (replica, "SERVE_HTTP_REQUEST_ID_HEADER"),
    (replica, "SERVE_MULTIPLEXED_MODEL_ID"),
    (http_util, "SERVE_SESSION_ID"),
    (http_util, "SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER"),
    (http_util, "SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER"),
)
"""Headers that Serve (2.60) reads before an ingress does. A byte in one that is no UTF-8 was a bare
500, a time that has passed a bare 408, and a client's word kept a request that its client had left.
"""
_NO_HEADER = "(no header)"
"""What Serve looks for instead: a name cannot have spaces."""
_REPLACED = (
    *_HEADERS_OF_SERVE,
    (http_util, "RequestIdMiddleware"),
    (replica, "ASGIDIReceiveProxy"),
    (replica, "add_port_to_grpc_server"),
)
"""In Serve's modules, by an ingress; the last by a worker, too."""

_LOOPBACK = "127.0.0.1"

_READ_AHEAD = 8
"""Messages of a request's body, each of which the server keeps below some 64 KiB."""
_SHORT_REQUESTS = 128
"""Additional concurrent requests for short ones: probes, states, `DELETE`."""


def _replica_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


def _listen_where_ray_does() -> None:
    """Keep to the loopback what Serve (2.60) opens on every address after the constructor: the port
    on which a replica unpickles what the others send. Of a Ray on the loopback all are here.
    """
    if ray.util.get_node_ip_address() == _LOOPBACK:
        add_port = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, address: add_port(
            server, address.replace("[::]", _LOOPBACK)
        )


class _NoRequestIds:
    """In place of Serve's middleware, which gives requests without an id one of its own, and every
    answer a second `x-request-id`: clients show both, separated by a comma.

    A function that returns `app` would not do: uvicorn takes Serve's, which is no coroutine
    function, for an application of ASGI 2.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


class _BoundedReceive(replica.ASGIDIReceiveProxy):  # type: ignore[misc]  # Ray has no types
    """Serve's `receive`, which reads ahead of an ingress to learn that its client has left, but not
    more than a few messages: a file that comes faster than its storage takes it would all be in
    memory.
    """

    def __init__(
        self, scope: Any, receive: Any, user_event_loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(scope, receive, user_event_loop)
        if asyncio.get_running_loop() is user_event_loop:  # else Serve cannot wait for room
            self._queue: asyncio.Queue[Any] | None = asyncio.Queue(_READ_AHEAD)


def _cluster() -> str:
    """The name of this Ray cluster: it begins with the time at which the cluster was started, and
    outlives its head where Ray's state does.
    """
    return str(ray.get_runtime_context().get_session_name())


@serve.deployment(name="Worker")
class Worker:
    """One replica of this deployment owns one engine."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        _listen_where_ray_does()
        settings = load_settings(args)
        host = str(ray.util.get_node_ip_address())
        engine = make_engine(settings)
        self._process = WorkerProcess(settings, _replica_id(), _cluster(), engine, host)
        await self._process.start()
        freeze_heap()

    async def execute(self, request_id: str, epoch: int, replica: str, cause: str) -> str:
        return await self._process.replica.execute(request_id, epoch, replica, cause)

    async def check_health(self) -> None:
        """Serve calls this; after an exception it replaces the replica."""
        await self._process.replica.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this every few seconds if it autoscales, and hands on what it returns to the
        policy.
        """
        return self._process.replica.load()

    async def __del__(self) -> None:
        if hasattr(self, "_process"):
            await self._process.stop()


@serve.deployment(name="Ingress")
@serve.ingress()
class Ingress:
    """One replica of this deployment is one HTTP server with one dispatcher."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: dict[str, Any], workers: DeploymentHandle[Any]
    ) -> None:
        _listen_where_ray_does()
        for module, name in _HEADERS_OF_SERVE:
            setattr(module, name, _NO_HEADER)
        http_util.RequestIdMiddleware = _NoRequestIds
        replica.ASGIDIReceiveProxy = _BoundedReceive
        # By its module: Serve pickles this class by value, with copies of such objects.
        uvicorn_config.HTTP_PROTOCOLS["auto"] = f"{HttpProtocol.__module__}:{HttpProtocol.__name__}"
        # The router calls `Replicas`, which belong to this loop. Serve's default is another thread.
        workers._init(_run_router_in_separate_loop=False)
        execute = workers.options(
            method_name="execute", request_serialization="pickle", response_serialization="pickle"
        )

        async def call(request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
            try:
                # Plain text: the replica may be of a version that does not know the enum.
                return AttemptResult.decode(
                    await execute.remote(request_id, epoch, replica, str(cause))
                )
            except Exception as error:  # whatever failed, the journal shows how far the attempt got
                raise why_lost(error) from error

        replicas = of_process.of(workers.deployment_name)
        self._process = IngressProcess(
            load_settings(args), _replica_id(), _cluster(), call, replicas
        )
        await self._process.start()
        freeze_heap()

    async def check_health(self) -> None:
        """Serve calls this; after an exception it replaces the replica."""
        self._process.check_health()

    def __serve_build_asgi_app__(self) -> Any:
        return self._process.app()

    async def __del__(self) -> None:
        if hasattr(self, "_process"):
            await self._process.stop()
        await super().__del__()  # type: ignore[misc]


def build(args: dict[str, Any]) -> Application:
    """Build the application. Raises `SettingsError` for an impossible setting."""
    _check_ray()
    settings = load_settings(args)
    if settings.engine.kind == "vllm":
        from workers.vllm_engine import engine_arguments

        try:
            engine_arguments(_readable_here(settings))
        except RuntimeError as error:  # vLLM for GPUs reads none on a head without one
            log.info("cannot check the engine's arguments here, the workers will: %s", error)
    else:
        make_engine(settings)  # its own arguments
    workers = Worker.options(**_worker_options(settings)).bind(args)  # type: ignore[attr-defined]  # decorated
    ingress = Ingress.options(  # type: ignore[attr-defined]  # decorated
        num_replicas=settings.ingress.replicas,
        max_replicas_per_node=settings.ingress.max_replicas_per_node,
        max_ongoing_requests=settings.ingress.max_connections
        + settings.ingress.max_readers
        + _SHORT_REQUESTS,
        graceful_shutdown_timeout_s=settings.ingress.graceful_shutdown_timeout_s,
        ray_actor_options={
            "num_cpus": settings.ingress.cpus_per_replica,
            "resources": _places(settings.ingress.ray_resource),
        },
    )
    return ingress.bind(args, workers)


def _check_ray() -> None:
    """Check that Ray Serve still has what is replaced: otherwise nothing would call ours."""
    for owner, name in (*((RequestRouter, name) for name in OVERRIDDEN), *_REPLACED):
        if not hasattr(owner, name):
            raise SettingsError(
                f"Ray {ray.__version__} has no {owner.__name__}.{name}, which the service "
                "replaces: install the pinned version"
            )


def _readable_here(settings: Settings) -> Settings:
    """The settings without a chat template on a volume that this node does not mount: the workers
    will read it.
    """
    args = {
        name: value
        for name, value in settings.engine.args.items()
        if name.replace("-", "_") != "chat_template"
        or not str(value).startswith("/")
        or Path(value).parent.exists()
    }
    engine = settings.engine.model_copy(update={"args": args})
    return settings.model_copy(update={"engine": engine})


def _places(resource: str) -> dict[str, float]:
    return {resource: _A_LITTLE} if resource else {}


def _worker_options(settings: Settings) -> dict[str, Any]:
    workers = settings.workers
    options: dict[str, Any] = {
        "max_ongoing_requests": most_calls(settings),
        "health_check_period_s": workers.health_check_period_s,
        "health_check_timeout_s": workers.health_check_timeout_s,
        "graceful_shutdown_timeout_s": workers.graceful_shutdown_timeout_s,
        # An engine with tensor parallelism, too, is one actor with processes of its own, so there
        # is no placement group whose bundles would need the resource.
        "ray_actor_options": {
            "num_cpus": workers.cpus_per_replica,
            "num_gpus": workers.gpus,
            "resources": _places(workers.ray_resource),
        },
        "request_router_config": RequestRouterConfig(
            request_router_class="serve_app.cluster.serve_router:SessionRouter",
        ),
    }
    scaling = workers.autoscaling
    if scaling is None:
        options["num_replicas"] = workers.replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(**scaling.for_serve())
    return options
