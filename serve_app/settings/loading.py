"""Validates the settings of a Serve config file: each mistake gives one line with the setting and
the fix.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from serve_app.errors import SettingsError
from serve_app.settings.sections import FORMS, RedisSettings
from serve_app.settings.tree import Settings
from serve_app.settings.vllm_names import variables_problem


def load_settings(args: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Validate `args` (the `args` of the application in a Serve config file) and freeze them.

    If the environment variables `HERMES_REDIS_URL` and `HERMES_KEYS_FILE` are set, they replace
    `redis.url` and `auth.keys_file`.

    Raises:
        SettingsError: has one line per mistake, which names the setting and the fix.
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
        except (
            ValidationError
        ) as error:  # its own message would show the URL, which may hold a password
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
    """One pydantic error as one sentence: the setting, what is wrong, the fix."""
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _known_keys(item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
        fix = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        return f"settings: unknown key '{path}': {fix}"
    message = _reason(item)
    if path.endswith(("_s", "_ms", "_bytes")) and item["type"].endswith(("_parsing", "_type")):
        unit = {"s": "seconds", "ms": "milliseconds", "bytes": "bytes"}[path.rsplit("_", 1)[1]]
        return f"settings: '{path}' takes a plain number of {unit}, not {item['input']!r}"
    if item["type"] in ("model_type", "dict_type"):
        return f"settings: '{path or 'args'}' takes a mapping, not {item['input']!r:.200}"
    if item["type"] == "string_pattern_mismatch":
        return f"settings: '{path}' {FORMS[item['ctx']['pattern']]}, not {item['input']!r:.200}"
    return f"settings: '{path}': {message}" if path else f"settings: {message}"


def _reason(item: Any) -> str:
    return str(item["msg"]).removeprefix("Value error, ")


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    section: type[BaseModel] = Settings
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(section.model_fields)
