"""Serve and the service accept the configuration that the chart gives to Ray Serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from serve_app.settings import Settings, load_settings
from serve_app.settings.tree import PRESETS
from tests.chart.charts import (
    EXTERNAL,
    NAMED,
    ROOT,
    STAGES,
    TLS,
    Document,
    Loader,
    documents,
    merged,
    one,
    pod_templates,
    ray_groups,
    stage_values,
)
from tests.tables import each


def config(values: Document) -> Document:
    text = one(documents(values), "RayService")["spec"]["serveConfigV2"]
    loaded: Document = yaml.load(text, Loader)
    return loaded


def arguments(values: Document) -> Document:
    found: Document = config(values)["applications"][0]["args"]
    return found


def settings_of(values: Document) -> Settings:
    return load_settings(arguments(values))


@pytest.fixture(autouse=True)
def _nothing_from_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERMES_REDIS_URL", raising=False)
    monkeypatch.delenv("HERMES_KEYS_FILE", raising=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
@each("stage", STAGES)
def test_serve_takes_the_config(stage: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    parsed = ServeDeploySchema.model_validate(config(stage_values(stage)))
    (application,) = parsed.applications
    assert application.import_path == "serve_app.deploy:build"
    assert application.route_prefix == "/"
    # Reached from other pods, on the port that KubeRay's Service has.
    assert (parsed.http_options.host, parsed.http_options.port) == ("0.0.0.0", 8000)


@each("stage", STAGES)
def test_the_service_takes_the_settings(stage: str) -> None:
    settings = settings_of(stage_values(stage))
    assert settings.workers.device == ("cpu" if stage == "cpu" else "gpu")
    assert settings.model.name


@each(
    "preset, workers, autoscaling",
    [
        (None, {}, {}),
        (None, {}, {"max_replicas": 9}),
        *((preset, {}, {"min_replicas": 1}) for preset in PRESETS),
        ("balanced", {"max_running_requests": 1}, {}),
        ("balanced", {"max_running_requests": 41}, {"target_ongoing_requests": 7}),
    ],
)
def test_the_chart_scales_as_the_service_would(
    preset: str | None, workers: Document, autoscaling: Document
) -> None:
    settings = {"preset": preset, "workers": {**workers, "autoscaling": autoscaling}}
    (application,) = config(merged(NAMED, {"settings": settings}))["applications"]
    expected = load_settings(settings, {}).workers.autoscaling
    assert expected is not None
    (worker,) = application["deployments"]
    assert worker["autoscaling_config"] == expected.for_serve()
    assert (worker["name"], worker["num_replicas"]) == ("Worker", "auto")
    assert application["args"]["workers"]["replicas"] == expected.min_replicas


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_a_higher_bound_builds_nothing_again() -> None:
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeApplicationSchema

    def version(workers: Document) -> str:
        values = merged(stage_values("multi-node"), {"settings": {"workers": workers}})
        (application,) = config(values)["applications"]
        return str(get_app_code_version(ServeApplicationSchema.model_validate(application)))

    assert version({"autoscaling": {"max_replicas": 12}}) == version({})
    assert version({"max_running_requests": 12}) != version({})


def test_keys_are_asked_for_unless_they_are_switched_off() -> None:
    assert settings_of(NAMED).auth.required is True
    off = merged(NAMED, {"auth.enabled": False, "auth.existingSecret": ""})
    assert settings_of(off).auth.required is False


def test_the_files_that_the_settings_name_are_mounted() -> None:
    values = merged(NAMED, EXTERNAL, TLS)
    settings = settings_of(values)
    for name, group in ray_groups(documents(values)).items():
        spec = group["template"]["spec"]
        places = {
            mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]
        }
        files = {
            f"{places[volume['name']]}/{item['path']}": (
                volume["secret"]["secretName"],
                item["key"],
            )
            for volume in spec["volumes"]
            for item in volume.get("secret", {}).get("items", [])
        }
        # Ingresses alone ask for keys.
        keys = {settings.auth.keys_file: ("hermes-keys", "keys")} if name == "ingress" else {}
        assert files == {settings.redis.ca_file: ("redis-url", "ca.pem"), **keys}


def test_the_charts_defaults_are_the_services() -> None:
    # But for what a cluster has and a laptop has not.
    own = Settings().model_dump()
    ours = yaml.safe_load((ROOT / "helm" / "hermes-serve" / "values.yaml").read_text())["settings"]
    different = {"model", "workers.device", "workers.replicas"}

    def walk(node: Any, path: str = "") -> None:
        for key, value in node.items():
            where = f"{path}{key}"
            if isinstance(value, dict) and value:
                walk(value, f"{where}.")
            elif where not in different:
                expected: Any = own
                for part in where.split("."):
                    expected = expected[part]
                assert value == expected, where

    walk(ours)


UNLIKE_THIS_ONE = """
import json, sys
import vllm.platforms
vllm.platforms.vllm_version_matches_substr = lambda text: False  # no build for CPUs
from serve_app.settings import load_settings
from workers.vllm_engine import engine_arguments
print(engine_arguments(load_settings(json.loads(sys.argv[1]))).tensor_parallel_size)
"""


def test_the_settings_can_be_checked_on_a_head_without_a_gpu() -> None:
    # Serve calls `build` there, and the image holds vLLM for GPUs.
    values = stage_values("multi-node")
    head = pod_templates(documents(values))["head"]["spec"]["containers"][0]
    given = {
        item["name"]: item["value"]
        for item in head["env"]
        if item["name"].startswith(("VLLM_", "NVIDIA_"))
    }
    args = {key: value for key, value in arguments(values).items() if key != "auth"}
    done = subprocess.run(
        [sys.executable, "-c", UNLIKE_THIS_ONE, json.dumps(args)],
        env={**os.environ, **given, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("4\n"), done.stderr[-1000:]


def test_large_numbers_stay_whole() -> None:
    # Helm reads numbers as floats, and prints 1.6777216e+07 where it is let.
    assert arguments(NAMED)["ingress"]["max_body_bytes"] == 16777216
    assert isinstance(arguments(NAMED)["ingress"]["max_body_bytes"], int)


def test_engine_arguments_go_through_as_they_are() -> None:
    args = {"max_model_len": 8192, "enable_prefix_caching": True, "gpu_memory_utilization": 0.9}
    assert arguments(merged(NAMED, {"settings.engine.args": args}))["engine"]["args"] == args


def test_the_service_is_named_after_its_release_unless_it_is_named() -> None:
    """And whoever checks Redis before Ray starts asks for the same name."""
    asked = 0
    for name in ("", "ours"):
        values = merged(stage_values("cpu"), {"settings": {"service": name}} if name else {})
        service = arguments(values)["service"]
        assert service == (name or "prod/hermes")
        for pod in pod_templates(documents(values)).values():
            for container in pod["spec"].get("initContainers", ()):
                if container["name"] == "check-redis":
                    assert f"--service={service}" in container["command"]
                    asked += 1
    assert asked > 2
