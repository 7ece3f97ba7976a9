"""Settings of the workers and of their engines."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from serve_app.settings.sections import RESOURCE, Section


def no_place(resource: str) -> str:
    """The sentence for a cluster none of whose nodes offers `workers.ray_resource`."""
    return (
        f"no Ray node offers the resource '{resource}' (workers.ray_resource), so no worker could "
        "run: start Ray on the workers' nodes with cluster/ray-start, or with ray start "
        f"--resources '{{\"{resource}\": 1}}', or remove workers.ray_resource"
    )


class EngineSettings(Section):
    """Which engine a worker owns, and its arguments (validated by vLLM, under vLLM's own names)."""

    kind: Literal["vllm", "simulated"] = Field(
        "vllm", description="`simulated` loads no model; it is for load tests and dry runs"
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="The engine's own arguments; see below"
    )


SEQUENCES_OF_A_GPU = 256
"""As many as vLLM 0.32 runs by default, unless the card is large."""

POLICY = "serve_app.policy.scaling:replicas_wanted"
"""Ray Serve's autoscaling policy."""


class AutoscalingSettings(Section):
    """Ray Serve's autoscaler, which follows what runs and what waits."""

    min_replicas: int = Field(2, ge=1, le=1024, description="Fewest replicas")
    max_replicas: int = Field(8, ge=1, le=1024, description="Most replicas")
    target_ongoing_requests: float = Field(
        20,
        gt=0,
        description="Sequences per replica to aim for, running and waiting; fewer where the slots "
        "or the KV cache of an engine hold fewer",
    )
    upscale_delay_s: float = Field(
        30,
        ge=0,
        description="How long the load must be above the target, or anything must wait, before "
        "replicas are added",
    )
    downscale_delay_s: float = Field(
        120,
        ge=0,
        description="How long fewer replicas must be enough, with a fifth of the target to spare, "
        "before replicas are removed",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        return self

    def for_serve(self) -> dict[str, Any]:
        """Serve's `autoscaling_config`."""
        return {**self.model_dump(), "policy": {"policy_function": POLICY}}


class WorkerSettings(Section):
    """The deployment that owns the engines."""

    replicas: int = Field(
        2,
        ge=1,
        le=1024,
        description="Number of workers, each with one engine, without autoscaling",
    )
    autoscaling: AutoscalingSettings | None = None
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="GPUs of one engine (on CPUs: processes), as vLLM's argument of this name",
    )
    cpus_per_replica: float = Field(1, ge=0, description="CPUs that Ray reserves for each replica")
    gpus_per_replica: float | None = Field(
        None,
        ge=0,
        description="GPUs that Ray reserves for each replica. Default: tensor_parallel_size on "
        "GPUs, otherwise 0",
    )
    device: Literal["cpu", "gpu"] = Field(
        "cpu", description="Whether engines run on CPUs or on GPUs"
    )
    ray_resource: str = Field(
        "",
        pattern=RESOURCE,
        description="Custom Ray resource; workers run only on nodes that have it. Default: on any "
        "node that has the CPUs and GPUs",
    )
    max_running_requests: int = Field(
        128,
        ge=1,
        le=65_536,
        description="Most sequences that one engine runs at a time; others wait in the queue. "
        "With `device: gpu` the default is 256, as vLLM's own; for a card of 70 GiB or more vLLM's "
        "is 1024",
    )
    health_check_period_s: float = Field(
        5.0, gt=0, description="How often Ray Serve checks a worker's health"
    )
    health_check_timeout_s: float = Field(
        30.0, gt=0, description="Ray Serve replaces a worker that does not answer for this long"
    )
    graceful_shutdown_timeout_s: float = Field(
        20.0, ge=0, description="How long a worker that shuts down may take before it is killed"
    )
    max_event_loop_block_s: float = Field(
        1.0,
        ge=0.1,
        description="Most CPU time in which one step of a request may block a worker's event "
        "loop; beyond it the request ends with `event_loop_blocked`",
    )
    engine_stall_timeout_s: float = Field(
        6.0,
        gt=0,
        description="An engine that makes no step for this long while requests run is replaced",
    )
    max_regenerated_tokens: int = Field(
        8_192,
        ge=0,
        description="Most tokens that are generated again after an engine died, to resume a "
        "request with a `seed`; a longer answer ends with `attempt_lost`",
    )

    @model_validator(mode="before")
    @classmethod
    def _for_the_device(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("device") == "gpu":
            return {"max_running_requests": SEQUENCES_OF_A_GPU, **given}
        return given

    @property
    def wanted(self) -> int:
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def gpus(self) -> float:
        if self.gpus_per_replica is not None:
            return self.gpus_per_replica
        return float(self.tensor_parallel_size) if self.device == "gpu" else 0.0
