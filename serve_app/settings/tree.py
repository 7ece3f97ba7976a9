"""The settings tree: immutable, with units in the names; unknown settings are refused.

The tree is the `args` of the application in a Serve config file (`cluster/*.yaml`). To keep Redis's
password out of that file, set the environment variable `HERMES_REDIS_URL` on the Ray nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from serve_app.settings.ingress import IngressSettings
from serve_app.settings.limits import RequestLimits
from serve_app.settings.presets import PresetName, fill_in
from serve_app.settings.renamed import by_new_names
from serve_app.settings.sections import (
    NAMESPACE,
    SERVICE,
    AuthSettings,
    JournalSettings,
    ModelSettings,
    OrderSettings,
    QueueSettings,
    RedisSettings,
    RoutingSettings,
    Section,
    TelemetrySettings,
)
from serve_app.settings.vllm_names import argument_problem
from serve_app.settings.workers import EngineSettings, WorkerSettings


class Settings(Section):
    """The whole tree."""

    namespace: str = Field(
        "hermes",
        min_length=1,
        pattern=NAMESPACE,
        description="Prefix of every Redis key; not Kubernetes' namespace",
    )
    service: str = Field(
        "",
        max_length=1024,
        pattern=SERVICE,
        description="Name of this service. A namespace belongs to one service: an ingress of "
        "another name is not let in, and says so in `/readyz`. Empty: not compared",
    )
    preset: PresetName | None = Field(
        None,
        description="Sizes of the engine's batches, where nothing else sets them: `latency`, "
        "`balanced` or `throughput`; the table of presets has the values",
    )
    redis: RedisSettings = RedisSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    workers: WorkerSettings = WorkerSettings()
    ingress: IngressSettings = IngressSettings()
    limits: RequestLimits = RequestLimits()
    auth: AuthSettings = AuthSettings()
    queue: QueueSettings = QueueSettings()
    order: OrderSettings = OrderSettings()
    journal: JournalSettings = JournalSettings()
    routing: RoutingSettings = RoutingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, args: Any) -> Any:
        return fill_in(by_new_names(args)) if isinstance(args, Mapping) else args

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.engine.kind == "vllm":
            for name, value in self.engine.args.items():
                if problem := argument_problem(name, value):
                    raise ValueError(f"engine.args.{name} {problem}")
        if (
            self.workers.device == "gpu"
            and 0 < self.workers.gpus < self.workers.tensor_parallel_size
        ):
            raise ValueError(
                f"workers.gpus_per_replica ({self.workers.gpus:g}) is below "
                f"workers.tensor_parallel_size ({self.workers.tensor_parallel_size}): give one GPU "
                "to each rank"
            )
        return self
