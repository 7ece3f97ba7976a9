"""The chart, rendered offline: values, documents, and what KubeRay adds to them."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, NoReturn

import helm_python
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "hermes-serve"
DATA = Path(os.environ.get("HERMES_DATA", ROOT / ".hermes" / "data"))
STAGES = ("single-gpu", "multi-gpu", "multi-node", "cpu")

Document = dict[str, Any]


class Loader(yaml.CSafeLoader):
    """Refuses duplicate keys, as Kubernetes does and YAML parsers do not."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise ValueError(f"{twice} twice in one mapping{node.start_mark}")
        return super().construct_mapping(node, deep)


def merged(*changes: Document) -> Document:
    """Values laid over each other, as Helm merges them. A name may be a path, as of `--set`."""
    result: Document = {}
    for change in changes:
        for path, value in change.items():
            first, *names = path.split(".")
            for name in reversed(names):
                value = {name: value}
            _lay_over(result, {first: value})
    return result


def _lay_over(result: Document, change: Document) -> None:
    for key, value in change.items():
        if isinstance(result.get(key), dict) and isinstance(value, dict):
            _lay_over(result[key], value)
        else:
            result[key] = copy.deepcopy(value)


TWO = merged({"image.repository": "registry.example/hermes-serve", "model": "org/big"})
"""Values that every installation must set."""
SECRETS = merged(
    {
        "auth.existingSecret": "hermes-keys",
        "redis.internal.existingSecret": "hermes-redis",
        "redis.ha.existingSecret": "hermes-redis",
    }
)
"""What they must set, too, where Helm does not see the cluster, as here."""
NAMED = merged(
    SECRETS,
    {
        "image.repository": "registry.example/hermes-serve",
        "settings.model": {"name": "big", "source": "/models/big"},
        "weights.existingClaim": "models",
    },
)
"""A model on a volume."""
INGRESS_NGINX = {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}
EVERYTHING: Document = {
    "hub": {"access": True, "existingSecret": "hermes-hub"},
    "redis.internal.exporter.enabled": True,
    "ingress": {"enabled": True, "host": "llm.example.org", "tlsSecret": "llm-tls"},
    "monitoring.podMonitors": True,
    "monitoring.rules.enabled": True,
    "monitoring.dashboard.enabled": True,
    "weights": {"create": True, "existingClaim": "", "readOnly": False},
    "networkPolicy.servingFrom": [{"namespaceSelector": INGRESS_NGINX}],
    "imagePullSecrets": [{"name": "registry"}],
    "cpuLimits": True,
}
"""Values that enable every optional part."""
ELSEWHERE = {"redis.internal.enabled": False, "redis.external.enabled": True}
EXTERNAL: Document = {
    **ELSEWHERE,
    "redis.external.existingSecret": "redis-url",
    "redis.external.gcsAddress": "redis.example.org:6379",
    "redis.external.cidrs": ["10.1.2.3/32"],
}
TLS = {
    "redis.external.caKey": "ca.pem",
    "redis.external.gcsAddress": "rediss://redis.example.org:6379",
}
HA: Document = yaml.safe_load((CHART / "values-ha.yaml").read_text())


def stage_values(stage: str) -> Document:
    """`NAMED` and a stage's file, which takes precedence."""
    return merged(NAMED, yaml.safe_load((CHART / f"values-{stage}.yaml").read_text()))


def rendered(values: Document) -> dict[str, str]:
    """Every template's text. Each set of values is rendered once."""
    return _rendered(json.dumps(values, sort_keys=True))


@functools.cache
def _rendered(values: str) -> dict[str, str]:
    # Loaded anew: rendering changes the handle.
    chart = helm_python.Chart.load(str(CHART))
    return dict(chart.render(json.loads(values), name="hermes", namespace="prod"))


def documents(values: Document) -> list[Document]:
    """Every object of a release; each set of values is read once, and each caller may change what
    it gets.
    """
    found: list[Document] = pickle.loads(_documents(json.dumps(values, sort_keys=True)))
    return found


@functools.cache
def _documents(values: str) -> bytes:
    texts = [text for path, text in _rendered(values).items() if not path.endswith("NOTES.txt")]
    return pickle.dumps([item for text in texts for item in yaml.load_all(text, Loader) if item])


def one(objects: list[Document], kind: str, name: str = "") -> Document:
    """The only object of a kind, or the one with this name."""
    found = [o for o in objects if o["kind"] == kind and name in ("", o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def cluster_of(objects: list[Document]) -> Document:
    """The Ray cluster of a release."""
    found: Document = one(objects, "RayService")["spec"]["rayClusterConfig"]
    return found


def ray_groups(objects: list[Document]) -> dict[str, Document]:
    """Its head and its worker groups, by name."""
    cluster = cluster_of(objects)
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


def environment(template: Document) -> dict[str, str]:
    """The values of a pod's variables; empty where they come from elsewhere."""
    variables = template["spec"]["containers"][0].get("env", [])
    return {item["name"]: item.get("value", "") for item in variables}


def pod_templates(objects: list[Document]) -> dict[str, Document]:
    """Every pod that the release starts, by component, with the labels that KubeRay adds."""
    templates = {}
    for item in objects:
        if item["kind"] == "StatefulSet":
            templates["redis"] = item["spec"]["template"]
        if item["kind"] == "Pod":
            templates["test"] = item
        if item["kind"] == "Job":
            templates["uninstall"] = item["spec"]["template"]
    for name, group in ray_groups(objects).items():
        template = copy.deepcopy(group["template"])
        labels = template["metadata"]["labels"]
        labels["ray.io/node-type"] = "head" if name == "head" else "worker"
        labels["ray.io/cluster"] = "hermes-abcde"
        templates[labels["app.kubernetes.io/component"]] = template
    return templates


def needed(path: str) -> Path:
    """A file of `$HERMES_DATA`. If it is absent, the test fails in CI and is skipped elsewhere."""
    file = DATA / path
    if not file.exists():
        _lacking(f"{file} is absent: scripts/fetch-data brings it (or set HERMES_DATA)")
    return file


def program(name: str, package: str) -> str:
    """The path of a program. If it is absent, the test fails in CI and is skipped elsewhere."""
    found = shutil.which(name)
    return found or _lacking(f"{name} is absent (Debian has it in `{package}`)")


def _lacking(message: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
