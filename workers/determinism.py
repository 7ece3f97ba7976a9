"""Makes ids and times in a response deterministic, so that every attempt produces the same bytes.

vLLM's serving layer takes `created` from `time.time()`, and item ids (`msg_…`, `rs_…`, `call_…`)
from `random_uuid()` or `random.choices()`, which its modules import by name. This module replaces
them in the modules that create responses, those that are imported later included; outside of a
recorded request they behave as before.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from vllm import utils

from serve_app.errors import SettingsError
from workers.recorder import current

_PACKAGES = (
    "vllm.entrypoints",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.renderers",
    "vllm.tool_parsers",
)
_random_uuid = utils.random_uuid


class _Clock:
    """The module `time`, with a different `time()` inside of a recorded request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        """The time of the request's admission."""
        recorder = current.get()
        return time.time() if recorder is None else recorder.created_s


def _equal_uuid() -> str:
    recorder = current.get()
    return _random_uuid() if recorder is None else recorder.next_value().hex()[:16]


def _equal_choices(*args: Any, **options: Any) -> list[Any]:
    recorder = current.get()
    chance = random if recorder is None else random.Random(recorder.next_value())
    return chance.choices(*args, **options)


_clock = _Clock()
_OURS = {
    id(_random_uuid): _equal_uuid,
    id(random.choices): _equal_choices,
    id(time): _clock,
    id(time.time): _clock.time,
}
_HAVE_OURS = (
    ("vllm.entrypoints.openai.chat_completion.serving", "time", _clock),
    ("vllm.entrypoints.openai.completion.serving", "time", _clock),
    ("vllm.entrypoints.openai.responses.serving", "time", _clock),
    ("vllm.entrypoints.openai.responses.streaming_events", "random_uuid", _equal_uuid),
    ("vllm.renderers.chat_utils", "random_uuid", _equal_uuid),
)
"""What vLLM 0.32 makes responses with: module, name in it, and what stands there afterwards."""


class _AfterImport(MetaPathFinder):
    """Replaces them in a module of vLLM's as soon as it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        spec = PathFinder.find_spec(name, path, target) if name.startswith(_PACKAGES) else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _replace(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace(module: ModuleType) -> None:
    for name, value in list(vars(module).items()):
        if id(value) in _OURS:
            setattr(module, name, _OURS[id(value)])


def install() -> None:
    """Replace them in every module, loaded or not."""
    utils.random_uuid = _equal_uuid
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES):
            _replace(module)
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def check() -> None:
    """Check that a running server takes its ids and times from here.

    Raises:
        SettingsError: this vLLM takes them from elsewhere.
    """
    for module, name, ours in _HAVE_OURS:
        if getattr(sys.modules.get(module), name, None) is not ours:
            raise SettingsError(
                f"this version of vLLM has no `{name}` in {module}, which makes its responses: "
                "another worker could not continue them; install the pinned version"
            )
