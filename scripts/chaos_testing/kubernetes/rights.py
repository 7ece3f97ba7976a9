"""What a user must be allowed to do, for each fault, and whether this user may."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.chaos_testing.kubernetes.cluster import Cluster

Right = tuple[str, str]
"""A verb and a resource with its API group: `pods/exec`, `networkpolicies.networking.k8s.io`."""

ALWAYS: tuple[Right, ...] = (
    ("list", "pods"),
    ("get", "pods"),
    ("watch", "pods"),
    ("create", "pods"),
    ("delete", "pods"),
    ("create", "pods/exec"),
    ("list", "statefulsets.apps"),
    ("list", "rayservices.ray.io"),
    ("list", "rayclusters.ray.io"),
    ("list", "configmaps"),
    ("create", "configmaps"),
    ("delete", "configmaps"),
    ("list", "networkpolicies.networking.k8s.io"),
    ("delete", "networkpolicies.networking.k8s.io"),
    ("list", "secrets"),  # helm keeps its releases in Secrets
    ("get", "secrets"),
)
_OF_NODES: tuple[Right, ...] = (("list", "nodes"), ("list", "pods everywhere"))
FOR: dict[str, tuple[Right, ...]] = {
    "drain": (*_OF_NODES, ("get", "nodes"), ("patch", "nodes"), ("create", "pods/eviction")),
    "cut": (
        *_OF_NODES,
        ("create", "networkpolicies.networking.k8s.io"),
        ("patch", "pods"),
    ),
    "upgrade": (("create", "secrets"), ("update", "secrets"), ("patch", "rayservices.ray.io")),
}
EVERYWHERE = " everywhere"
"""In all namespaces: a node's pods can be anybody's."""
_CLUSTERS = ("nodes",)


def needed(faults: Sequence[str]) -> list[Right]:
    """The rights that a run needs, each once."""
    rights = [*ALWAYS, *(right for name in faults for right in FOR.get(name, ()))]
    return list(dict.fromkeys(rights))


def lacking(cluster: Cluster, namespace: str, faults: Sequence[str]) -> list[Right]:
    """The rights that this user does not have. Kubernetes keeps no review: creating one asks."""
    rights = needed(faults)
    reviews = {"apiVersion": "v1", "kind": "List", "items": [_review(r, namespace) for r in rights]}
    argv = (*cluster.kubectl, "create", "-f", "-", "-o", "json")
    answers = list(_objects(cluster.run(argv, json.dumps(reviews))))
    return [
        right
        for right, answer in zip(rights, answers, strict=True)
        if not answer["status"].get("allowed")
    ]


def _review(right: Right, namespace: str) -> dict[str, Any]:
    verb, what = right
    whole = what.removesuffix(EVERYWHERE)
    name, _, group = whole.partition(".")
    resource, _, subresource = name.partition("/")
    everywhere = what.endswith(EVERYWHERE) or resource in _CLUSTERS
    attributes = {
        "namespace": "" if everywhere else namespace,
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
    }
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }


def _objects(printed: str) -> Iterator[dict[str, Any]]:
    """kubectl prints one object after another, or a list of them."""
    decoder = json.JSONDecoder()
    while printed := printed.lstrip():
        found, end = decoder.raw_decode(printed)
        yield from found["items"] if found["kind"] == "List" else [found]
        printed = printed[end:]
