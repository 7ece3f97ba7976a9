"""Makes ids and times in a response deterministic, so that every attempt produces the same bytes.

vLLM's serving layer takes `created` from `time.time()`, and item ids (`msg_…`, `rs_…`, `call_…`)
from `random_uuid()`, which its modules import by name. This module replaces both in the modules
that create responses; outside of a recorded request they behave as before. The items of a response
(`/v1/responses`) carry its request's id.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from serve_app.contract import item_name
from workers.recorder import current

_RESPONSES = "vllm.entrypoints.openai.responses"
_PACKAGES = (
    "vllm.entrypoints.openai",
    "vllm.entrypoints.mcp",
    "vllm.entrypoints.pooling",
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
        recorder = current.get()
        return time.time() if recorder is None else recorder.created_s


def install() -> int:
    """Replace both in every module loaded so far; returns the number of replacements."""
    from vllm.utils import random_uuid

    def equal_uuid() -> str:
        recorder = current.get()
        return random_uuid() if recorder is None else recorder.next_value().hex()[:16]

    def equal_item() -> str:
        recorder, value = current.get(), equal_uuid()
        # 0.2.0 named items by the value alone; a client may have seen such a name.
        if recorder is None or b'_%b"' % value.encode() in recorder.recorded.body:
            return value
        return item_name(value, recorder.request_id)

    clock = _Clock()
    found = 0
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES):
            names = vars(module)
            if names.get("random_uuid") is random_uuid:
                of_items = name.startswith(_RESPONSES)
                module.random_uuid = equal_item if of_items else equal_uuid  # type: ignore[attr-defined]
                found += 1
            if names.get("time") is time:
                module.time = clock  # type: ignore[attr-defined]
                found += 1
    return found
