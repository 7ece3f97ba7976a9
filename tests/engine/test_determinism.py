"""No module that makes answers keeps a clock or random names of its own."""

from __future__ import annotations

import ast
import sys
import time
import uuid
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import vllm.utils

from serve_app.clock import RedisClock
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import AttemptFacts, RequestFacts
from serve_app.observability.metrics import Telemetry
from tests.tables import each
from workers import determinism
from workers.attempt import Attempt, current

SERVERS = (
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.entrypoints.pooling.embed.serving",
    "vllm.entrypoints.pooling.pooling.serving",
)
SERVED = tuple(f"vllm.entrypoints.{name}." for name in ("anthropic", "openai", "pooling"))
PLACES = (
    *("parser", "tool_parsers", "reasoning", "renderers"),
    *("entrypoints/anthropic", "entrypoints/openai"),
)
CHANCE = {"random", "secrets", "uuid", "time"}
"""Modules of Python that tell each attempt something else."""
LATER = "vllm.tool_parsers.step3_tool_parser"
"""What vLLM loads with the first request of a model that needs it."""
NOT_SERVED = {"entrypoints/openai/chat_completion/batch_serving.py: time.time"}


def reads(source: str) -> set[str]:
    """`time.time` and `random_uuid`, where a module calls them, and other such functions."""
    tree = ast.parse(source)
    chosen = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in CHANCE
        for alias in node.names
    }
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    known = {call for call in calls if call.partition(".")[0] in CHANCE and "." in call}
    return (calls & ({"random_uuid"} | chosen)) | known - {"time.perf_counter", "time.monotonic"}


def attempt() -> Attempt:
    """Of an attempt at one request."""
    attempt = AttemptLog("req", "key", 1, b"nonce", "", lambda _: None)
    facts = RequestFacts("standard", "t", "s", "m", True, 1, 2, "")
    return Attempt(attempt, facts, AttemptFacts("r", "e", 1), Telemetry(), RedisClock())


def test_every_answer_gets_its_time_and_ids_from_its_request() -> None:
    for name in SERVERS:
        import_module(name)
    assert determinism.install() > len(SERVERS)
    random_uuid = vllm.utils.random_uuid.__wrapped__
    own = {"time.time": time, "uuid.uuid4": uuid, "random_uuid": random_uuid}
    kept = [
        f"{name}: {call}"
        for name, module in sorted(sys.modules.items())
        if name.startswith(SERVED)
        for call in reads(Path(str(module.__file__)).read_text())
        if getattr(module, call.partition(".")[0], None) is own[call]
    ]
    assert kept == []


@each(
    "name, function",
    [
        (LATER, "random_uuid"),
        ("vllm.renderers.chat_utils", "make_tool_call_id"),
        ("vllm.entrypoints.openai.responses.utils", "random_uuid"),
        ("vllm.parser.mistral", "MistralToolCall.generate_random_id"),
        ("vllm.entrypoints.anthropic.serving", "uuid.uuid4"),
    ],
)
async def test_a_name_is_equal_in_every_attempt_whenever_its_module_is_loaded(
    name: str, function: str
) -> None:
    import_module(SERVERS[0])
    import_module("vllm.tokenizers.mistral")  # as that of a model has been
    before = sys.modules.pop(LATER, None)
    determinism.install()
    module = import_module(name)
    if before is not None:
        sys.modules[LATER] = before
    made = []
    for _ in range(2):
        token = current.set(attempt())
        made.append([eval(f"{function}()", vars(module)) for _ in range(2)])
        current.reset(token)
    assert made[0] == made[1]
    assert len({*made[0], eval(f"{function}()", vars(module))}) == 3


async def test_an_engines_own_names_are_those_of_each_attempt() -> None:
    """An older attempt may still be in the same engine."""
    determinism.install()
    token = current.set(attempt())
    first, second = (vllm.utils.random_uuid() for _ in range(2))
    current.reset(token)
    assert first != second
    assert attempt().next_value().hex()[:16] not in (first, second)


def test_no_other_function_of_chance_and_no_other_clock_makes_answers() -> None:
    """A module's counts only if that is loaded with the servers: it is replaced there."""
    for name in SERVERS:
        import_module(name)
    root = Path(vllm.__path__[0])
    loaded = {getattr(module, "__file__", None) for module in sys.modules.values()}
    found = {
        f"{path.relative_to(root)}: {call}"
        for place in PLACES
        for path in (root / place).rglob("*.py")
        for call in reads(path.read_text())
        if call != "random_uuid"
        and not (call in ("time.time", "uuid.uuid4") and str(path) in loaded)
    }
    assert found - NOT_SERVED == {"parser/mistral.py: choices"}
