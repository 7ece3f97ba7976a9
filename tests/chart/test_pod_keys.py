"""Every pod of the chart takes the keys that charts usually have for pods, from the values of all
pods and from those of its own section.
"""

from __future__ import annotations

import itertools
from typing import Any

from tests.chart.charts import (
    EVERYTHING,
    NAMED,
    Document,
    cluster_of,
    documents,
    merged,
    one,
    pod_templates,
    stage_values,
)
from tests.chart.test_objects import errors_of_pod
from tests.chart.test_references import found
from tests.tables import each

SECTIONS = {
    "head": "head",
    "ingress": "ingressPods",
    "engine": "engines",
    "redis": "redis.internal",
    "uninstall": "uninstall",
    "test": "tests",
}


def given(by: str) -> Document:
    """A value of each key, in which `by` says where it was set."""
    return {
        "podLabels": {by: "a", "of": by},
        "podAnnotations": {f"{by}/a": "b"},
        "imagePullSecrets": [{"name": by}],
        "nodeSelector": {by: "a"},
        "tolerations": [{"key": by, "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"topologyKey": by, "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": by,
        "runtimeClassName": by,
        "extraEnv": [{"name": by.upper(), "value": "a"}, {"name": "OF", "value": by}],
        "extraEnvFrom": [{"configMapRef": {"name": by}}],
        "extraVolumes": [{"name": by, "emptyDir": {}}],
        "extraVolumeMounts": [{"name": by, "mountPath": f"/{by}"}],
        "initContainers": [{"name": f"{by}-first", "image": "a:1"}],
        "extraContainers": [{"name": f"{by}-beside", "image": "a:1"}],
        "podSecurityContext": {"runAsUser": 7},
        "containerSecurityContext": {"privileged": False},
    }


KEYS = tuple(given("all"))
FIELDS = {
    "extraVolumes": "volumes",
    "extraContainers": "containers",
    "podSecurityContext": "securityContext",
    "extraEnv": "env",
    "extraEnvFrom": "envFrom",
    "extraVolumeMounts": "volumeMounts",
    "containerSecurityContext": "securityContext",
}
ADDED = {"first", "beside"}
"""How the names of the containers that `given` adds end."""


def shown(template: Document, key: str) -> list[Any]:
    """What a pod has of a key: once, or of each of the chart's own containers."""
    spec, metadata = template["spec"], template["metadata"]
    if key in ("podLabels", "podAnnotations"):
        return [metadata[key[3:].lower()]]
    if key in ("extraEnv", "extraEnvFrom", "extraVolumeMounts", "containerSecurityContext"):
        return [container.get(FIELDS[key]) for container in own_containers(spec)]
    return [spec.get(FIELDS.get(key, key))]


def own_containers(spec: Document) -> list[Document]:
    both = [*spec.get("initContainers", []), *spec["containers"]]
    return [item for item in both if item["name"].rpartition("-")[2] not in ADDED]


def holds(there: Any, value: Any) -> bool:
    """Whether a value is there, possibly among others."""
    if isinstance(value, dict) and isinstance(there, dict):
        return value.items() <= there.items()
    if isinstance(value, list) and isinstance(there, list):
        return all(item in there for item in value)
    return bool(there == value)


ALL = pod_templates(documents(merged(NAMED, EVERYTHING, given("all"))))
OWN = pod_templates(
    documents(
        merged(
            NAMED,
            EVERYTHING,
            given("all"),
            {section: given(component) for component, section in SECTIONS.items()},
        )
    )
)


def test_the_table_has_every_pod() -> None:
    assert set(ALL) == set(SECTIONS)


@each("component, key", itertools.product(SECTIONS, KEYS))
def test_every_pod_takes_every_key(component: str, key: str) -> None:
    for there in shown(ALL[component], key):
        assert holds(there, given("all")[key]), there


@each("component, key", itertools.product(SECTIONS, KEYS))
def test_a_pods_own_section_adds_to_it_or_replaces_it(component: str, key: str) -> None:
    mine, of_all = given(component)[key], given("all")[key]
    for there in shown(OWN[component], key):
        assert holds(there, mine), there
        if isinstance(mine, list):
            assert holds(there, [item for item in of_all if item.get("name") != "OF"]), there
    for there in shown(OWN[component], "podLabels"):
        assert holds(there, {"all": "a", "of": component})


@each("component", SECTIONS)
def test_the_result_is_a_valid_pod(component: str) -> None:
    for template in (ALL[component], OWN[component]):
        assert errors_of_pod(template["spec"]) == []
        for container in own_containers(template["spec"]):
            names = [variable["name"] for variable in container["env"]]
            assert len(names) == len(set(names)), "an API server refuses a second"
        # KubeRay takes the first for Ray's.
        assert template["spec"]["containers"][0]["name"] != "all-beside"


def test_the_containers_beside_the_first_take_their_own_keys() -> None:
    mine = {
        "extraEnv": [{"name": "OF", "value": "it"}],
        "resources": {"requests": {"cpu": "7"}, "limits": {"example.org/nic": 1}},
    }
    values = merged(stage_values("multi-node"), EVERYTHING, given("all"))
    objects = documents(merged(values, {"redis.internal.exporter": mine, "autoscaler": mine}))
    exporter = pod_templates(objects)["redis"]["spec"]["containers"][1]
    for container in (exporter, cluster_of(objects)["autoscalerOptions"]):
        assert holds(container["env"], [*mine["extraEnv"], {"name": "ALL", "value": "a"}])
        assert container["securityContext"] == {"privileged": False}
        assert container["resources"]["requests"]["cpu"] == "7"
        assert container["resources"]["limits"].keys() == {"memory", "cpu", "example.org/nic"}


@each("component, section", SECTIONS.items())
def test_resources_go_over_those_of_the_chart(component: str, section: str) -> None:
    mine = {"requests": {"memory": "1Ti"}, "limits": {"memory": "2Ti", "ephemeral-storage": "1Gi"}}
    pods = pod_templates(documents(merged(NAMED, {f"{section}.resources": mine})))
    for name, template in pods.items():
        first, *others = template["spec"]["containers"]
        resources = first["resources"]
        assert (mine["limits"].items() <= resources["limits"].items()) == (name == component)
        assert {"cpu", "memory"} <= resources["requests"].keys()
        others += template["spec"].get("initContainers", [])
        assert not [other for other in others if "ephemeral-storage" in str(other["resources"])]


@each("nothing", [None, {}])
def test_security_contexts_can_be_emptied_as_openshift_needs_it(nothing: Document | None) -> None:
    keys = ("podSecurityContext", "containerSecurityContext")
    defaults = pod_templates(documents(merged(NAMED, EVERYTHING)))
    emptied = pod_templates(documents(merged(NAMED, EVERYTHING, dict.fromkeys(keys, nothing))))
    of_redis = {f"redis.internal.{key}": nothing for key in keys}
    redis_emptied = pod_templates(documents(merged(NAMED, EVERYTHING, of_redis)))
    for component, template in defaults.items():
        assert "'securityContext'" in str(template), component
        assert "'securityContext'" not in str(emptied[component]), component
        if component != "redis":
            assert redis_emptied[component] == template
    assert "'securityContext'" not in str(redis_emptied["redis"])


def test_every_object_takes_common_labels_and_annotations_and_another_name() -> None:
    common = {"commonLabels": {"team": "llm"}, "commonAnnotations": {"a/b": "c"}}
    objects = documents(merged(NAMED, EVERYTHING, common, {"fullnameOverride": "other"}))
    metadata = [item["metadata"] for item in objects]
    metadata += [template["metadata"] for template in pod_templates(objects).values()]
    for item in metadata:
        assert item["labels"]["team"] == "llm"
        assert item["labels"]["app.kubernetes.io/instance"] == "hermes"
        assert item["labels"]["app.kubernetes.io/name"] == "hermes-serve"
        assert item["annotations"]["a/b"] == "c"
        assert item.get("name", "other").startswith("other")
    assert set(found(objects, "serviceAccountName")) == {"other", "other-head", "other-uninstall"}
    named = documents(merged(NAMED, {"nameOverride": "llm"}))
    assert one(named, "RayService")["metadata"]["name"] == "hermes-llm"
    assert one(named, "RayService")["metadata"]["labels"]["app.kubernetes.io/name"] == "llm"


@each(
    "account, accounts",
    [
        ({"name": "mine"}, {"mine", "mine-head", "hermes-uninstall"}),
        ({"create": False, "name": "mine"}, {"mine"}),
        ({"create": False}, {"default"}),
    ],
)
def test_pods_use_the_accounts_that_are_named(account: Document, accounts: set[str]) -> None:
    objects = documents(merged(NAMED, {"serviceAccount": account}))
    assert set(found(objects, "serviceAccountName")) == accounts
    made = {item["metadata"]["name"] for item in objects if item["kind"] == "ServiceAccount"}
    assert made == (accounts if account.get("create", True) else set())
    (subject,) = one(objects, "RoleBinding")["subjects"]
    assert subject["name"] in accounts


MESH = "sidecar.istio.io/inject"


def test_the_job_of_uninstall_is_left_out_of_meshes() -> None:
    """`helm uninstall` waits for the job's pod, and that for a sidecar that does not end."""
    injected = pod_templates(documents(merged(NAMED, {"podLabels": {MESH: "true"}})))
    assert injected.pop("uninstall")["metadata"]["labels"][MESH] == "false"
    assert {pod["metadata"]["labels"][MESH] for pod in injected.values()} == {"true"}
