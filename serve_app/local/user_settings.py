"""What the user has set, tried before anything starts: settings, their files, Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.cli.check_redis import state_of, told
from serve_app.errors import SettingsError
from serve_app.ingress.api_keys import ApiKeys
from serve_app.settings import Settings, load_settings

_MADE_BY_VLLM = {"download_dir", "mm_encoder_fp8_scale_save_path"}


def problem(
    args: Mapping[str, Any],
    variables: Mapping[str, str],
    redis_url: str | None,
    own_arguments: bool = False,
) -> str:
    """Why the service could not start with these settings; empty if it can.

    Args:
        args: of the application, as in a Serve config file.
        variables: the environment of the service's processes.
        redis_url: the one of --redis-url, which goes before HERMES_REDIS_URL.
        own_arguments: whether the user has set arguments of the engine, which vLLM then checks.
    """
    try:
        settings = load_settings(args, variables)
        ApiKeys(settings.auth)
        if own_arguments and settings.engine.kind == "vllm":
            _tried_by_vllm(settings)
    except SettingsError as error:
        return str(error)
    name, url = "--redis-url", redis_url
    if url is None:
        name, url = "HERMES_REDIS_URL", variables.get("HERMES_REDIS_URL")
    mine = settings.namespace, settings.service
    return _missing(settings) or (
        state_of(name, url, *mine, settings.redis.ca_file, told).problem if url else ""
    )


def _tried_by_vllm(settings: Settings) -> None:
    """Have vLLM's own parser look at its arguments; it takes seconds to import.

    Raises:
        SettingsError: one line that names the setting.
    """
    from workers.vllm_engine import engine_arguments

    with contextlib.suppress(RuntimeError):  # vLLM for GPUs without one: the workers will see
        engine_arguments(settings)


def _missing(settings: Settings) -> str:
    """The first of the engine's files that is not there."""
    if settings.engine.kind != "vllm":
        return ""
    paths = {f"engine.args.{name}": path for name, path in settings.engine.args.items()}
    for name, path in {"model.source": settings.model.path, **paths}.items():
        made = name.rpartition(".")[2].replace("-", "_") in _MADE_BY_VLLM
        if isinstance(path, str) and path.startswith("/") and not made and not Path(path).exists():
            return f"settings: '{name}' names {path}, which does not exist: correct the path"
    model = Path(settings.model.path)
    if model.is_dir() and not any(
        (model / name).exists() for name in ("config.json", "params.json")
    ):
        return f"settings: 'model.source' is {model}, a folder without a model's config.json"
    return ""
