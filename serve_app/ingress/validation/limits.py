"""Limits on what one request may ask of an engine: how many, how long, and what is forbidden. Pure.

Wrong types are ignored here: the walker has found them, and they are refused afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from serve_app.errors import invalid
from serve_app.ingress.validation.structure import too_many
from serve_app.ingress.validation.walker import check_repeats
from serve_app.policy.work import prompts_in
from serve_app.settings.limits import RequestLimits

_SCHEMAS = "response_format structured_outputs text tools chat_template_kwargs".split()
_COUNTED = ("Items", "Length", "Properties", "Contains")
_SCHEMA_WRAPPER_DEPTH = 4
"""Levels of a request around a JSON schema."""
_COUNTS = {f"{most}{of}" for most in ("min", "max") for of in _COUNTED}
_MEDIA = ("image_url", "audio_url", "video_url", "file_url")


def check_limits(path: str, request: Mapping[str, Any], limits: RequestLimits) -> None:
    """Refuse requests that would stall an engine or reach into it.

    Raises:
        RequestRefused: `invalid_request`; the message names the field and the limit.
    """
    _check_sequences(path, request, limits)
    _check_schemas(request, limits)
    for name in ("messages", "input"):
        _check_media(request.get(name), name, limits)


def check_forbidden(request: Mapping[str, Any], limits: RequestLimits) -> None:
    kwargs = request.get("chat_template_kwargs")
    own_template = isinstance(kwargs, dict) and "chat_template" in kwargs
    if own_template and "chat_template" not in limits.allowed_fields:
        place = "chat_template_kwargs.chat_template"
        raise invalid("Custom chat templates are not allowed here.", place)
    if request.get("priority"):
        advice = "Set the priority with the header x-hermes-class or with service_tier."
        raise invalid(advice, "priority")


def _check_sequences(path: str, request: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check how many answers an engine would write at a time, or how many texts it would embed."""
    prompts = 1
    if path == "/v1/completions":
        prompts = prompts_in(request.get("prompt"))
    elif path == "/v1/embeddings":
        inputs = prompts_in(request.get("input", request.get("messages")))
        if inputs > limits.max_inputs:
            raise too_many("texts", limits.max_inputs, "input")
    count = request.get("n")
    each = count if isinstance(count, int) else 1
    if prompts * each > limits.max_sequences:
        message = f"{prompts} prompts times n={each} are more than {limits.max_sequences} answers."
        raise invalid(message, "n" if each > 1 else "prompt")
    if request.get("use_beam_search"):
        if not limits.max_beams:
            raise invalid("Beam search is not allowed here.", "use_beam_search")
        if each > limits.max_beams:
            raise invalid(f"A beam search may have 'n' up to {limits.max_beams} here.", "n")


def _check_schemas(request: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check JSON schemas wherever a request may contain one, and similar inputs of templates and
    grammars.
    """
    size = 0
    for name in _SCHEMAS:
        value = request.get(name)
        if isinstance(value, dict | list):
            _check_schema(value, name, limits, limits.max_schema_depth + _SCHEMA_WRAPPER_DEPTH)
            size += len(msgspec.json.encode(value))
    structured = request.get("structured_outputs")
    inner = structured if isinstance(structured, dict) else {}
    texts = {f"structured_outputs.{name}": inner.get(name) for name in ("json", "structural_tag")}
    for name, text in texts.items():
        if isinstance(text, str):
            size += len(text)
            if size <= limits.max_schema_bytes:
                _check_schema(_decoded(text), name, limits, limits.max_schema_depth)
    if size > limits.max_schema_bytes:
        raise invalid(
            f"The tools and JSON schemas of the request are {size} bytes long; at most "
            f"{limits.max_schema_bytes} are allowed.",
            next(name for name in _SCHEMAS if name in request),
        )


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None  # the engine's server reports what is wrong with it


def _check_schema(value: Any, place: str, limits: RequestLimits, levels: int) -> None:
    if levels <= 0:
        raise too_many(
            "levels of nested lists and objects in a schema", limits.max_schema_depth, place
        )
    if isinstance(value, dict):
        pattern = value.get("pattern")
        if isinstance(pattern, str):
            if len(pattern) > limits.max_regex_chars:
                raise invalid(
                    f"A pattern in '{place}' is longer than {limits.max_regex_chars} characters.",
                    place,
                )
            check_repeats(pattern, place, limits.max_repeats)
        for name in _COUNTS & value.keys():
            count = value[name]
            # One of vLLM's backends unrolls repeats.
            if isinstance(count, int | float) and count > limits.max_repeats:
                raise too_many(f"repeats ({name})", limits.max_repeats, place)
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        if isinstance(item, dict | list):
            _check_schema(item, place, limits, levels - 1)


def _check_media(value: Any, field: str, limits: RequestLimits) -> None:
    """Allow the engine's server to fetch only from the hosts that the settings list."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list):
                _check_media(item, field, limits)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in _MEDIA:
                url = item.get("url") if isinstance(item, dict) else item
                if isinstance(url, str) and url:
                    _check_url(url, f"{field}.{key}", limits)
            elif isinstance(item, dict | list):
                _check_media(item, field, limits)


def _check_url(url: str, place: str, limits: RequestLimits) -> None:
    if url[:5].lower() != "data:" and (host := _host(url)) not in limits.media_domains:
        raise invalid(
            f"Media from '{host[:100] or url[:40]}' cannot be fetched here; send them as a data: "
            "URL.",
            place,
        )


def _host(url: str) -> str:
    """The host of an http(s) URL that all parsers read alike; empty for any other URL."""
    if not url.isascii() or not url.isprintable() or any(char in url for char in " \\@"):
        return ""
    try:
        parts = urlsplit(url)
        return parts.hostname or "" if parts.scheme in ("http", "https") else ""
    except ValueError:
        return ""
