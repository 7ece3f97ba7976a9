"""Presets fill in what the configuration leaves out, and never more than that."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.errors import SettingsError
from serve_app.settings import Settings, load_settings
from serve_app.settings.presets import PRESETS
from serve_app.settings.workers import WorkerSettings
from tests.tables import each

VALUES = {
    "latency": (64, 8_192, 0.85, 16.0),
    "balanced": (256, 32_768, 0.90, 128.0),
    "throughput": (512, 65_536, 0.92, 384.0),
}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERMES_REDIS_URL", raising=False)


def load(preset: str | None, **sections: Any) -> Settings:
    return load_settings({"preset": preset, **sections})


def test_every_preset_has_its_values() -> None:
    assert set(PRESETS) == set(VALUES)
    for name, (sequences, tokens, memory, target) in VALUES.items():
        settings = load(name, workers={"device": "gpu", "autoscaling": {}})
        assert settings.workers.max_running_requests == sequences
        assert settings.engine.args == {
            "max_num_batched_tokens": tokens,
            "enable_prefix_caching": True,
            "max_model_len": -1,
            "gpu_memory_utilization": memory,
        }
        assert settings.workers.autoscaling is not None
        assert settings.workers.autoscaling.target_ongoing_requests == target


def test_without_a_preset_nothing_changes() -> None:
    given = {"workers": {"device": "gpu", "autoscaling": {}}, "engine": {"args": {"seed": 1}}}
    settings = load(None, **given)
    assert settings == load_settings(given)
    assert settings.engine.args == {"seed": 1}
    assert settings.workers.max_running_requests == WorkerSettings().max_running_requests


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_num_batched_tokens", 2048),
        ("max-num-batched-tokens", 2048),
        ("gpu-memory-utilization", 0.5),
        ("enable_prefix_caching", False),
        ("max_model_len", 4096),
    ],
)
def test_an_argument_of_the_operators_own_wins_in_either_spelling(key: str, value: Any) -> None:
    settings = load("balanced", workers={"device": "gpu"}, engine={"args": {key: value}})
    named = [
        name for name in settings.engine.args if name.replace("-", "_") == key.replace("-", "_")
    ]
    assert named == [key]
    assert settings.engine.args[key] == value
    assert len(settings.engine.args) == 4


def test_sizes_of_the_operators_own_win() -> None:
    workers = {"max_running_requests": 40, "autoscaling": {"target_ongoing_requests": 7}}
    settings = load("throughput", workers=workers)
    assert settings.workers.max_running_requests == 40
    assert settings.workers.autoscaling is not None
    assert settings.workers.autoscaling.target_ongoing_requests == 7


def test_the_target_follows_what_an_engine_really_runs() -> None:
    settings = load("throughput", workers={"max_running_requests": 40, "autoscaling": {}})
    assert settings.workers.autoscaling is not None
    assert settings.workers.autoscaling.target_ongoing_requests == 30


def test_a_preset_turns_no_autoscaling_on() -> None:
    assert load("latency").workers.autoscaling is None


def test_on_a_cpu_the_share_of_the_memory_is_left_to_the_environment() -> None:
    assert "gpu_memory_utilization" not in load("balanced").engine.args
    assert load("balanced").engine.args["max_num_batched_tokens"] == 32_768


def test_a_simulated_engine_gets_none_of_vllms_arguments() -> None:
    settings = load("balanced", engine={"kind": "simulated", "args": {}})
    assert settings.engine.args == {}
    assert settings.workers.max_running_requests == 256


def test_sections_that_are_objects_already_are_filled_in_too() -> None:
    settings = Settings(preset="latency", workers=WorkerSettings(replicas=3))
    assert (settings.workers.replicas, settings.workers.max_running_requests) == (3, 64)


@each(
    "args, words",
    [
        ({"preset": "fast"}, "'preset': Input should be 'latency', 'balanced' or 'throughput'"),
        ({"preset": ["latency"]}, "'preset'"),
        ({"preset": "latency", "workers": 3}, "'workers'"),
        ({"preset": "latency", "workers": {"autoscaling": 3}}, "'workers.autoscaling'"),
        ({"preset": "latency", "engine": {"args": 3}}, "'engine.args'"),
        (
            {"preset": "latency", "workers": {"max_running_requests": "many", "autoscaling": {}}},
            "'workers.max_running_requests'",
        ),
    ],
)
def test_mistakes_are_told_as_without_a_preset(args: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(args)
    assert words in str(caught.value)
