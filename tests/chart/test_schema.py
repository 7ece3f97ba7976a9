"""The schema of the values is up to date with the service's settings, and refuses unknown
values.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import yaml

from tests.chart import kinds
from tests.chart.charts import CHART, NAMED, ROOT, Document, merged
from tests.chart.test_objects import NEWEST
from tests.chart.test_refusals import refusal
from tests.tables import each


def script() -> Any:
    spec = importlib.util.spec_from_file_location("chart_schema", ROOT / "helm" / "schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_schema_is_the_one_that_its_script_writes() -> None:
    script_ = script()
    for file, text in ((script_.FILE, script_.schema()), (script_.RULES, script_.rules())):
        assert file.read_text() == text, "run: .venv/bin/python helm/schema.py"


def test_the_types_of_kubernetes_have_all_of_its_fields_and_no_others() -> None:
    """But for Windows and the Gateway API, whose schemas are not at hand."""
    ours, core = script().KUBERNETES, "io.k8s.api.core.v1."
    groups = {
        "LabelSelector": "io.k8s.apimachinery.pkg.apis.meta.v1.",
        "NetworkPolicyPeer": "io.k8s.api.networking.v1.",
    }
    inner = {
        ("Affinity", "nodeAffinity"): f"{core}NodeAffinity",
        ("Affinity", "podAffinity"): f"{core}PodAffinity",
        ("SecurityContext", "capabilities"): f"{core}Capabilities",
        ("SecurityContext", "seccompProfile"): f"{core}SeccompProfile",
        ("PodSecurityContext", "seLinuxOptions"): f"{core}SELinuxOptions",
        ("NetworkPolicyPeer", "ipBlock"): "io.k8s.api.networking.v1.IPBlock",
    }
    known: dict[tuple[str, ...], str] = {
        (name,): groups.get(name, core) + name for name in ours if name != "ParentReference"
    }
    for path, theirs in (*known.items(), *inner.items()):
        node = ours[path[0]]
        for name in path[1:]:
            node = node["properties"][name]
        fields = kinds.fields(theirs, NEWEST)
        assert set(node["properties"]) == set(fields) - {"windowsOptions"}, path
        for name, field in node["properties"].items():
            if "type" in fields[name] and "type" in field:
                assert field["type"] in fields[name]["type"], (path, name)


MAY_BE_NULL = (
    "commonLabels",
    "commonAnnotations",
    "settings.engine.args",
    "hub.access",
    "redis.external.cidrs",
    *script().PODS.keys() & VALUES.keys(),
    "ingressPods.topologySpreadConstraints",
    "uninstall.podLabels",
    "uninstall.podLabels.sidecar.istio.io/inject",
    "uninstall.podAnnotations",
    "uninstall.podAnnotations.linkerd.io/inject",
    "env",
    "serviceAccount.annotations",
    "networkPolicy.servingFrom",
    "networkPolicy.dnsCidrs",
    "networkPolicy.storageTo",
    "networkPolicy.tracesTo",
    "ingress.annotations",
    "httpRoute.hosts",
    "httpRoute.parentRefs",
    "monitoring.labels",
    "monitoring.dashboard.labels.grafana_dashboard",
)
"""Helm removes a value that is null, or has nothing below it in YAML: here that means none."""


def test_every_other_value_is_required() -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)

    def without_one(values: Document, parents: str = "") -> Iterator[tuple[str, Document]]:
        for key, value in values.items():
            yield parents + key, {k: v for k, v in values.items() if k != key}
            if isinstance(value, dict):
                for path, rest in without_one(value, f"{parents}{key}."):
                    yield path, {**values, key: rest}

    accepted = [path for path, rest in without_one(VALUES) if validator.is_valid(rest)]
    assert sorted(accepted) == sorted(MAY_BE_NULL)


@each("path", [path for path in MAY_BE_NULL if "/" not in path])  # those have dots in their names
def test_what_may_be_null_is_as_none(path: str) -> None:
    assert refusal(merged(NAMED, {path: None})) == ""


OF_KUBERNETES = [f"#/$defs/{name}" for name in script().KUBERNETES]


def values_without_a_description(node: Document, path: str = "") -> Iterator[str]:
    """Every value below a node, but for those inside of Kubernetes' own types."""
    for name, value in node.get("properties", {}).items():
        nodes = [value]
        for one in nodes:  # and what it refers to
            nodes += one.get("anyOf", [])
            if "$ref" in one and one["$ref"] not in OF_KUBERNETES:
                _, place, key = one["$ref"].split("/")
                nodes.append(SCHEMA[place][key])
        if not any("description" in one for one in nodes):
            yield f"{path}{name}"
        for one in nodes:
            yield from values_without_a_description(one, f"{path}{name}.")


def test_every_value_is_described() -> None:
    assert list(values_without_a_description(SCHEMA)) == []
    said = script().comments()
    assert said["drainSeconds"].startswith("How long a terminating ingress or engine pod waits")
    assert said["redis.internal.exporter.image.tag"] == "its version"
    assert SCHEMA["properties"]["podSecurityContext"]["description"] == said["podSecurityContext"]
