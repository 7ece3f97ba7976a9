"""Presets fill in what the configuration leaves out, and never more than that."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.errors import SettingsError
from serve_app.settings import Settings, load_settings
from serve_app.settings.sections import WorkerSettings
from tests.tables import each

TARGET_7 = {"target_ongoing_requests": 7}


def load(preset: str | None, **sections: Any) -> Settings:
    return load_settings({"preset": preset, **sections})


def test_without_a_preset_an_engine_runs_as_many_as_vllm_would() -> None:
    for args, slots in (
        ({}, 128),
        ({"device": "cpu"}, 128),
        ({"device": "gpu"}, 256),
        ({"device": "gpu", "max_running_requests": 64}, 64),
    ):
        assert Settings.model_validate({"workers": args}).workers.max_running_requests == slots


def test_without_a_preset_nothing_changes() -> None:
    given = {"workers": {"device": "gpu", "autoscaling": {}}, "engine": {"args": {"seed": 1}}}
    settings = load(None, **given)
    assert settings == load_settings(given)
    assert settings.engine.args == {"seed": 1}
    assert (
        settings.workers.max_running_requests == WorkerSettings(device="gpu").max_running_requests
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_num_batched_tokens", 2048),
        ("gpu-memory-utilization", 0.5),
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


@each(
    "preset, sections, running, target",
    [
        # The operator's own sizes win.
        ("throughput", {"max_running_requests": 40, "autoscaling": TARGET_7}, 40, 7),
        # The target follows what an engine really runs.
        ("throughput", {"max_running_requests": 40, "autoscaling": {}}, 40, 30),
        # A preset turns no autoscaling on.
        ("latency", {}, 64, None),
    ],
)
def test_what_an_operator_says_of_the_workers_wins(
    preset: str, sections: dict[str, Any], running: int, target: float | None
) -> None:
    workers = load(preset, workers=sections).workers
    found = workers.autoscaling and workers.autoscaling.target_ongoing_requests
    assert (workers.max_running_requests, found) == (running, target)


def test_an_engine_gets_no_argument_that_is_not_its_own() -> None:
    on_a_cpu = load("balanced").engine.args
    assert "gpu_memory_utilization" not in on_a_cpu, "the environment's"
    assert on_a_cpu["max_num_batched_tokens"] == 32_768
    simulated = load("balanced", engine={"kind": "simulated", "args": {}})
    assert simulated.engine.args == {}
    assert simulated.workers.max_running_requests == 256


@each(
    "args, words",
    [
        ({"preset": "fast"}, "'preset': Input should be 'latency', 'balanced' or 'throughput'"),
        ({"preset": "latency", "workers": 3}, "'workers'"),
        ({"preset": "latency", "engine": {"args": 3}}, "'engine.args'"),
    ],
)
def test_mistakes_are_told_as_without_a_preset(args: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(args)
    assert words in str(caught.value)
