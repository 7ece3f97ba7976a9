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
    cluster_of,
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


def test_whatever_says_where_pods_run_is_taken() -> None:
    scheduling: Document = {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    }
    of = {"head": "head", "ingress": "ingressPods", "engine": "engines", "redis": "redis.internal"}
    changes = {f"{section}.scheduling": scheduling for section in of.values()}
    templates = pod_templates(documents(merged(NAMED, changes)))
    for component in of:
        spec = templates[component]["spec"]
        for name in ("nodeSelector", "affinity", "priorityClassName", "runtimeClassName"):
            assert spec[name] == scheduling[name], component
        assert spec["tolerations"][:1] == scheduling["tolerations"]
        assert errors_of_pod(spec) == []


MESH = "sidecar.istio.io/inject"


def test_every_pod_has_the_labels_and_annotations_that_are_given() -> None:
    given: Document = {"podLabels": {"team": "llm", MESH: "true"}, "podAnnotations": {"a/b": "c d"}}
    own = {"tests": {"podLabels": {MESH: "false"}, "podAnnotations": {"a/b": "e"}}}
    values = merged(NAMED, EVERYTHING, given, own)
    injected = {}
    for component, template in pod_templates(documents(values)).items():
        labels, annotations = (template["metadata"][name] for name in ("labels", "annotations"))
        assert labels["team"] == "llm", component
        assert labels["app.kubernetes.io/component"] == component
        assert annotations["a/b"] == ("e" if component == "test" else "c d"), component
        injected[component] = labels[MESH]
    # `helm uninstall` waits for the job's pod, and that for a sidecar that does not end
    assert injected.pop("uninstall") == injected.pop("test") == "false"
    assert set(injected.values()) == {"true"}
    values = merged(
        values,
        {"uninstall": {"podLabels": {MESH: None}, "podAnnotations": {"linkerd.io/inject": None}}},
    )
    job = pod_templates(documents(values))["uninstall"]["metadata"]
    assert (job["labels"][MESH], job["annotations"]) == ("true", given["podAnnotations"])


def test_security_contexts_can_be_emptied_and_replaced() -> None:
    ids: Document = {"runAsUser": 1000660000, "seccompProfile": {"type": "RuntimeDefault"}}
    rights: Document = {"privileged": False, "capabilities": {"add": ["SYS_NICE"]}}

    def of(**changes: Document) -> dict[str, tuple[list[Document], list[Document]]]:
        """By component: the pod's context, and those of its containers."""
        objects = documents(merged(NAMED, EVERYTHING, changes))
        found = {}
        for component, template in pod_templates(objects).items():
            spec = template["spec"]
            own = [*spec.get("initContainers", []), *spec["containers"]]
            found[component] = (
                [spec.get("securityContext", {})],
                [one.get("securityContext", {}) for one in own],
            )
            assert errors_of_pod(spec) == []
        return found

    names = {"podSecurityContext": ids, "securityContext": rights}
    defaults = of()
    for contexts, containers in defaults.values():
        assert contexts[0]["runAsUser"] in (10001, 999)
        assert all(one["readOnlyRootFilesystem"] for one in containers)
    for contexts, containers in of(podSecurityContext={}, securityContext={}).values():
        assert not any([*contexts, *containers])
    for contexts, containers in of(**names).values():
        assert contexts == [ids]
        assert all(one == rights for one in containers)
    of_redis = of(**{f"redis.internal.{name}": value for name, value in names.items()})
    assert of_redis.pop("redis") == ([ids], [rights, rights])
    assert of_redis == {name: found for name, found in defaults.items() if name != "redis"}
    scaled = merged(stage_values("multi-node"), {"securityContext": rights})
    assert cluster_of(documents(scaled))["autoscalerOptions"]["securityContext"] == rights


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


def test_images_are_pulled_with_the_secrets_that_are_named() -> None:
    for component, template in pod_templates(documents(merged(NAMED, EVERYTHING))).items():
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}], component


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
