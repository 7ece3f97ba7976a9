"""A release of the real chart, as kubectl and helm show it, with the stand-in for both on PATH."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.chart.charts import CHART, Document, documents, merged, one, pod_templates, stage_values

CLUSTER = "hermes-abcde"
REVIEW = "kubectl create -f - -o json"
"""Asks for permissions; it creates nothing."""
WHOLE: Document = {
    "whole": 8,
    "all": 8,
    "longest_pause_s": 1.7,
    "reconnected": 1,
    "attempts": {"1": 7, "2": 1},
    "failed": {},
    "lost": [],
    "duplicated": [],
    "corrupted": [],
}


class World:
    """The stand-in's folder. `path`: what belongs before the rest of PATH."""

    def __init__(self, folder: Path, *changes: Document, stage: str = "multi-node") -> None:
        self.folder = folder
        self.path = folder / "bin"
        self.path.mkdir()
        script = Path(__file__).with_name("stand_in.py").read_text()
        for name in ("kubectl", "helm"):
            (self.path / name).write_text(f"#!{sys.executable} -IS\n{script}")
            (self.path / name).chmod(0o755)
        self.write(**json.loads(_parts(stage, json.dumps(changes))))

    def write(self, **parts: Any) -> None:
        """Change a part of the world."""
        file = self.folder / "world.json"
        now = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**now, **parts}))

    def read(self, part: str) -> Any:
        """A part of the world."""
        return json.loads((self.folder / "world.json").read_text())[part]

    @property
    def calls(self) -> list[str]:
        """Every call so far, without the context and the namespace."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [" ".join(json.loads(line)) for line in lines]

    @property
    def changes(self) -> list[str]:
        """The calls that change something, without the client's words."""
        words = ("delete", "create", "drain", "uncordon", "label", "upgrade", "rollback", "exec")
        return [
            call
            for call in self.calls
            if call.split()[1] in words and "in_pod" not in call and call != REVIEW
        ]


@functools.cache
def _parts(stage: str, changes: str) -> str:
    """Rendering takes longer than most tests."""
    values = merged(stage_values(stage), *json.loads(changes))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    parts = {
        "releases": [
            {
                "name": "hermes",
                "revision": "3",
                "status": "deployed",
                "chart": "hermes-serve-0.2.0",
            }
        ],
        "values": merged(defaults, values),
        "owners": _owners(values),
        "pods": _pods(values),
        "others": [],
        "nodes": [_node(f"node-{n}") for n in range(1, 5)],
        "client_node": "node-1",
        "created": [],
        "denied": [],
        "failing": {},
        "held": "",
        "client": {
            "compared_with": "the texts of before the faults",
            "problem": "",
            "users": 8,
            "begun": 8,
            "running": 0,
            "ready": {
                "ready": True,
                "workers": 4,
                "workers_wanted": 2,
                "ingresses": 4,
                "ingresses_wanted": 4,
            },
        },
        "results": [WHOLE],
    }
    return json.dumps(parts)


def _node(name: str) -> Document:
    return {"kind": "Node", "metadata": {"name": name}, "spec": {}}


def _helms(item: Document) -> Document:
    notes = {"meta.helm.sh/release-name": "hermes", "meta.helm.sh/release-namespace": "prod"}
    item["metadata"] |= {"uid": f"uid-{item['metadata']['name']}", "annotations": notes}
    return item


def _owner(kind: str, name: str) -> list[Document]:
    return [{"kind": kind, "name": name, "uid": f"uid-{name}"}]


def _owners(values: Document) -> list[Document]:
    objects = documents(values)
    service = _helms(one(objects, "RayService"))
    service["status"] = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "activeServiceStatus": {"rayClusterName": CLUSTER},
    }
    cluster = {
        "kind": "RayCluster",
        "metadata": {
            "name": CLUSTER,
            "uid": f"uid-{CLUSTER}",
            "ownerReferences": _owner("RayService", "hermes"),
        },
    }
    sets = [_helms(item) for item in objects if item["kind"] == "StatefulSet"]
    return [service, cluster, *sets]


def _pods(values: Document) -> list[Document]:
    """Head and Redis on the first node, the others on one node each, in turn."""
    templates = pod_templates(documents(values))
    service = one(documents(values), "RayService")["spec"]["rayClusterConfig"]
    counts = {"head": 1, "redis": 1} if "redis" in templates else {"head": 1}
    for group in service["workerGroupSpecs"]:
        component = group["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        counts[component] = group["minReplicas"]
    pods = []
    for component, count in counts.items():
        for number in range(1, count + 1):
            labels = dict(templates[component]["metadata"]["labels"])
            if component == "redis":
                owner = _owner("StatefulSet", "hermes-redis")
                name = "hermes-redis-0"
            else:
                owner = _owner("RayCluster", CLUSTER)
                name = f"{CLUSTER}-{component}-{number}"
            node = "node-1" if component in ("head", "redis") else f"node-{number + 1}"
            pods.append(pod(name, node, labels, owner))
    return pods


def pod(
    name: str,
    node: str,
    labels: Document | None = None,
    owner: list[Document] | None = None,
    namespace: str = "prod",
) -> Document:
    """A pod that runs and is ready."""
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": labels or {},
            "ownerReferences": owner or [],
        },
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }
