"""What a response has of time and chance comes from one source, in modules that are loaded later,
too.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from vllm import tool_parsers
from vllm.renderers import chat_utils

from serve_app.errors import SettingsError
from tests.tables import each
from workers import determinism
from workers.recorder import current

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


def test_a_name_that_is_not_ours_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_utils, "random_uuid", determinism._random_uuid)
    monkeypatch.setattr(determinism, "_HAVE_OURS", determinism._HAVE_OURS[-1:])
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
