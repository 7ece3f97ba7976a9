"""What a response has of time and chance comes from one source, in modules that are loaded later,
too; and a worker that could not continue another's answer never becomes ready.
"""

from __future__ import annotations

import importlib
import re
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm import tool_parsers
from vllm.renderers import chat_utils

from serve_app.errors import SettingsError
from tests.engine.resume_helpers import EngineThread
from tests.tables import each
from workers import determinism
from workers.continuation import Continuation
from workers.recorder import Recorder, current
from workers.rehearsal import check_replay

MODEL = "hermes-tiny"
LATE = """
import random, time
from random import choices
from time import time as now
from vllm.utils import random_uuid

def values():
    return random_uuid(), time.time(), now(), choices("abcdefgh", k=9)
"""
SOURCES = re.compile(
    r"^[ \t]+(?:import time|from time|from random)\b|uuid[14]\(|\brandom\.(?!Random\()[a-z]+\("
    r"|urandom|secrets\.token|datetime\.now|time_ns|date\.today",
    re.MULTILINE,
)
ELSEWHERE = {
    # no path of this service
    "entrypoints/anthropic/serving.py",
    "entrypoints/serve/fault_tolerance/api_router.py",
    "entrypoints/serve/middleware/x_request_id.py",
    "entrypoints/speech_to_text/realtime/connection.py",
    # the prompts of gpt-oss, which the journal keeps
    "entrypoints/openai/parser/harmony_utils.py",
}


def test_every_answer_can_be_made_again(world: EngineThread) -> None:
    world.run(check_replay(world.engine, MODEL, logprobs=True))


def no_such_name(*_: object) -> None:
    raise AttributeError("private")


BREAKS: list[tuple[str, tuple[Any, str], Callable[..., Any]]] = [
    ("the time of its request", (determinism._Clock, "time"), lambda _: time.time()),
    ("differs from the journal", (Recorder, "next_value"), lambda _: secrets.token_bytes(16)),
    ("from the journal 500", (Continuation, "replay"), no_such_name),
]


@pytest.mark.parametrize(("why", "place", "broken"), BREAKS)
def test_a_seam_that_has_moved_is_found(
    world: EngineThread,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
    place: tuple[Any, str],
    broken: Callable[..., Any],
) -> None:
    monkeypatch.setattr(*place, broken)
    with pytest.raises(SettingsError, match=why):
        world.run(check_replay(world.engine, MODEL, logprobs=True))


def test_no_worker_becomes_ready_with_it(
    world: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Recorder, "next_value", lambda _: secrets.token_bytes(16))
        with pytest.raises(SettingsError, match="differs from the journal"):
            EngineThread(core=world)
    monkeypatch.setattr(chat_utils, "random_uuid", determinism._random_uuid)
    with pytest.raises(SettingsError, match=r"no `random_uuid` in vllm\.renderers"):
        determinism.check()


def test_a_module_that_is_imported_later_does_not_escape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    determinism.install()
    (tmp_path / "late.py").write_text(LATE)
    monkeypatch.setattr(tool_parsers, "__path__", [*tool_parsers.__path__, str(tmp_path)])
    late = importlib.import_module("vllm.tool_parsers.late")
    sys.modules.pop("vllm.tool_parsers.late")
    assert late.values() != late.values()
    outer = current.set(SimpleNamespace(created_s=5.0, next_value=lambda: b"x" * 16))  # type: ignore[arg-type]
    try:
        first, again = late.values(), late.values()
    finally:
        current.reset(outer)
    assert first == again
    assert first[1:3] == (5.0, 5.0)


@each("package", determinism._PACKAGES)
def test_vllm_makes_responses_with_no_other_source(package: str) -> None:
    """One that is new here has to be judged: is it in a response?"""
    root = Path(vllm.__file__).parent
    folder = root / package.removeprefix("vllm.")
    files = [*folder.rglob("*.py")]
    assert files
    found = {str(file.relative_to(root)) for file in files if SOURCES.search(file.read_text())}
    assert found <= ELSEWHERE
