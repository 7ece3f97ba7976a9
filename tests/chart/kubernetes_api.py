"""A few paths of the Kubernetes API, over TLS and with a token: one RayService, and the objects
that Helm makes, which are kept as they were sent.
"""

from __future__ import annotations

import json
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import helm_python
import trustme
import yaml

from tests import http_server
from tests.http_server import Asked, Wire, whole

TOKEN = "the-token"
PLACE = "/apis/ray.io/v1/namespaces/prod/rayservices/hermes"
KINDS = {
    "/api/v1": ("Secret", "ServiceAccount", "ConfigMap", "Service", "PersistentVolumeClaim"),
    "/apis/apps/v1": ("StatefulSet",),
    "/apis/networking.k8s.io/v1": ("NetworkPolicy",),
    "/apis/policy/v1": ("PodDisruptionBudget",),
    "/apis/ray.io/v1": ("RayService",),
}
"""What the chart makes by default, by where the API has it."""


def _plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def _discovery() -> dict[str, Any]:
    """Which kinds there are, and that the server itself looks for wrong fields."""
    shown: dict[str, Any] = {"/openapi/v3": {"paths": {}}}
    groups = []
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    for place, kinds in KINDS.items():
        version = {"groupVersion": place.split("/", 2)[2], "version": "v1"}
        group = version["groupVersion"].rpartition("/")[0]
        groups.append({"name": group, "versions": [version], "preferredVersion": version})
        resources = [
            {"name": _plural(kind), "kind": kind, "namespaced": True, "verbs": verbs}
            for kind in kinds
        ]
        shown[place] = {"groupVersion": version["groupVersion"], "resources": resources}
        checked = {"parameters": [{"name": "fieldValidation", "in": "query"}]}
        patches = {
            f"/{kind}": {
                "patch": {
                    **checked,
                    "x-kubernetes-group-version-kind": {
                        "group": group,
                        "version": "v1",
                        "kind": kind,
                    },
                }
            }
            for kind in kinds
        }
        shown[f"/openapi/v3{place}"] = {"openapi": "3.0.0", "paths": patches}
        shown["/openapi/v3"]["paths"][place[1:]] = {"serverRelativeURL": f"/openapi/v3{place}"}
    return {
        **shown,
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.2"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups[1:]},
    }


DISCOVERY = _discovery()


@dataclass
class Cluster:
    """What the API shows. `looks`: how often a deleted RayService is still seen."""

    folder: Path
    service: dict[str, Any] | None = None
    looks: int = 0
    forbidden: bool = False
    asked: list[str] = field(default_factory=list)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    port: int = 0

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """The status and the body."""
        if self.forbidden:
            return 403, {"message": f'hermes-uninstall cannot {method} "{path}"'}
        if path in DISCOVERY:
            return 200, DISCOVERY[path]
        if path == PLACE and self.service is not None:
            return 200, self._shown(method)
        if method == "GET" and path.rpartition("/")[2] in ("serviceaccounts", "secrets"):
            return 200, {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": []}
        if method == "POST":
            path += "/" + yaml.safe_load(body)["metadata"]["name"]
        if method in ("PATCH", "POST", "PUT"):
            self.objects[path] = yaml.safe_load(body)
        if path not in self.objects:
            return 404, "404 page not found"  # what an unknown group says, and no JSON
        return 200, self.objects[path]

    def _shown(self, method: str) -> dict[str, Any]:
        assert self.service is not None
        shown, metadata = self.service, self.service["metadata"]
        if method == "DELETE":
            metadata |= {"deletionTimestamp": "x", "finalizers": ["ray.io/rayservice-finalizer"]}
        elif "deletionTimestamp" in metadata:
            self.looks -= 1
        if self.looks == 0:
            self.service = None
        return shown


@contextmanager
def serving(cluster: Cluster) -> Iterator[Cluster]:
    """Serve it on a free port. `cluster.folder` gets what a pod's account has."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(cluster.folder / "ca.crt"))
    (cluster.folder / "token").write_text(f"{TOKEN}\n")

    def play(asked: Asked, wire: Wire) -> None:
        path = asked.path.split("?")[0]
        cluster.asked.append(f"{asked.method} {path}")
        allowed = asked.headers.get("authorization") == f"Bearer {TOKEN}"
        status, body = cluster.answer(asked.method, path, asked.body) if allowed else (401, "who?")
        text = body if isinstance(body, str) else json.dumps(body)
        wire.send(whole(status, text.encode()))

    with http_server.serving(play, context) as server:
        cluster.port = server.port
        yield cluster


def helm_on(cluster: Cluster) -> Any:
    """Helm that talks to it and keeps its releases in memory. Helm reads the certificates of a
    path once, so that each gets a path of its own.
    """
    copy = Path(tempfile.mkdtemp(dir=cluster.folder)) / "ca.crt"
    copy.write_bytes((cluster.folder / "ca.crt").read_bytes())
    return helm_python.Config(
        namespace="prod",
        storage_driver="memory",
        kube_apiserver=f"https://127.0.0.1:{cluster.port}",
        kube_ca_file=copy,
        kube_token=TOKEN,
    )
