"""What of vLLM has no meaning here is refused by name, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.errors import SettingsError
from serve_app.settings import Settings, load_settings
from serve_app.settings.sections import FORMS
from serve_app.settings.vllm_names import HARMFUL_VARIABLES, WITH_MEANING, WITHOUT_MEANING
from tests.tables import each
from workers.vllm_engine import _as_words


def refusal(args: dict[str, Any], environment: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(args, environment or {})
    return str(caught.value)


@each("name", WITHOUT_MEANING)
def test_an_argument_without_a_meaning_is_refused(name: str) -> None:
    for spelled in (name, name.replace("_", "-")):
        message = refusal({"engine": {"args": {spelled: "x"}}})
        assert message.startswith(f"settings: engine.args.{spelled} ")
        assert "remove it" in message or "write them here" in message
        assert "\n" not in message


@each("name", HARMFUL_VARIABLES)
def test_a_variable_that_would_harm_is_refused(name: str) -> None:
    assert refusal({}, {"PATH": "/bin", name: "x"}).startswith(f"settings: the variable {name} ")


@each(
    "args, words",
    [
        ({"api_key": ["k"]}, "hermes-serve api-key"),
        ({"lora_modules": [{"name": "a", "path": "/a"}]}, "adapter merged into it"),
        ({"max_modle_len": 1}, "did you mean 'max_model_len'?"),
        ({"zzzz": 1}, "is no argument of vLLM"),
        ({"chat_template": "chat.jinja"}, "takes the full path"),
        ({"chat_template": {"a": 1}}, "takes the full path"),
        ({"data_parallel_size": 2}, "set workers.replicas"),
        ({"data-parallel-size-local": "2"}, "set workers.replicas"),
        ({"gpu_memory_utilization": 90}, "90 % is 0.9"),
        ({"gpu-memory-utilization": 0}, "90 % is 0.9"),
        ({"gpu_memory_utilization": "90%"}, "90 % is 0.9"),
        ({"gpu_memory_utilization": True}, "90 % is 0.9"),
    ],
)
def test_the_sentence_says_what_to_do(args: dict[str, Any], words: str) -> None:
    assert words in refusal({"engine": {"args": args}})


def test_what_means_something_is_taken() -> None:
    for template in ("/models/chat.jinja", "{{ messages }}", "template_chatml.jinja", None):
        args: dict[str, Any] = {"chat_template": template, "max-model-len": "8k"}
        args |= {"enable_lora": True, "data_parallel_size": 1, "gpu_memory_utilization": "0.9"}
        assert load_settings({"engine": {"args": args}}, {}).engine.args == args
    simulated = {"engine": {"kind": "simulated", "args": {"tokens_per_s": 5}}}
    assert load_settings(simulated, {"VLLM_DP_SIZE": "2"}).engine.kind == "simulated"


@each(
    "source",
    [
        "https://huggingface.co/Qwen/Qwen3-0.6B",
        "http://localhost/model",
        "huggingface.co/Qwen/Qwen3-0.6B",
        "hf://Qwen/Qwen3-0.6B",
        "Qwen//Qwen3-0.6B",
    ],
)
def test_a_models_web_address_is_no_hub_id(source: str) -> None:
    told = refusal({"model": {"source": source}})
    assert "'model.source'" in told
    assert "a hub id (organisation/model, no URL)" in told
    for good in ("Qwen/Qwen3-0.6B", "gpt2", "/models/x/y", "s3://bucket/a/b", "o/m:Q4_K_M"):
        assert load_settings({"model": {"source": good}}, {}).model.source == good


def test_no_argument_is_in_both_lists() -> None:
    assert not WITHOUT_MEANING.keys() & WITH_MEANING


def patterns(node: Any) -> set[str]:
    if isinstance(node, list):
        return {one for item in node for one in patterns(item)}
    if not isinstance(node, dict):
        return set()
    own = {node["pattern"]} if isinstance(node.get("pattern"), str) else set()
    return own | {one for item in node.values() for one in patterns(item)}


def test_every_pattern_has_words() -> None:
    assert patterns(Settings.model_json_schema()) == FORMS.keys()


def test_a_mapping_is_json_also_in_a_list() -> None:
    # As vLLM documents its arguments in YAML.
    words = ["--some-list", '{"name":"a"}', "b=c", "7"]
    assert _as_words("some_list", [{"name": "a"}, "b=c", 7]) == words


@each("value", ["3", True, 2.5, [2], "1e3"])
def test_no_text_is_a_number(value: object) -> None:
    assert "'workers.replicas'" in refusal({"workers": {"replicas": value}})


def test_a_whole_number_may_have_a_point() -> None:
    assert load_settings({"workers": {"replicas": 2.0}}, {}).workers.replicas == 2
