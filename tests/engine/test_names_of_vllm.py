"""The arguments of the pinned vLLM: the lists of their names, and what its parser refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.errors import SettingsError
from serve_app.settings import Settings
from serve_app.settings.vllm_names import WITH_MEANING, WITHOUT_MEANING
from workers.vllm_arguments import engine_arguments


def test_every_argument_of_vllm_is_known() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    assert {action.dest for action in parser._actions} == WITH_MEANING | WITHOUT_MEANING.keys()


def test_a_chat_template_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    args = {"chat_template": str(tmp_path / "chat.jinja")}
    with pytest.raises(SettingsError, match=r"^settings: engine\.args: .*chat\.jinja"):
        engine_arguments(Settings.model_validate({"engine": {"args": args}}))
