"""Makes ids and times in a response deterministic, so that every attempt produces the same bytes.

vLLM's serving layer takes `created` from `time.time()`, and item ids (`msg_…`, `rs_…`, `call_…`)
from `random_uuid()`, which its modules import by name, some only when a request first needs them;
signatures of messages come from `uuid.uuid4()`, ids of Mistral's tool calls from `random.choices`.
All are replaced, `random_uuid` at its source, too; outside of a recorded request, and for what
makes no answers, they are as before.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from serve_app.contract import item_name
from workers.attempt import current
from workers.engine_plugin import wrap

_RESPONSES = "vllm.entrypoints.openai.responses"
_PACKAGES = (
    "vllm.entrypoints.openai",
    "vllm.entrypoints.anthropic",
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


class _Ids:
    """The module `uuid`, with a different `uuid4()` inside of a recorded request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(uuid, name)

    def uuid4(self) -> uuid.UUID:
        attempt = current.get()
        return uuid.uuid4() if attempt is None else uuid.UUID(bytes=attempt.next_value())


class _Clock:
    """The module `time`, with a different `time()` inside of a recorded request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        attempt = current.get()
        return time.time() if attempt is None else attempt.created_s


def install() -> int:
    """Replace them in every module loaded so far, and in those that vLLM loads later. Returns how
    many names have been replaced, now or before; none is an error, because ids would be random.
    """
    import vllm.utils

    wrap(vllm.utils, "random_uuid", _equal_uuid)
    if _TEKKEN in sys.modules:  # it takes two seconds, and only that tokenizer needs it
        import_module(_OF_MISTRAL)
    ours = vllm.utils.random_uuid
    pairs = {
        "random_uuid": (ours.__wrapped__, ours),
        "time": (time, _clock),
        "uuid": (uuid, _ids),
        "choices": (random.choices, _equal_choices),
    }
    found = dict.fromkeys(pairs, 0)
    for module in [one for name, one in sys.modules.items() if name.startswith(_PACKAGES)]:
        for name, (original, replaced) in pairs.items():
            if vars(module).get(name) is original:
                setattr(module, name, replaced)
            found[name] += vars(module).get(name) is replaced
    if not (found["random_uuid"] and found["time"]):
        raise RuntimeError(f"vLLM takes ids and times from elsewhere: {found}")
    return sum(found.values())


_clock, _ids = _Clock(), _Ids()


def _equal_uuid(random_uuid: Any) -> str:
    """Whoever calls it decides: others than those that make answers need ids of each attempt."""
    attempt = current.get()
    caller = sys._getframe(2).f_globals.get("__name__", "")  # behind `wrap`
    if attempt is None or not caller.startswith(_PACKAGES):
        return str(random_uuid())
    value = attempt.next_value().hex()[:16]
    of_item = caller.startswith(_RESPONSES)
    return item_name(value, attempt.request_id) if of_item else value


def id_of_item(kind: str) -> str:
    """The id of an item that is not vLLM's."""
    attempt = current.get()
    assert attempt is not None, "it is an answer's"
    return f"{kind}_{item_name(attempt.next_value().hex()[:16], attempt.request_id)}"


def _equal_choices(population: Sequence[str], *, k: int) -> list[str]:
    """`random.choices` of up to 16, without weights."""
    attempt = current.get()
    if attempt is None:
        return random.choices(population, k=k)
    return [population[byte % len(population)] for byte in attempt.next_value()[:k]]
