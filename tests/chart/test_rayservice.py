"""The RayService satisfies the operator's own rules, and its pods follow from the settings."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import ray
from ray._private import ray_constants
from ray.dashboard import http_server_agent

from tests.chart.charts import (
    EXTERNAL,
    NAMED,
    STAGES,
    TLS,
    Document,
    cluster_of,
    documents,
    environment,
    merged,
    one,
    pod_templates,
    ray_groups,
    stage_values,
)
from tests.chart.test_objects import EVERY, release
from tests.chart.test_serve_config import arguments
from tests.tables import each

PORTS = {"serve": 8000, "dashboard": 8265, "gcs-server": 6379, "metrics": 8080}


def groups(*changes: Document) -> dict[str, Document]:
    """The groups of Ray nodes of a release with these values."""
    return ray_groups(documents(merged(NAMED, *changes)))


def variables(*changes: Document) -> dict[str, dict[str, str]]:
    """The variables of each group's pods."""
    return {name: environment(group["template"]) for name, group in groups(*changes).items()}


def container(group: Document) -> Document:
    found: Document = group["template"]["spec"]["containers"][0]
    return found


@each("stage, variant", EVERY)
def test_the_operator_would_take_it(stage: str, variant: str) -> None:
    objects = release(stage, variant)
    service = one(objects, "RayService")
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"])
    strategies = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
    assert service["spec"]["upgradeStrategy"]["type"] in strategies
    head, *workers = ray_groups(objects).values()
    assert "redis-password" not in head["rayStartParams"]
    of_the_operator = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}
    of_the_operator.add("RAY_enable_autoscaler_v2")
    assert not of_the_operator & set(environment(head["template"]))
    for group in (head, *workers):
        params = group["rayStartParams"]
        assert "resources" not in group or not {"num-cpus", "num-gpus", "memory"} & set(params)
        assert "labels" not in params
        assert all(isinstance(value, str) for value in params.values())
        # Version 2 of the autoscaler replaces pods; it does not restart them.
        assert "restartPolicy" not in group["template"]["spec"]
    for group in workers:
        assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    ports = {port["name"]: port["containerPort"] for port in container(head)["ports"]}
    assert PORTS.items() <= ports.items()


@each(
    "changes, pods",
    [
        ({}, (1, 1, "1")),
        ({"settings.workers.replicas": 3, "engines.gpus": 2}, (2, 2, "2")),
        (
            {
                "settings.workers": {"replicas": 3, "tensor_parallel_size": 2},
                "engines.gpus": 4,
            },
            (2, 2, "4"),
        ),
        (
            {
                "settings.workers.autoscaling": {"min_replicas": 2, "max_replicas": 7},
                "engines.gpus": 2,
            },
            (1, 4, "2"),
        ),
    ],
)
def test_there_are_as_many_engine_pods_as_the_engines_fill(
    changes: Document, pods: tuple[int, int, str]
) -> None:
    group = groups(changes)["engines"]
    gpus = container(group)["resources"]["limits"].get("nvidia.com/gpu")
    assert (group["minReplicas"], group["maxReplicas"], gpus) == pods


def test_ray_scales_pods_only_where_engines_scale() -> None:
    fixed = cluster_of(documents(stage_values("multi-gpu")))
    assert fixed["enableInTreeAutoscaling"] is False
    assert "autoscalerOptions" not in fixed
    objects = documents(stage_values("multi-node"))
    engines, scaling = ray_groups(objects)["engines"], cluster_of(objects)
    assert (engines["minReplicas"], engines["maxReplicas"]) == (2, 8)
    assert scaling["enableInTreeAutoscaling"] is True
    assert scaling["autoscalerOptions"]["version"] == "v2"


def test_no_replica_runs_on_the_head_and_no_client_depends_on_it() -> None:
    assert groups()["head"]["rayStartParams"]["num-cpus"] == "0"
    assert one(documents(NAMED), "RayService")["spec"]["excludeHeadPodFromServeSvc"] is True


@each(
    "stage, section, pods",
    [
        (stage, *pair)
        for stage in STAGES
        for pair in (("ingress", "ingress"), ("workers", "engines"))
    ],
)
def test_replicas_run_on_their_own_pods_and_take_no_place_of_others(
    stage: str, section: str, pods: str
) -> None:
    values = stage_values(stage)
    holders = {
        name
        for name, group in ray_groups(documents(values)).items()
        # As a shell reads it: KubeRay writes it into a command line.
        if arguments(values)[section]["ray_resource"]
        in json.loads(shlex.split(group["rayStartParams"].get("resources", "{}"))[0])
    }
    assert holders == {pods}


@each("pods, kind", [("ingress", "ingress"), ("engines", "engine")])
def test_kuberay_and_the_autoscaler_can_read_what_a_pod_offers(pods: str, kind: str) -> None:
    offered = groups()[pods]["rayStartParams"]["resources"]
    assert json.loads(offered.strip("'\"` ")) == {kind: 1}, "KubeRay's way"
    assert json.loads(offered[1:-1].replace("\\", "")) == {kind: 1}, "the autoscaler's way"


@each("stage", STAGES)
def test_ray_counts_no_gpu_that_a_pod_does_not_own(stage: str) -> None:
    objects = documents(stage_values(stage))
    for group in ray_groups(objects).values():
        owns = "nvidia.com/gpu" in container(group)["resources"]["limits"]
        given = environment(group["template"])
        assert group["rayStartParams"].get("num-gpus") == (None if owns else "0")
        assert given.get("NVIDIA_VISIBLE_DEVICES") == (None if owns else "void")
        assert given.get("VLLM_TARGET_DEVICE") == (None if owns else "cpu")
    assert environment(pod_templates(objects)["test"])["NVIDIA_VISIBLE_DEVICES"] == "void"
    if autoscaler := cluster_of(objects).get("autoscalerOptions"):
        assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in autoscaler["env"]


def test_a_pod_that_ends_outlives_its_drain() -> None:
    found = groups({"drainSeconds": 90})
    name = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    # The head would wait for Serve's controller, which stays.
    assert environment(found.pop("head")["template"])[name] == "0"
    for group in found.values():
        assert environment(group["template"])[name] == "90"
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] == 120


def test_the_variables_that_ray_reads_in_its_binaries_are_there() -> None:
    binary = Path(ray.__file__).parent / "core" / "src" / "ray" / "gcs" / "gcs_server"
    raylet = binary.parents[1] / "raylet" / "raylet"
    for name, file in (
        ("RAY_REDIS_CA_CERT", binary),
        ("RAY_gcs_rpc_server_reconnect_timeout_s", raylet),
        ("RAY_agent_register_timeout_ms", raylet),
    ):
        assert name.encode() in file.read_bytes(), name
    assert hasattr(ray_constants, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")


def test_the_gcs_trusts_the_same_certificates_as_the_service() -> None:
    file = arguments(merged(NAMED, EXTERNAL, TLS))["redis"]["ca_file"]
    assert variables(EXTERNAL, TLS)["head"]["RAY_REDIS_CA_CERT"] == file
    assert "RAY_REDIS_CA_CERT" not in variables(EXTERNAL)["head"]


def test_the_hubs_token_is_held_by_engines_alone() -> None:
    values = merged(NAMED, {"hub.access": True, "hub.existingSecret": "hub"})
    templates = pod_templates(documents(values))
    assert {name for name, pod in templates.items() if "HF_TOKEN" in environment(pod)} == {"engine"}


def test_ray_asks_for_a_token_but_where_probes_knock() -> None:
    assert cluster_of(documents(NAMED))["authOptions"] == {"mode": "token"}
    open_door = documents(merged(NAMED, {"rayAuth.enabled": False}))
    assert "authOptions" not in cluster_of(open_door)
    source = (Path(ray.__file__).parent / "dashboard" / "http_server_head.py").read_text()
    public = {
        "agent": set(http_server_agent.PUBLIC_EXACT_PATHS),
        "dashboard": set(re.findall(r'"(/[^"]*)",  # ', source)),
        "serve": {"/-/healthz"},  # HAProxy's, which knows no token
    }
    for group in groups().values():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container(group)[probe]["httpGet"]
            assert get["path"] in public[get["port"]]


def test_haproxy_outlasts_the_longest_request() -> None:
    found = variables({"settings.ingress.max_request_timeout_s": 7200.5})
    del found["head"]
    for given in found.values():
        assert given["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert given["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
        assert int(given["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) == 7301


def test_all_that_ray_writes_has_a_place_on_a_read_only_disk() -> None:
    for group in ray_groups(documents(stage_values("multi-node"))).values():
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        mounts = container(group)["volumeMounts"]
        writable = [m["mountPath"] for m in mounts if "emptyDir" in volumes[m["name"]]]
        assert {"/tmp", "/dev/shm"} <= set(writable)
        for name, value in environment(group["template"]).items():
            if value.startswith("/"):
                assert any(value.startswith(path) for path in writable), name
        shm = volumes["shm"]["emptyDir"]
        assert shm["medium"] == "Memory"
        assert shm["sizeLimit"]


def test_only_engines_hold_the_weights() -> None:
    # A volume for one node must not be asked for on three.
    assert [name for name, group in groups().items() if "weights" in str(group)] == ["engines"]


def test_rays_state_is_kept_in_redis_under_a_user_of_its_own() -> None:
    def options(*changes: Document) -> Document | None:
        return cluster_of(documents(merged(NAMED, *changes))).get("gcsFaultToleranceOptions")

    # Not `externalStorageNamespace`: the next cluster must not begin with the state of the one
    # before.
    password = {"name": "hermes-redis", "key": "ray-password"}
    assert options() == {
        "redisAddress": "hermes-redis:6379",
        "redisUsername": {"value": "ray"},
        "redisPassword": {"valueFrom": {"secretKeyRef": password}},
    }
    assert (options(EXTERNAL) or {})["redisAddress"] == "redis.example.org:6379"
    assert options({"gcsFaultTolerance.enabled": False}) is None
