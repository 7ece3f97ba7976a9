"""Makes ids and times in a response deterministic, so that every attempt produces the same bytes.

vLLM's serving layer takes `created` from `time.time()`, and item ids (`msg_…`, `rs_…`, `call_…`)
from `random_uuid()`, which its modules import by name. This module replaces both in the modules
that create responses; outside of a recorded request they behave as before.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from workers.recorder import current

_PACKAGES = (
    "vllm.entrypoints.openai",
    "vllm.entrypoints.mcp",
    "vllm.entrypoints.chat_utils",
    "vllm.parser",
    "vllm.renderers",
    "vllm.tool_parsers",
    "vllm.reasoning",
)


class _Clock:
    """The module `time`, with a different `time()` inside of a recorded request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        """The time of the request's admission."""
        recorder = current.get()
        return time.time() if recorder is None else recorder.created_s


def install() -> int:
    """Replace both in every module loaded so far; returns the number of replacements."""
    from vllm.utils import random_uuid

    def equal_uuid() -> str:
        recorder = current.get()
        return random_uuid() if recorder is None else recorder.next_value().hex()[:16]

    clock = _Clock()
    found = 0
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES):
            names = vars(module)
            if names.get("random_uuid") is random_uuid:
                module.random_uuid = equal_uuid  # type: ignore[attr-defined]
                found += 1
            if names.get("time") is time:
                module.time = clock  # type: ignore[attr-defined]
                found += 1
    return found
