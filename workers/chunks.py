"""Writes the usual chunks of vLLM's streams without pydantic: equal bytes in a fifth of its time.

vLLM's serving layer builds two or three pydantic models for every chunk of a chat or a completion.
The names of their classes in its modules are replaced by functions that return a stand-in, which
msgspec writes. A parser's delta and the usage in a chunk stay vLLM's. For whatever is unusual (log
probabilities, ids of tokens, tool calls, an argument that is not known here) the functions return
an instance of vLLM's own class.

Answers are continued by their bytes, so these may never differ: `tests/engine/test_chunks.py`
compares both for the version of vLLM that is pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec
from msgspec import UNSET


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


def install(app: Any) -> None:
    """Replace the classes in the serving modules of the app's chats and completions."""
    for name, stand_ins in _MODULES.items():
        if getattr(app.state, f"openai_serving_{name.removesuffix('_completion')}", None) is None:
            continue
        module = import_module(f"vllm.entrypoints.openai.{name}.serving")
        for kind in stand_ins:
            own = getattr(module, kind.__name__)
            if not hasattr(own, "__wrapped__"):
                _own[kind] = own
                setattr(module, kind.__name__, _in_place_of(own, kind))
