"""Objects refer to each other correctly: selectors match pods, ports have names, and volumes and
Secrets exist or are requested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.chart.charts import (
    EVERYTHING,
    EXTERNAL,
    NAMED,
    Document,
    cluster_of,
    documents,
    merged,
    one,
    pod_templates,
    rendered,
    stage_values,
)
from tests.chart.test_objects import EVERY, release
from tests.tables import each

DECLARED = {
    *("hermes-keys", "hermes-redis", "hermes-hub", "redis-url", "llm-tls", "registry", "models"),
}
"""Secrets and claims that exist according to the values of these tests."""

BY_KUBERAY = {"hermes-serve-svc": {"serve": 8000}, "hermes-head-svc": {"serve": 8000}}

BY_REDIS_HA = [
    {"app": app, "release": "hermes-redis-ha"} for app in ("redis-ha", "redis-ha-haproxy")
]
"""The labels of the pods of the other chart (docs/kubernetes.md)."""


def matches(selector: Document, labels: Document) -> bool:
    """Whether a selector matches, by Kubernetes' rules."""
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def found(node: Any, key: str) -> Iterator[Any]:
    """Every value under this key, at any depth."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from found(value, key)
    if isinstance(node, list):
        for item in node:
            yield from found(item, key)


def containers(objects: list[Document]) -> Iterator[tuple[str, Document]]:
    for component, template in pod_templates(objects).items():
        spec = template["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield component, container


def matches_one_of(selector: Document, objects: list[Document], *more: Document) -> bool:
    """Whether a selector finds a pod of the release, or one with the labels `more`."""
    labels = [template["metadata"]["labels"] for template in pod_templates(objects).values()]
    return any(matches(selector, of_pod) for of_pod in (*labels, *more))


def of_kind(objects: list[Document], kind: str) -> list[Document]:
    return [item for item in objects if item["kind"] == kind]


@each("stage, variant", EVERY)
def test_every_selector_finds_a_pod(stage: str, variant: str) -> None:
    objects = release(stage, variant)
    for item in objects:
        spec = item.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if item["kind"] == "Service":
            selector = {"matchLabels": selector}
        if item["kind"] != "ServiceMonitor" and selector:
            assert matches_one_of(selector, objects), item["metadata"]["name"]


@each("stage, variant", EVERY)
def test_every_peer_of_a_network_policy_is_a_pod_of_ours_or_a_namespace(
    stage: str, variant: str
) -> None:
    objects = release(stage, variant)
    for policy in of_kind(objects, "NetworkPolicy"):
        peers = [*found(policy["spec"], "from"), *found(policy["spec"], "to")]
        for selector in found(peers, "podSelector"):
            assert matches_one_of(selector, objects, *BY_REDIS_HA), policy["metadata"]["name"]


@each("stage, variant", EVERY)
def test_every_port_that_is_named_exists(stage: str, variant: str) -> None:
    objects = release(stage, variant)
    wanted = [
        (
            monitor["spec"]["selector"],
            {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]},
        )
        for monitor in of_kind(objects, "PodMonitor")
    ]
    for service in of_kind(objects, "Service"):
        named = {port["targetPort"] for port in service["spec"]["ports"]}
        wanted.append(({"matchLabels": service["spec"]["selector"]}, named))
    for template in pod_templates(objects).values():
        own = [set_of_ports(container) for container in template["spec"]["containers"]]
        for selector, named in wanted:
            if matches(selector, template["metadata"]["labels"]):
                assert named <= set().union(*own), selector
    for _, container in containers(objects):
        probed = {probe["port"] for probe in found(container, "httpGet")}
        assert probed <= set_of_ports(container)


def set_of_ports(container: Document) -> set[str]:
    return {port["name"] for port in container.get("ports", [])}


@each("stage, variant", EVERY)
def test_every_service_behind_a_door_exists(stage: str, variant: str) -> None:
    objects = release(stage, variant)
    for ingress in of_kind(objects, "Ingress"):
        for backend in found(ingress, "service"):
            assert backend["port"]["number"] in BY_KUBERAY[backend["name"]].values()
    for monitor in of_kind(objects, "ServiceMonitor"):
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} == {"serve"}


@each("stage, variant", EVERY)
def test_every_secret_claim_and_account_exists_or_was_named_in_the_values(
    stage: str, variant: str
) -> None:
    objects = release(stage, variant)
    ours = {(item["kind"], item["metadata"]["name"]) for item in objects}
    secrets = {ref["name"] for ref in found(objects, "secretKeyRef")} | set(
        found(objects, "secretName")
    )
    secrets |= {ref["name"] for refs in found(objects, "imagePullSecrets") for ref in refs}
    assert secrets <= DECLARED
    # Kubernetes puts the certificates of its API into every namespace.
    ours_or_its = ours | {("ConfigMap", "kube-root-ca.crt")}
    assert {("ConfigMap", source["name"]) for source in found(objects, "configMap")} <= ours_or_its
    assert {("ServiceAccount", name) for name in found(objects, "serviceAccountName")} <= ours
    claims = {("PersistentVolumeClaim", name) for name in found(objects, "claimName")}
    assert claims <= ours | {("PersistentVolumeClaim", "models")}


@each("stage, variant", EVERY)
def test_every_mount_has_its_volume_and_every_volume_a_mount(stage: str, variant: str) -> None:
    objects = release(stage, variant)
    autoscaler = cluster_of(objects).get("autoscalerOptions", {})
    of_autoscaler = {mount["name"] for mount in autoscaler.get("volumeMounts", [])}
    for component, template in pod_templates(objects).items():
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        volumes |= {"data"} if component == "redis" else set()  # from its claim template
        mounted = {
            mount["name"]
            for c in template["spec"]["containers"]
            for mount in c.get("volumeMounts", [])
        }
        assert mounted | (of_autoscaler if component == "head" else set()) == volumes, component


@each("stage, variant", EVERY)
def test_every_container_that_stays_has_its_three_probes(stage: str, variant: str) -> None:
    objects = release(stage, variant)
    for component, container in containers(objects):
        if component not in ("test", "uninstall") and container["name"] != "check-redis":
            probes = {"startupProbe", "livenessProbe", "readinessProbe"}
            assert probes <= container.keys(), container["name"]


@each("stage, variant", EVERY)
def test_every_pod_and_container_is_locked_down(stage: str, variant: str) -> None:
    objects = release(stage, variant)
    contexts = [(c["name"], c["securityContext"]) for _, c in containers(objects)]
    options = cluster_of(objects).get("autoscalerOptions")
    contexts += [("autoscaler", options["securityContext"])] if options else []
    for name, context in contexts:
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
    for component, template in pod_templates(objects).items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, component
        assert spec["securityContext"]["runAsUser"] > 0, component
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, component
        asks = component == "uninstall"  # Ray does not run there
        assert spec["automountServiceAccountToken"] is asks, component


def test_only_the_autoscaler_holds_a_token_for_the_kubernetes_api() -> None:
    # Ray runs whatever it is sent: what its container holds, everybody holds who reaches it.
    objects = documents(stage_values("multi-node"))
    cluster = cluster_of(objects)
    place = "/var/run/secrets/kubernetes.io/serviceaccount"
    (token,) = [
        m["name"] for m in cluster["autoscalerOptions"]["volumeMounts"] if m["mountPath"] == place
    ]
    volumes = {v["name"]: v for v in cluster["headGroupSpec"]["template"]["spec"]["volumes"]}
    sources = volumes[token]["projected"]["sources"]
    as_kubernetes_mounts_them = {"token", "ca.crt", "namespace"}
    assert set(found(sources, "path")) == as_kubernetes_mounts_them
    for component, container in containers(objects):
        mounted = [mount["name"] for mount in container.get("volumeMounts", [])]
        assert token not in mounted, component
    assert "serviceAccountToken" not in str(documents(stage_values("multi-gpu")))


@each("stage, variant", EVERY)
def test_every_container_says_what_it_takes(stage: str, variant: str) -> None:
    objects = release(stage, variant)
    for _, container in containers(objects):
        resources = container["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"])
        assert resources["limits"]["memory"] == resources["requests"]["memory"]


@each("stage, variant", EVERY)
def test_every_image_has_a_version(stage: str, variant: str) -> None:
    objects = release(stage, variant)
    for _, container in containers(objects):
        tag = re.fullmatch(r"[^@]+?(?::([\w.-]+)|@sha256:[0-9a-f]{64})", container["image"])
        assert tag, container["image"]
        assert tag.group(1) != "latest"


def test_a_digest_takes_the_place_of_the_tag() -> None:
    digest = "sha256:" + "a" * 64
    head = pod_templates(documents(merged(NAMED, {"image.digest": digest})))["head"]
    assert head["spec"]["containers"][0]["image"] == f"registry.example/hermes-serve@{digest}"


@each("changes", [EVERYTHING, EXTERNAL])
def test_secrets_stand_in_no_object(changes: Document) -> None:
    # All that the values could name is a Secret and a key in it; a password in a URL or a literal
    # would be ours.
    values = merged(stage_values("multi-node"), changes)
    objects = documents(values)
    for _, container in containers(objects):
        for variable in container.get("env", []):
            if re.search("PASSWORD|TOKEN|API_KEY|SECRET", variable["name"]):
                assert set(variable["valueFrom"]) == {"secretKeyRef"}, variable["name"]
    texts = rendered(values)
    assert not [
        path for path, text in texts.items() if re.search(r"rediss?://[^$\s]*:[^$\s]+@", text)
    ]
    assert not of_kind(objects, "Secret")
    for item in of_kind(objects, "ConfigMap"):
        assert "secretKeyRef" not in str(item)
        assert "HERMES_REDIS_URL" not in str(item)
    assert "redis" not in str(one(objects, "RayService")["spec"]["serveConfigV2"])


def test_a_disruption_leaves_all_pods_but_one() -> None:
    objects = documents(stage_values("multi-node"))
    assert one(objects, "PodDisruptionBudget", "hermes-ingress")["spec"]["minAvailable"] == 3
    assert one(objects, "PodDisruptionBudget", "hermes-engine")["spec"]["minAvailable"] == 1
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    # One pod cannot lose one and leave one: a budget would only keep nodes from being drained.
    assert not of_kind(documents(stage_values("cpu")), "PodDisruptionBudget")
