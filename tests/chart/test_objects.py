"""An API server would accept every object: Kubernetes' own kinds are validated strictly, the others
by their CRDs.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import yaml

from tests.chart import crds, kinds
from tests.chart.charts import (
    CHART,
    EVERYTHING,
    NAMED,
    STAGES,
    Document,
    documents,
    merged,
    one,
    pod_templates,
    stage_values,
)
from tests.tables import each

VERSIONS = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
GATEWAY: Document = {
    "httpRoute": {
        "enabled": True,
        "hosts": ["llm.example.org"],
        "parentRefs": [{"name": "public"}],
    },
    "networkPolicy": {"servingFrom": [{"namespaceSelector": {}}]},
}
EXTERNAL: Document = {
    "redis": {
        "internal": {"enabled": False},
        "external": {
            "enabled": True,
            "existingSecret": "redis-url",
            "gcsAddress": "redis.example.org:6379",
            "cidrs": ["10.1.2.3/32"],
        },
    },
}
HA: Document = yaml.safe_load((CHART / "values-ha.yaml").read_text())
TLS: Document = {
    "redis": {"external": {"caKey": "ca.pem", "gcsAddress": "rediss://redis.example.org:6379"}}
}
VARIANTS = {
    "defaults": {},
    "everything on": EVERYTHING,
    "gateway, Redis elsewhere": merged(GATEWAY, EXTERNAL),
    "three Redis": HA,
}
EVERY = [(stage, variant) for stage in STAGES for variant in VARIANTS]
NO_CRD_AT_HAND = {"HTTPRoute"}


def release(stage: str, variant: str) -> list[Document]:
    """The objects of one of `EVERY`."""
    return documents(merged(stage_values(stage), VARIANTS[variant]))


def of_kind(stage: str, variant: str) -> tuple[list[Document], list[Document]]:
    """Kubernetes' own objects, and the custom ones."""
    objects = release(stage, variant)
    custom = [item for item in objects if item["kind"] in crds.FILES]
    own = [item for item in objects if item["kind"] not in (*crds.FILES, *NO_CRD_AT_HAND)]
    return own, custom


@each("version, stage, variant", itertools.product((VERSIONS[0], VERSIONS[-1]), STAGES, VARIANTS))
def test_every_object_is_valid_in_the_oldest_and_the_newest_kubernetes(
    version: str, stage: str, variant: str
) -> None:
    is_valid_in(version, stage, variant)


@pytest.mark.nightly  # the gate has the oldest and the newest
@each("version, stage, variant", itertools.product(VERSIONS[1:-1], STAGES, VARIANTS))
def test_every_object_is_valid_in_the_versions_of_kubernetes_between(
    version: str, stage: str, variant: str
) -> None:
    is_valid_in(version, stage, variant)


def is_valid_in(version: str, stage: str, variant: str) -> None:
    for document in of_kind(stage, variant)[0]:
        assert kinds.errors(document, version) == [], document["kind"]


@each("stage, variant", EVERY)
def test_every_custom_object_is_valid_by_its_crd(stage: str, variant: str) -> None:
    for document in of_kind(stage, variant)[1]:
        assert crds.errors(document) == [], document["kind"]


@each("stage", STAGES)
def test_the_pods_that_kuberay_makes_are_valid_pods(stage: str) -> None:
    cluster = one(documents(stage_values(stage)), "RayService")["spec"]["rayClusterConfig"]
    templates = [
        cluster["headGroupSpec"]["template"],
        *(group["template"] for group in cluster["workerGroupSpecs"]),
    ]
    for template in templates:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x"},
            "spec": template["spec"],
        }
        assert kinds.errors(pod, "1.34") == []


def test_whatever_says_where_pods_run_is_taken() -> None:
    scheduling = {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    }
    pods = {pod: {"scheduling": scheduling} for pod in ("head", "ingressPods", "engines")}
    templates = pod_templates(
        documents(merged(NAMED, pods, {"redis": {"internal": {"scheduling": scheduling}}}))
    )
    for component in ("head", "ingress", "engine", "redis"):
        spec = templates[component]["spec"]
        assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("high", "nvidia")
        assert (spec["nodeSelector"], spec["affinity"]) == (
            scheduling["nodeSelector"],
            scheduling["affinity"],
        )
        assert spec["tolerations"][:1] == scheduling["tolerations"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        assert kinds.errors(pod, "1.34") == []


def test_images_are_pulled_with_the_secrets_that_are_named() -> None:
    for component, template in pod_templates(documents(merged(NAMED, EVERYTHING))).items():
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}], component


def test_an_unknown_key_in_an_object_is_found() -> None:
    account = copy.deepcopy(one(documents(NAMED), "ServiceAccount", "hermes"))
    account["metadata"]["lables"] = {}
    assert "lables" in "".join(kinds.errors(account, "1.29"))


def test_an_unknown_key_in_a_custom_object_is_found() -> None:
    service = copy.deepcopy(one(documents(NAMED), "RayService"))
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["tolerationz"] = []
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"] = "4"
    found = crds.errors(service)
    assert len(found) == 2
    assert "tolerationz" in "".join(found)


def test_nothing_asks_for_the_prometheus_operator_unless_it_is_asked_for() -> None:
    for stage in STAGES:
        groups = {item["apiVersion"] for item in documents(stage_values(stage))}
        assert not [group for group in groups if "monitoring.coreos.com" in group]


def test_a_route_has_the_shape_of_gateway_api() -> None:
    route = one(documents(merged(NAMED, GATEWAY)), "HTTPRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert set(route["spec"]) == {"parentRefs", "hostnames", "rules"}
    (rule,) = route["spec"]["rules"]
    assert set(rule) == {"matches", "timeouts", "backendRefs"}
    assert rule["backendRefs"] == [{"name": "hermes-serve-svc", "port": 8000}]
    assert rule["timeouts"] == {"request": "3700s", "backendRequest": "3700s"}
