"""Writes the usual chunks of vLLM's streams without pydantic: equal bytes in a fifth of its time.

vLLM's serving layer builds two or three pydantic models for every chunk of a chat or a completion.
The names of their classes in its modules are replaced by functions that return a stand-in, which
msgspec writes. A parser's delta and the usage in a chunk stay vLLM's. For whatever is unusual (log
probabilities, ids of tokens, tool calls, an argument that is not known here) the functions return
an instance of vLLM's own class.

Answers are continued by their bytes, so these may never differ: an engine that starts has vLLM's
serving layer write a few streams both ways, and keeps vLLM's classes on any difference or error.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
from msgspec import UNSET

log = logging.getLogger("hermes.worker")


class _StandIn(msgspec.Struct, gc=False):
    """For the class of this name, with its fields in their order. A field that was not given stays
    out, as with `exclude_unset`.
    """

    def plain(self) -> bool:
        """Whether vLLM's class would take these values as they are."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(_vllms(self), name)


_own: dict[type[_StandIn], Any] = {}
"""vLLM's class for each."""


class DeltaMessage(_StandIn):
    role: Any = UNSET
    content: Any = UNSET

    def plain(self) -> bool:
        return type(self.content) is str and (self.role is UNSET or type(self.role) is str)


class ChatCompletionResponseStreamChoice(_StandIn):
    index: Any
    delta: Any
    logprobs: Any
    finish_reason: Any
    stop_reason: Any = UNSET
    token_ids: Any = UNSET

    tool_calls = ()
    """`maybe_filter_parallel_tool_calls` takes what is not vLLM's choice for a delta."""

    def plain(self) -> bool:
        delta = self.delta
        known = type(delta) is DeltaMessage or (
            type(delta) is _own[DeltaMessage] and not delta.tool_calls
        )
        return known and self.logprobs is None and not self.token_ids


class CompletionResponseStreamChoice(_StandIn):
    index: Any
    text: Any
    logprobs: Any
    finish_reason: Any
    stop_reason: Any = UNSET
    prompt_token_ids: Any = UNSET
    token_ids: Any = UNSET

    def plain(self) -> bool:
        more = self.logprobs is not None or self.prompt_token_ids or self.token_ids
        return not more and type(self.text) is str


class CompletionStreamResponse(_StandIn):
    id: Any
    object: Any
    created: Any
    model: Any
    choices: Any
    usage: Any = UNSET
    system_fingerprint: Any = UNSET

    def plain(self) -> bool:
        return len(self.choices) == 1 and type(self.choices[0]) in _own

    def model_dump_json(self, **how: Any) -> str:
        if how == {"exclude_unset": True}:
            try:
                return _encode(self).decode()
            except Exception:  # such as for a lone surrogate, which vLLM's class refuses
                pass
        return str(_vllms(self).model_dump_json(**how))


class ChatCompletionStreamResponse(CompletionStreamResponse):
    prompt_token_ids: Any = UNSET
    prompt_text: Any = UNSET

    def plain(self) -> bool:
        return not (self.prompt_token_ids or self.prompt_text) and super().plain()


def _written(model: Any) -> msgspec.Raw:
    """A model of vLLM's in a stand-in."""
    return msgspec.Raw(model.model_dump_json(exclude_unset=True).encode())


_encode = msgspec.json.Encoder(enc_hook=_written).encode


def _vllms(one: Any) -> Any:
    """What vLLM's class makes of a stand-in's arguments; other values as they are."""
    if isinstance(one, list):
        return [_vllms(item) for item in one]
    if (own := _own.get(type(one))) is None:
        return one
    given = {name: getattr(one, name) for name in one.__struct_fields__}
    return own(**{k: _vllms(v) for k, v in given.items() if v is not UNSET})


def _in_place_of(own: Any, stand_in: type[_StandIn]) -> Callable[..., Any]:
    def make(**given: Any) -> Any:
        try:
            one = stand_in(**given)
            if one.plain():
                return one
        except TypeError:  # an argument is not known, or missing
            pass
        return own(**{name: _vllms(value) for name, value in given.items()})

    make.__wrapped__ = own  # type: ignore[attr-defined]
    return make


# -- at the engine's start ------------------------------------------------------------------------

_MODULES: dict[str, tuple[type[_StandIn], ...]] = {
    "chat_completion": (
        DeltaMessage,
        ChatCompletionResponseStreamChoice,
        ChatCompletionStreamResponse,
    ),
    "completion": (CompletionResponseStreamChoice, CompletionStreamResponse),
}
_TEXTS = ("The text", ' "\\/\n\x00\x7f\u2028é😀', "")
_SAMPLES: tuple[dict[str, Any], ...] = (
    {},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
)
_TIME = re.compile('"created":[0-9]+')


async def install(app: Any) -> None:
    """Replace the classes in the serving modules of the app's chats and completions."""
    for name, stand_ins in _MODULES.items():
        attribute = f"openai_serving_{name.removesuffix('_completion')}"
        if (serving := getattr(app.state, attribute, None)) is None:
            continue
        try:
            module = import_module(f"vllm.entrypoints.openai.{name}.serving")
            await _replace(module, stand_ins, partial(_sampled, module, serving))
        except Exception as error:
            log.warning("chunks_of_vllm_kept api=%s error=%r", name, error)


async def _replace(module: Any, stand_ins: tuple[type[_StandIn], ...], sampled: Any) -> None:
    """Replace the classes, or keep them.

    Raises:
        Exception: whatever was wrong, so that they are kept.
    """
    found = {kind: getattr(module, kind.__name__) for kind in stand_ins}
    own = {kind: getattr(one, "__wrapped__", one) for kind, one in found.items()}
    try:
        for kind in stand_ins:
            setattr(module, kind.__name__, own[kind])
        expected = await sampled()
        _own.update(own)
        for kind in stand_ins:
            setattr(module, kind.__name__, _in_place_of(own[kind], kind))
        if different := set(await sampled()) ^ set(expected):
            raise ValueError(f"not the same bytes: {sorted(different)}")
    except Exception:
        for kind in stand_ins:
            setattr(module, kind.__name__, own[kind])
        raise


async def _sampled(module: Any, serving: Any) -> list[str]:
    """The events of a few streams, without their time."""
    serving = copy.copy(serving)
    serving.parser_cls, serving.request_logger = None, None
    serving.system_fingerprint = "vllm"
    events = [
        _TIME.sub("", event)
        for sample in _SAMPLES
        async for event in _stream(module, serving, {"model": "m", "stream": True, **sample})
    ]
    if _TEXTS[0] not in "".join(events) or any('"error":' in event for event in events):
        raise ValueError(f"vLLM does not write the samples: {events}")
    return events


def _stream(module: Any, serving: Any, fields: dict[str, Any]) -> AsyncIterator[str]:
    """A stream of vLLM's serving layer, without an engine."""
    metadata = module.RequestResponseMetadata(request_id="")
    stream: AsyncIterator[str]
    if hasattr(module, "CompletionRequest"):
        request = module.CompletionRequest(prompt="text", **fields)
        write = type(serving).completion_stream_generator
        results = ((0, output) async for output in _outputs())
        stream = write(serving, request, [], results, "id", 1, "m", 1, None, metadata)
    else:
        fields |= {"messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": False}
        request = module.ChatCompletionRequest(**fields)
        write = type(serving).chat_completion_stream_generator
        stream = write(serving, request, _outputs(), "id", "m", [], None, metadata)
    return stream


async def _outputs() -> AsyncIterator[Any]:
    from vllm.outputs import CompletionOutput, RequestOutput

    for token, text in enumerate(_TEXTS):
        last = text is _TEXTS[-1]
        item = CompletionOutput(0, text, [token], None, None)
        if last:
            item.finish_reason, item.stop_reason = "stop", 7
        yield RequestOutput("", "prompt", [1], None, [item], last)
