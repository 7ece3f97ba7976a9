"""The names of the pinned vLLM: its arguments and what its parser refuses, and the fields of
requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.vllm_schema import dumped, written
from serve_app.errors import SettingsError
from serve_app.settings import Settings
from serve_app.settings.vllm_names import DATA, VLLM
from tests.tables import each
from workers.vllm_engine import engine_arguments


def test_the_table_of_names_is_that_of_the_installed_vllm() -> None:
    """Whoever upgrades vLLM writes it again (`python -m scripts.vllm_schema`) and judges each line
    that is new: what can a client reach with this field? What does this argument mean here?
    """
    assert dumped() == VLLM
    assert DATA.read_text() == written(VLLM)


@each(
    "args, words",
    [
        ({"tool_call_parser": "hermess"}, "hermes, "),
        ({"tool_call_parser": "hermess", "enable_auto_tool_choice": True}, "hermes, "),
        ({"reasoning-parser": "zzzz"}, "reasoning_parser is 'zzzz', which vLLM does not know"),
    ],
)
def test_a_parser_that_vllm_does_not_know_is_refused(args: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=r"^settings: engine\.args: ") as refused:
        engine_arguments(Settings.model_validate({"engine": {"args": args}}))
    assert words in str(refused.value)


def test_a_chat_template_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    args = {"chat_template": str(tmp_path / "chat.jinja")}
    with pytest.raises(SettingsError, match=r"^settings: engine\.args: .*chat\.jinja"):
        engine_arguments(Settings.model_validate({"engine": {"args": args}}))
