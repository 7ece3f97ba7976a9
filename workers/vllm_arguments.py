"""The settings as arguments of vLLM's own server."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NoReturn

import msgspec

from serve_app.errors import SettingsError
from serve_app.settings import Settings

_GRAMMARS = "xgrammar"
"""The backend for structured outputs, and the only one that knows what vLLM forces tool calls with.
With vLLM's `auto` the first such request of an engine decides which one it uses, and the backends
write different texts.
"""
_NO_DOMAIN = "no-domain.invalid"
"""Allows no domain; vLLM treats an empty list as every domain."""


def engine_arguments(settings: Settings) -> Namespace:
    """The settings as arguments of vLLM's own server, validated by vLLM's parser.

    Raises:
        SettingsError: one line that names the setting.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.exceptions import VLLMClientError
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise SettingsError(f"settings: engine.args: {message}")

    parser = make_arg_parser(Parser())
    own = {key.replace("-", "_"): value for key, value in settings.engine.args.items()}
    given = {
        "model": settings.model.path,
        "served_model_name": [settings.model.name],
        "tensor_parallel_size": settings.workers.tensor_parallel_size,
        "max_num_seqs": settings.workers.max_running_requests,
        "scheduling_policy": "priority",
        "max_logprobs": settings.limits.max_logprobs,
        "allowed_media_domains": settings.limits.media_domains or [_NO_DOMAIN],
        "otlp_traces_endpoint": settings.telemetry.traces_endpoint or None,
        **own,
    }
    structured = own.get("structured_outputs_config") or {}
    if isinstance(structured, dict):
        given["structured_outputs_config"] = {"backend": _GRAMMARS, **structured}
    actions = {action.dest: action for action in parser._actions}
    words: list[str] = []
    for key, value in given.items():
        if key not in actions:  # of another version of vLLM
            raise SettingsError(f"settings: engine.args.{key} is no argument of this vLLM")
        words += _as_words(key, value)
    args: Namespace = parser.parse_args(words)
    try:
        validate_parsed_serve_args(args)
        _check_parsers(args)
    except (TypeError, ValueError, VLLMClientError) as error:
        raise SettingsError(f"settings: engine.args: {error}") from None
    return args


def _check_parsers(args: Namespace) -> None:
    """As vLLM's server does before it starts."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    kinds = (
        ("tool_call_parser", args.tool_parser_plugin, ToolParserManager),
        ("reasoning_parser", args.reasoning_parser_plugin, ReasoningParserManager),
    )
    for name, plugin, manager in kinds:
        wanted, known = getattr(args, name), sorted(manager.list_registered())
        if wanted and not plugin and wanted not in known:  # a plug-in registers others
            known_ones = ", ".join(known)
            raise ValueError(f"{name} is '{wanted}', which vLLM does not know: use {known_ones}")


def _as_words(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + key.replace("_", "-")]
    return [flag, *map(_as_word, value if isinstance(value, list) else [value])]


def _as_word(value: Any) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)
