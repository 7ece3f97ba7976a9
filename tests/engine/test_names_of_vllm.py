"""The names of the pinned vLLM: its arguments and what its parser refuses, and the fields of
requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import response_create_params as responses
from openai.types.responses.input_token_count_params import InputTokenCountParams
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.contract import INPUT_TOKENS, RESPONSES
from serve_app.errors import SettingsError
from serve_app.ingress.validation.bodies import INFERENCE_PATHS
from serve_app.ingress.validation.fields import OF_VLLM, WITHOUT_EFFECT
from serve_app.settings import Settings
from serve_app.settings.limits import HARMFUL_FIELDS
from serve_app.settings.vllm_names import WITH_MEANING, WITHOUT_MEANING
from tests.tables import each
from workers.vllm_arguments import engine_arguments


def test_every_argument_of_vllm_is_known() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    assert {action.dest for action in parser._actions} == WITH_MEANING | WITHOUT_MEANING.keys()


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


OPENAIS: dict[str, type[Any]] = {
    "/v1/chat/completions": chat.CompletionCreateParamsBase,
    "/v1/completions": completions.CompletionCreateParamsBase,
    RESPONSES: responses.ResponseCreateParamsBase,
    INPUT_TOKENS: InputTokenCountParams,
    "/v1/embeddings": EmbeddingCreateParams,
}
READ_HERE = {"model", "prompt_cache_key", "service_tier", "user"}


def fields_of(kind: Any) -> Iterator[str]:
    """The names of a model's fields, or of those of each member of a union."""
    for member in get_args(kind):
        yield from fields_of(member)
    for name, field in getattr(kind, "model_fields", {}).items():
        yield from {name, field.alias or name, field.validation_alias or name}


def test_every_field_of_vllms_requests_is_known_or_forbidden() -> None:
    """A name that is new here has to be judged: what can a client reach with it?"""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    found: dict[str, set[str]] = {}
    for tasks in (("generate",), ("embed",)):
        model: Any = SimpleNamespace(get_pooling_task=lambda tasks: tasks[0])
        for route in build_app(args, tasks, model).routes:
            if (path := getattr(route, "path", "")) in INFERENCE_PATHS:
                kinds = [one.field_info.annotation for one in route.dependant.body_params]
                found[path] = {name for kind in kinds for name in fields_of(kind)}
    assert found.keys() == {*INFERENCE_PATHS} - {INPUT_TOKENS}, "which is ours"
    for path, names in found.items():
        read_here = READ_HERE | ({"metadata", "store"} if "messages" in names else set())
        assert names - {*HARMFUL_FIELDS} | read_here >= OF_VLLM[path], path
        assert names - {*HARMFUL_FIELDS} | READ_HERE <= OF_VLLM[path], path


def test_every_field_that_openai_documents_is_taken() -> None:
    found = {
        path: {"stream", *kind.__annotations__} - OF_VLLM[path] for path, kind in OPENAIS.items()
    }
    assert found == WITHOUT_EFFECT


def test_a_chat_template_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    args = {"chat_template": str(tmp_path / "chat.jinja")}
    with pytest.raises(SettingsError, match=r"^settings: engine\.args: .*chat\.jinja"):
        engine_arguments(Settings.model_validate({"engine": {"args": args}}))
