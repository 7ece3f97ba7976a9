"""No module that makes answers keeps a clock or random names of its own."""

from __future__ import annotations

import ast
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.utils import random_uuid

from workers import determinism

SERVERS = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.pooling.embed.serving",
    "vllm.entrypoints.pooling.pooling.serving",
)
SERVED = ("vllm.entrypoints.openai.", "vllm.entrypoints.pooling.")


def reads(source: str) -> set[str]:
    """`time.time` and `random_uuid`, where a module calls them."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {ast.unparse(call) for call in calls} & {"time.time", "random_uuid"}


def test_every_answer_gets_its_time_and_ids_from_its_request() -> None:
    for name in SERVERS:
        import_module(name)
    determinism.install()
    own = {"time.time": time, "random_uuid": random_uuid}
    kept = [
        f"{name}: {call}"
        for name, module in sorted(sys.modules.items())
        if name.startswith(SERVED)
        for call in reads(Path(str(module.__file__)).read_text())
        if getattr(module, call.partition(".")[0], None) is own[call]
    ]
    assert kept == []
