"""A few paths of the Kubernetes API, over TLS and with a token, for one RayService."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

from tests import http_server
from tests.http_server import Asked, Wire, whole

TOKEN = "the-token"
PLACE = "/apis/ray.io/v1/namespaces/prod/rayservices/hermes"
KIND: dict[str, Any] = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": "ray.io/v1",
    "resources": [
        {
            "name": "rayservices",
            "singularName": "rayservice",
            "kind": "RayService",
            "namespaced": True,
            "verbs": ["get"],
        }
    ],
}


@dataclass
class Cluster:
    """What the API shows. `looks`: how often a deleted RayService is still seen."""

    folder: Path
    service: dict[str, Any] | None = None
    looks: int = 0
    forbidden: bool = False
    asked: list[str] = field(default_factory=list)
    port: int = 0

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        """The status and the body."""
        if self.forbidden:
            return 403, {"message": f'hermes-uninstall cannot {method} "{path}"'}
        if path in self._discovery():
            return 200, self._discovery()[path]
        if path != PLACE or self.service is None:
            return 404, "404 page not found"  # what an unknown group says, and no JSON
        metadata = self.service["metadata"]
        if method == "DELETE":
            metadata |= {"deletionTimestamp": "x", "finalizers": ["ray.io/rayservice-finalizer"]}
        elif "deletionTimestamp" in metadata:
            self.looks -= 1
        shown = self.service
        if self.looks == 0:
            self.service = None
        return 200, shown

    def _discovery(self) -> dict[str, Any]:
        version = {"groupVersion": "ray.io/v1", "version": "v1"}
        group = {"name": "ray.io", "versions": [version], "preferredVersion": version}
        return {
            "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.2"},
            "/api": {"kind": "APIVersions", "versions": []},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
            "/apis/ray.io/v1": KIND,
        }


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
        status, body = cluster.answer(asked.method, path) if allowed else (401, "who?")
        text = body if isinstance(body, str) else json.dumps(body)
        wire.send(whole(status, text.encode()))

    with http_server.serving(play, context) as server:
        cluster.port = server.port
        yield cluster
