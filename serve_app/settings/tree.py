"""The settings tree: immutable, with units in the names; unknown settings are refused.

The tree is the `args` of the application in a Serve config file (`cluster/*.yaml`). To keep Redis's
password out of that file, set the environment variable `HERMES_REDIS_URL` on the Ray nodes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from serve_app.errors import SettingsError
from serve_app.settings.limits import RequestLimits
from serve_app.settings.sections import (
    FORMS,
    NAMESPACE,
    SERVICE,
    AuthSettings,
    BatchSettings,
    EngineSettings,
    FilesSettings,
    IngressSettings,
    JournalSettings,
    ModelSettings,
    OrderSettings,
    QueueSettings,
    RedisSettings,
    RoutingSettings,
    Section,
    TelemetrySettings,
    WorkerSettings,
)
from serve_app.settings.vllm_names import argument_problem, variables_problem
from serve_app.settings.webhooks import WebhookSettings

log = logging.getLogger("hermes.settings")

RENAMED = {
    "workers": {
        "held_s": "max_event_loop_block_s",
        "stall_s": "engine_stall_timeout_s",
        "rerun_tokens": "max_regenerated_tokens",
    },
    "ingress": {
        "stalled_reader_s": "stalled_client_timeout_s",
        "detached_timeout_s": "background_timeout_s",
        "max_upload_bytes": "max_buffered_request_bytes",
        "max_unread_bytes": "max_buffered_response_bytes",
    },
    "journal": {
        "detached_retention_s": "background_retention_s",
        "max_kept_share": "max_retained_share",
        "ledger_days": "usage_retention_days",
    },
    "limits": {
        "max_choices": "max_structured_choices",
        "max_choice_chars": "max_structured_choice_chars",
    },
    "order": {"short_first_ms_per_token": "short_first_ms_per_cost"},
    "queue": {"poison_after": "max_engine_deaths"},
}
"""By section: the former name and the one that replaces it. Removed in the next release."""


def by_new_names(args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under their names of today. A former name is logged once in a process.

    Raises:
        ValueError: a setting is given by both names; the message names the one to keep.
    """
    named = dict(args)
    for section, names in RENAMED.items():
        given = args.get(section)
        if not isinstance(given, Mapping):
            continue
        for old in names.keys() & given.keys():
            if names[old] in given:
                raise ValueError(
                    f"{section}.{old} is the former name of {section}.{names[old]}, and both are "
                    f"set: remove {section}.{old}"
                )
            _warn(f"{section}.{old}", f"{section}.{names[old]}")
        named[section] = {names.get(key, key): value for key, value in given.items()}
    return named


@cache
def _warn(old: str, new: str) -> None:
    log.warning("settings: %s is deprecated; use %s, which replaces it", old, new)


PresetName = Literal["latency", "balanced", "throughput"]
AUTO_FIT = -1
"""vLLM's word for the model's own length, or as much of it as fits into the KV cache."""


class Preset(NamedTuple):
    """What one word stands for."""

    sequences: int
    """How many requests one engine runs at a time."""
    batched_tokens: int
    """How many tokens of prompts and answers one step of the engine computes at most."""
    memory_share: float
    """Share of a GPU's memory that the engine takes."""
    busy_share: float
    """Share of what an engine may run that autoscaling aims for: the lower, the earlier another
    replica starts; the higher, the less is idle.
    """


PRESETS: dict[PresetName, Preset] = {
    "latency": Preset(64, 8_192, 0.85, 0.25),
    "balanced": Preset(256, 32_768, 0.90, 0.5),
    "throughput": Preset(512, 65_536, 0.92, 0.75),
}


def fill_in(args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the values of their preset, where they set none themselves. A malformed
    section stays as it is: its own validation explains what is wrong.
    """
    preset = PRESETS.get(args["preset"]) if isinstance(args.get("preset"), str) else None
    workers, engine = _section(args, "workers"), _section(args, "engine")
    if preset is None or workers is None or engine is None:
        return dict(args)
    filled = _with_sizes(preset, workers)
    given = _section(engine, "args")
    if engine.get("kind", "vllm") != "vllm" or given is None:
        return {**args, "workers": filled}
    on_gpu = workers.get("device") == "gpu"
    of_engine = {**engine, "args": _with_vllm(preset, given, on_gpu=on_gpu)}
    return {**args, "workers": filled, "engine": of_engine}


def _with_sizes(preset: Preset, workers: Mapping[str, Any]) -> dict[str, Any]:
    """The workers' section. With a target above what an engine runs, no replica would be added."""
    filled = {"max_running_requests": preset.sequences, **workers}
    autoscaling, running = _section(workers, "autoscaling"), filled["max_running_requests"]
    if workers.get("autoscaling") is None or autoscaling is None or not isinstance(running, int):
        return filled
    target = max(1.0, preset.busy_share * running)
    return {**filled, "autoscaling": {"target_ongoing_requests": target, **autoscaling}}


def _with_vllm(preset: Preset, given: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """vLLM's arguments. On a CPU there is no share of memory: VLLM_CPU_KVCACHE_SPACE bounds the
    cache there, and vLLM reads the share as one of the whole machine.
    """
    ours: dict[str, Any] = {
        "max_num_batched_tokens": preset.batched_tokens,
        "enable_prefix_caching": True,
        "max_model_len": AUTO_FIT,
    }
    if on_gpu:
        ours["gpu_memory_utilization"] = preset.memory_share
    chosen = {name.replace("-", "_") for name in given}
    return {**{name: value for name, value in ours.items() if name not in chosen}, **given}


def _section(args: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What is set in a section; empty if it is left out, None if it is no section."""
    value = args.get(name)
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else None


class Settings(Section):
    """The whole tree."""

    namespace: str = Field("hermes", min_length=1, pattern=NAMESPACE)
    """Prefix of every Redis key; not Kubernetes' namespace"""
    service: str = Field("", max_length=1024, pattern=SERVICE)
    """Name of this service. A namespace belongs to one service: an ingress of another name is not
    let in, and says so in `/readyz`. Empty: not compared"""
    preset: PresetName | None = None
    """Sizes of the engine's batches, where nothing else sets them: `latency`, `balanced` or
    `throughput`; the table of presets has the values"""
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
    files: FilesSettings = FilesSettings()
    batches: BatchSettings = BatchSettings()
    routing: RoutingSettings = RoutingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    webhooks: WebhookSettings = WebhookSettings()

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


def load_settings(args: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Validate `args` (the `args` of the application in a Serve config file) and freeze them.

    If the environment variables `HERMES_REDIS_URL` and `HERMES_KEYS_FILE` are set, they replace
    `redis.url` and `auth.keys_file`.

    Raises:
        SettingsError: names each mistake with its setting.
    """
    try:
        settings = Settings.model_validate(dict(args) if isinstance(args, Mapping) else args)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item) for item in error.errors())) from None
    if settings.engine.kind == "vllm" and (wrong := variables_problem(environment)):
        raise SettingsError(f"settings: {wrong}")
    if url := environment.get("HERMES_REDIS_URL"):
        try:
            redis = RedisSettings.model_validate({**settings.redis.model_dump(), "url": url})
        except ValidationError as error:  # its own message would show the URL with a password
            raise SettingsError(
                f"settings: HERMES_REDIS_URL: {_reason(error.errors()[0])}"
            ) from None
        settings = settings.model_copy(update={"redis": redis})
    if keys_file := environment.get("HERMES_KEYS_FILE"):
        auth = settings.auth.model_copy(update={"keys_file": keys_file})
        settings = settings.model_copy(update={"auth": auth})
    if settings.auth.required and not settings.auth.keys_file:
        raise SettingsError(
            "settings: 'auth.keys_file' is empty while auth.required is true: name the file of "
            "API keys (hermes-serve api-key makes them), or set HERMES_KEYS_FILE in the "
            "environment of the Ray nodes"
        )
    return settings


def _explain(item: Any) -> str:
    """A mistake as pydantic says it, with its setting; without its value, which may be secret."""
    path = ".".join(map(str, item["loc"]))
    if item["type"] == "string_pattern_mismatch":
        return f"settings: '{path}' {FORMS[item['ctx']['pattern']]}"
    return f"settings: '{path}': {_reason(item)}" if path else f"settings: {_reason(item)}"


def _reason(item: Any) -> str:
    return str(item["msg"]).removeprefix("Value error, ")
