"""Makes ids and times in a response deterministic, so that every attempt produces the same bytes.

vLLM's serving layer takes `created` from `time.time()`, and item ids (`msg_…`, `rs_…`, `call_…`)
from `random_uuid()`, which its modules import by name, some of them only when a request first
needs them; ids of Mistral's tool calls come from `random.choices`. This module replaces all of
these, `random_uuid` where it is imported from too; outside of a recorded request, and for what
does not make answers, they are as before. The items of a response (`/v1/responses`) carry its
request's id.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from serve_app.contract import item_name
from workers.attempt import current

_RESPONSES = "vllm.entrypoints.openai.responses"
_PACKAGES = (
    "vllm.entrypoints.openai",
    "vllm.entrypoints.mcp",
    "vllm.entrypoints.pooling",
    "vllm.parser",
    "vllm.renderers",
    "vllm.tool_parsers",
    "vllm.reasoning",
)
"""What makes answers. A module of these that reads a clock is loaded when the engine has started;
`tests/engine/test_determinism.py` looks for others.
"""
_TEKKEN, _OF_MISTRAL = "vllm.tokenizers.mistral", "vllm.parser.mistral"


class _Clock:
    """The module `time`, with a different `time()` inside of a recorded request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        recorder = current.get()
        return time.time() if recorder is None else recorder.created_s


def install() -> int:
    """Replace them in every module loaded so far, and in those that vLLM loads later. Returns how
    many names have been replaced, now or before.

    Raises:
        RuntimeError: vLLM has neither of them where this looks, so ids would be random.
    """
    import vllm.utils

    own = vllm.utils.random_uuid
    if not hasattr(own, "__wrapped__"):
        vllm.utils.random_uuid = _equal_uuid(own)
    if _TEKKEN in sys.modules:  # it takes two seconds, and only that tokenizer needs it
        import_module(_OF_MISTRAL)
    ours = vllm.utils.random_uuid
    replaced = {"random_uuid": ours, "time": _clock, "choices": _equal_choices}
    originals = {"random_uuid": ours.__wrapped__, "time": time, "choices": random.choices}
    found = dict.fromkeys(replaced, 0)
    for module in [one for name, one in sys.modules.items() if name.startswith(_PACKAGES)]:
        for name, original in originals.items():
            if vars(module).get(name) is original:
                setattr(module, name, replaced[name])
            found[name] += vars(module).get(name) is replaced[name]
    if not (found["random_uuid"] and found["time"]):
        raise RuntimeError(f"vLLM takes ids and times from elsewhere: {found}")
    return sum(found.values())


_clock = _Clock()


def _equal_uuid(random_uuid: Any) -> Any:
    """Whoever calls it decides: others than those that make answers need ids of each attempt."""

    @functools.wraps(random_uuid)
    def equal() -> str:
        recorder = current.get()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if recorder is None or not caller.startswith(_PACKAGES):
            return str(random_uuid())
        value = recorder.next_value().hex()[:16]
        # 0.2.0 named items by the value alone; a client may have seen such a name.
        of_item = caller.startswith(_RESPONSES)
        if not of_item or b'_%b"' % value.encode() in recorder.recorded.body:
            return value
        return item_name(value, recorder.request_id)

    return equal


def _equal_choices(population: Sequence[str], *, k: int) -> list[str]:
    """`random.choices` of up to 16, without weights."""
    recorder = current.get()
    if recorder is None:
        return random.choices(population, k=k)
    return [population[byte % len(population)] for byte in recorder.next_value()[:k]]
