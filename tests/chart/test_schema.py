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
    "image.pullSecrets",
    "settings.engine.args",
    "redis.internal.scheduling",
    "redis.external.cidrs",
    "head.scheduling",
    "ingressPods.scheduling",
    "ingressPods.scheduling.topologySpreadConstraints",
    "engines.scheduling",
    "uninstall.podLabels.sidecar.istio.io/inject",
    "uninstall.podAnnotations.linkerd.io/inject",
    "env",
    "podLabels",
    "podAnnotations",
    "serviceAccount.annotations",
    "networkPolicy.servingFrom",
    "networkPolicy.dnsCidrs",
    "networkPolicy.tracesTo",
    "ingress.annotations",
    "httpRoute.hosts",
    "httpRoute.parentRefs",
    "monitoring.labels",
    "monitoring.dashboard.labels.grafana_dashboard",
    "tests.podLabels",
    "tests.podAnnotations",
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
    assert accepted == list(MAY_BE_NULL)


@each("path", [path for path in MAY_BE_NULL if "/" not in path])  # those have dots in their names
def test_what_may_be_null_is_as_none(path: str) -> None:
    assert refusal(merged(NAMED, {path: None})) == ""
