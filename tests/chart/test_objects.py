"""An API server would accept every object of the chart: Kubernetes' own kinds are validated
strictly, the others by their CRDs.
"""

from __future__ import annotations

import itertools

import helm_python

from tests.chart import crds, kinds
from tests.chart.charts import (
    CHART,
    EVERYTHING,
    EXTERNAL,
    HA,
    NAMED,
    STAGES,
    Document,
    documents,
    environment,
    merged,
    one,
    pod_templates,
    ray_groups,
    rendered,
    stage_values,
)
from tests.tables import each

OLDEST, NEWEST = "1.29", "1.37"
GATEWAY = {
    "httpRoute.enabled": True,
    "httpRoute.hosts": ["llm.example.org"],
    "httpRoute.parentRefs": [{"name": "public"}],
    "networkPolicy.servingFrom": [{"namespaceSelector": {}}],
}
VARIANTS: dict[str, Document] = {
    "defaults": {},
    "everything on": EVERYTHING,
    "gateway, Redis elsewhere": {**GATEWAY, **EXTERNAL},
    "three Redis": HA,
}
EVERY = [(stage, variant) for stage in STAGES for variant in VARIANTS]
NO_CRD_AT_HAND = {"HTTPRoute"}


def release(stage: str, variant: str) -> list[Document]:
    """The objects of one of `EVERY`."""
    return documents(merged(stage_values(stage), VARIANTS[variant]))


def errors_of(version: str, stage: str, variant: str) -> list[str]:
    """What an API server of that version finds wrong with Kubernetes' own objects."""
    not_its_own = (*crds.FILES, *NO_CRD_AT_HAND)
    own = [item for item in release(stage, variant) if item["kind"] not in not_its_own]
    return [f"{item['kind']}: {error}" for item in own for error in kinds.errors(item, version)]


def errors_of_pod(spec: Document) -> list[str]:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    return kinds.errors(pod, "1.34")


@each("version, stage, variant", itertools.product((OLDEST, NEWEST), STAGES, VARIANTS))
def test_every_object_is_valid_in_the_oldest_and_the_newest_kubernetes(
    version: str, stage: str, variant: str
) -> None:
    assert errors_of(version, stage, variant) == []


@each("stage, variant", EVERY)
def test_every_custom_object_is_valid_by_its_crd(stage: str, variant: str) -> None:
    for document in release(stage, variant):
        if document["kind"] in crds.FILES:
            assert crds.errors(document) == [], document["kind"]


@each("stage", STAGES)
def test_the_pods_that_kuberay_makes_are_valid_pods(stage: str) -> None:
    for group in ray_groups(documents(stage_values(stage))).values():
        assert errors_of_pod(group["template"]["spec"]) == []


def test_no_volume_of_a_pod_may_fill_the_nodes_disk() -> None:
    sizes: Document = {"head.tmpSize": "3Gi", "ingressPods.homeSize": "4Gi"}
    download = {
        "hub.access": True,
        "settings.model.source": "a/b",
        "weights": {"existingClaim": "", "size": "40Gi"},
    }
    limits = {}
    for component, template in pod_templates(documents(merged(NAMED, sizes, download))).items():
        for volume in template["spec"].get("volumes", []):
            if "emptyDir" in volume:
                limits[component, volume["name"]] = volume["emptyDir"]["sizeLimit"]
    assert limits["head", "tmp"] == "3Gi"
    assert limits["ingress", "home"] == "4Gi"
    assert limits["engine", "home"] == f"{(10 + 40) * 1024}Mi", "the model, too, is there"
    engine = pod_templates(documents(NAMED))["engine"]["spec"]["volumes"]
    assert {"name": "home", "emptyDir": {"sizeLimit": "10Gi"}} in engine
    for component, template in pod_templates(documents(NAMED)).items():
        rotation = environment(template).get("RAY_ROTATION_MAX_BYTES")
        assert bool(rotation) == (component in ("head", "ingress", "engine")), component


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


def test_two_renderings_are_the_same() -> None:
    # GitOps compares: nothing may be random or hold the time.
    first = dict(rendered(NAMED))
    chart = helm_python.Chart.load(str(CHART))
    assert chart.render(NAMED, name="hermes", namespace="prod") == first
