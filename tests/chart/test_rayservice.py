"""The RayService satisfies the operator's own rules, and its pods follow from the settings."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import ray
import yaml
from ray._private import ray_constants
from ray.dashboard import http_server_agent
from ray.scripts.scripts import start as ray_start

from tests.chart.charts import (
    NAMED,
    STAGES,
    Document,
    documents,
    merged,
    one,
    pod_templates,
    stage_values,
)
from tests.chart.test_objects import EVERY, EXTERNAL, TLS, release
from tests.tables import each

AGENTS = ("dashboard-agent-grpc", "runtime-env-agent")


def spec_of(values: Document) -> Document:
    found: Document = one(documents(values), "RayService")["spec"]
    return found


def groups(values: Document) -> dict[str, Document]:
    return {
        group["groupName"]: group
        for group in spec_of(values)["rayClusterConfig"]["workerGroupSpecs"]
    }


def environment(template: Document) -> dict[str, str]:
    return {
        item["name"]: item.get("value", "")
        for item in template["spec"]["containers"][0].get("env", [])
    }


@each("stage, variant", EVERY)
def test_the_operator_would_take_it(stage: str, variant: str) -> None:
    service = one(release(stage, variant), "RayService")
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"])
    assert service["spec"]["upgradeStrategy"]["type"] in (
        "NewCluster",
        "NewClusterWithIncrementalUpgrade",
        "None",
    )
    cluster = service["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]
    assert "redis-password" not in head["rayStartParams"]
    assert not {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"} & set(
        environment(head["template"])
    )
    assert "RAY_enable_autoscaler_v2" not in environment(head["template"])
    for group in [head, *cluster["workerGroupSpecs"]]:
        assert not (
            "resources" in group
            and {"num-cpus", "num-gpus", "memory"} & set(group["rayStartParams"])
        )
        assert "labels" not in group["rayStartParams"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        # Version 2 of the autoscaler replaces pods; it does not restart them.
        assert "restartPolicy" not in group["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    ports = {
        port["name"]: port["containerPort"]
        for port in head["template"]["spec"]["containers"][0]["ports"]
    }
    assert {
        "serve": 8000,
        "dashboard": 8265,
        "gcs-server": 6379,
        "metrics": 8080,
    }.items() <= ports.items()


@each(
    "changes, pods, gpus",
    [
        ({}, (1, 1), "1"),
        ({"settings": {"workers": {"replicas": 3}}, "engines": {"gpus": 2}}, (2, 2), "2"),
        (
            {
                "settings": {"workers": {"replicas": 3, "tensor_parallel_size": 2}},
                "engines": {"gpus": 4},
            },
            (2, 2),
            "4",
        ),
        ({"settings": {"workers": {"replicas": 4, "gpus_per_replica": 0.5}}}, (2, 2), "1"),
        (
            {
                "settings": {"workers": {"autoscaling": {"min_replicas": 2, "max_replicas": 7}}},
                "engines": {"gpus": 2},
            },
            (1, 4),
            "2",
        ),
    ],
)
def test_there_are_as_many_engine_pods_as_the_engines_fill(
    changes: Document, pods: tuple[int, int], gpus: str
) -> None:
    engines = groups(merged(NAMED, changes))["engines"]
    assert (engines["minReplicas"], engines["maxReplicas"]) == pods
    limits = engines["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == gpus


def test_the_stages_are_what_they_are_called() -> None:
    def engines(stage: str) -> tuple[int, int, str | None]:
        group = groups(stage_values(stage))["engines"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        return group["minReplicas"], group["maxReplicas"], limits.get("nvidia.com/gpu")

    assert engines("single-gpu") == (1, 1, "1")
    assert engines("multi-gpu") == (2, 2, "2")
    assert engines("multi-node") == (2, 8, "4")
    assert engines("cpu") == (1, 1, None)


def test_ray_scales_pods_only_where_engines_scale() -> None:
    fixed = spec_of(stage_values("multi-gpu"))["rayClusterConfig"]
    assert fixed["enableInTreeAutoscaling"] is False
    assert "autoscalerOptions" not in fixed
    scaling = spec_of(stage_values("multi-node"))["rayClusterConfig"]
    assert scaling["enableInTreeAutoscaling"] is True
    assert scaling["autoscalerOptions"]["version"] == "v2"


def test_no_replica_runs_on_the_head_and_no_client_depends_on_it() -> None:
    spec = spec_of(NAMED)
    assert spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["excludeHeadPodFromServeSvc"] is True


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
    spec = spec_of(stage_values(stage))
    args = yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]
    cluster = spec["rayClusterConfig"]
    holders = {
        group.get("groupName", "head")
        for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        # As a shell reads it: KubeRay writes it into a command line.
        if args[section]["ray_resource"]
        in json.loads(shlex.split(group["rayStartParams"].get("resources", "{}"))[0])
    }
    assert holders == {pods}


@each("pods, kind", [("ingress", "ingress"), ("engines", "engine")])
def test_kuberay_and_the_autoscaler_can_read_what_a_pod_offers(pods: str, kind: str) -> None:
    offered = groups(NAMED)[pods]["rayStartParams"]["resources"]
    assert json.loads(offered.strip("'\"` ")) == {kind: 1}, "KubeRay's way"
    assert json.loads(offered[1:-1].replace("\\", "")) == {kind: 1}, "the autoscaler's way"


@each("stage", STAGES)
def test_ray_counts_no_gpu_that_a_pod_does_not_own(stage: str) -> None:
    objects = documents(stage_values(stage))
    cluster = one(objects, "RayService")["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        owns = "nvidia.com/gpu" in group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert group["rayStartParams"].get("num-gpus") == (None if owns else "0")
        assert environment(group["template"]).get("NVIDIA_VISIBLE_DEVICES") == (
            None if owns else "void"
        )
        assert environment(group["template"]).get("VLLM_TARGET_DEVICE") == (None if owns else "cpu")
    assert environment(pod_templates(objects)["test"])["NVIDIA_VISIBLE_DEVICES"] == "void"
    if "autoscalerOptions" in cluster:
        assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in cluster["autoscalerOptions"][
            "env"
        ]


def test_a_pod_that_ends_outlives_its_drain() -> None:
    cluster = spec_of(merged(NAMED, {"drainSeconds": 90}))["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        assert environment(group["template"])["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "90"
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    # It would wait for Serve's controller, which stays.
    assert (
        environment(cluster["headGroupSpec"]["template"])["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        == "0"
    )


def test_a_head_is_missed_soon_and_waited_for_long() -> None:
    own = {"key": "gpu", "operator": "Exists"}
    cluster = spec_of(merged(NAMED, {"head": {"scheduling": {"tolerations": [own]}}}))[
        "rayClusterConfig"
    ]
    assert cluster["headGroupSpec"]["template"]["spec"]["tolerations"] == [
        own,
        *(
            {
                "key": f"node.kubernetes.io/{sign}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 30,
            }
            for sign in ("unreachable", "not-ready")
        ),
    ]
    # Ray's GCS (2.60) does not connect again: more retries would only put off the restart that
    # brings it back.
    assert "RAY_num_redis_request_retries" not in environment(cluster["headGroupSpec"]["template"])
    for group in cluster["workerGroupSpecs"]:
        assert environment(group["template"])["RAY_gcs_rpc_server_reconnect_timeout_s"] == "3600"
    alone = groups(merged(NAMED, {"gcsFaultTolerance": {"enabled": False}}))["engines"]
    assert "RAY_gcs_rpc_server_reconnect_timeout_s" not in environment(alone["template"]), (
        "it would wait for nobody"
    )


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
    cluster = spec_of(merged(NAMED, EXTERNAL, TLS))["rayClusterConfig"]
    head = cluster["headGroupSpec"]["template"]
    file = yaml.safe_load(spec_of(merged(NAMED, EXTERNAL, TLS))["serveConfigV2"])["applications"][
        0
    ]["args"]["redis"]
    assert environment(head)["RAY_REDIS_CA_CERT"] == file["ca_file"]
    assert "RAY_REDIS_CA_CERT" not in environment(
        spec_of(merged(NAMED, EXTERNAL))["rayClusterConfig"]["headGroupSpec"]["template"]
    )


def test_the_hubs_token_is_held_by_engines_alone() -> None:
    templates = pod_templates(
        documents(merged(NAMED, {"hub": {"access": True, "existingSecret": "hub"}}))
    )
    assert {name for name, pod in templates.items() if "HF_TOKEN" in environment(pod)} == {"engine"}


def test_ray_asks_for_a_token_but_where_probes_knock() -> None:
    cluster = spec_of(NAMED)["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert (
        "authOptions"
        not in spec_of(merged(NAMED, {"rayAuth": {"enabled": False}}))["rayClusterConfig"]
    )
    servers = Path(ray.__file__).parent / "dashboard"
    public = {
        "agent": set(http_server_agent.PUBLIC_EXACT_PATHS),
        "dashboard": set(
            re.findall(r'"(/[^"]*)",  # ', (servers / "http_server_head.py").read_text())
        ),
        "serve": {"/-/healthz"},  # HAProxy's, which knows no token
    }
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        container = group["template"]["spec"]["containers"][0]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container[probe]["httpGet"]
            assert get["path"] in public[get["port"]]


def test_haproxy_outlasts_the_longest_request() -> None:
    values = merged(NAMED, {"settings": {"ingress": {"max_request_timeout_s": 7200.5}}})
    for group in groups(values).values():
        found = environment(group["template"])
        assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert found["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
        assert int(found["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) == 7301


def test_all_that_ray_writes_has_a_place_on_a_read_only_disk() -> None:
    cluster = spec_of(stage_values("multi-node"))["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        spec = group["template"]["spec"]
        empty = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
        writable = [
            m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] in empty
        ]
        assert {"/tmp", "/dev/shm"} <= set(writable)
        for name, value in environment(group["template"]).items():
            if value.startswith("/"):
                assert any(value.startswith(path) for path in writable), name
        (shm,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        assert shm["sizeLimit"]


def test_only_engines_hold_the_weights() -> None:
    # A volume for one node must not be asked for on three.
    cluster = spec_of(NAMED)["rayClusterConfig"]
    holders = [
        group["groupName"]
        for group in cluster["workerGroupSpecs"]
        if "weights" in {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    ]
    assert holders == ["engines"]
    assert "weights" not in str(cluster["headGroupSpec"])


def test_rays_state_is_kept_in_redis_under_a_user_of_its_own() -> None:
    options = spec_of(NAMED)["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "hermes-redis:6379"
    assert options["redisUsername"] == {"value": "ray"}
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {
        "name": "hermes-redis",
        "key": "ray-password",
    }
    # The next cluster must not begin with the state of the one before.
    assert "externalStorageNamespace" not in options
    elsewhere = spec_of(merged(NAMED, EXTERNAL))["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert elsewhere["redisAddress"] == "redis.example.org:6379"
    off = spec_of(merged(NAMED, {"gcsFaultTolerance": {"enabled": False}}))["rayClusterConfig"]
    assert "gcsFaultToleranceOptions" not in off


def test_a_model_from_the_hub_is_kept_where_pods_share_it() -> None:
    def home(changes: Document) -> tuple[str, str]:
        found = environment(groups(merged(NAMED, changes))["engines"]["template"])
        return found["HF_HOME"], found["HF_HUB_OFFLINE"]

    assert home({}) == ("/home/hermes/.cache/huggingface", "1")
    assert home({"weights": {"readOnly": False}, "hub": {"access": True}}) == (
        "/models/.huggingface",
        "0",
    )


def test_the_environment_of_the_values_wins() -> None:
    found = environment(
        groups(merged(NAMED, {"env": {"RAY_DEDUP_LOGS": "1", "X": "y"}}))["engines"]["template"]
    )
    assert (found["RAY_DEDUP_LOGS"], found["X"]) == ("1", "y")


@each("stage", STAGES)
def test_no_raylet_waits_for_its_agents(stage: str) -> None:
    """It does, for 15 s, for each port that nobody has chosen. KubeRay chooses metrics-export-port
    and Ray dashboard-agent-listen-port.
    """
    known = {option for parameter in ray_start.params for option in parameter.opts}
    cluster = spec_of(stage_values(stage))["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert {f"--{name}" for name in group["rayStartParams"]} <= known
        chosen = {group["rayStartParams"][f"{name}-port"] for name in AGENTS}
        assert len(chosen) == len(AGENTS)
        # Between the ports of Ray's workers and those of Serve's replicas; a connection that Linux
        # has given the port of an agent would end the agent, and with it the raylet.
        assert all(20000 <= int(port) < 30000 for port in chosen)
    assert ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT == 52365
