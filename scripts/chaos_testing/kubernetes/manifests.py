"""The objects that a run creates: the client's code, the client, and what cuts a node off. Pure.

All of them bear the label `OWN` with the run's name, by which they are removed.
"""

from __future__ import annotations

from scripts.chaos_testing.kubernetes.release import Release
from scripts.chaos_testing.kubernetes.standing import COMPONENT
from scripts.chaos_testing.kubernetes.steps import Manifest

OWN = "hermes-serve/chaos"
CUT = "hermes-serve/chaos-cut"
"""On pods that are cut off; its value is the component that the pod belongs to."""
MODULE = "scripts.chaos_testing.kubernetes.in_pod"
CODE = tuple(
    f"scripts/chaos_testing/{file}"
    for file in (
        "__init__.py",
        "account.py",
        "prompts.py",
        "records.py",
        "traffic.py",
        "kubernetes/__init__.py",
        "kubernetes/in_pod/__init__.py",
        "kubernetes/in_pod/__main__.py",
        "kubernetes/in_pod/control.py",
        "kubernetes/in_pod/rounds.py",
        "kubernetes/in_pod/texts.py",
    )
)
"""What the client needs and the image does not hold."""
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def name_of(release: Release, run: str) -> str:
    """The name of everything that the run creates."""
    return f"{release.name}-chaos-{run}"


def code(release: Release, run: str, files: dict[str, str]) -> Manifest:
    """The client's code. A key of a ConfigMap has no slash; the pod puts each file in its place."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name_of(release, run), "labels": {OWN: run}},
        "data": {path.replace("/", "."): text for path, text in files.items()},
    }


def client(
    release: Release, run: str, seed: int, tokens: int, compare: str, limit_s: int
) -> Manifest:
    """The client: a pod of the service's image, under Pod Security `restricted`.

    It has the labels of `helm test`'s pod, which the chart's network policies let reach port 8000
    whatever `networkPolicy.servingFrom` says.

    Args:
        limit_s: after this time it ends by itself, should nobody remove it.
    """
    values = release.values
    secrets = [{"name": name} for name in values["image"].get("pullSecrets", ())]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name_of(release, run),
            "labels": {**release.labels, COMPONENT: "test", OWN: run},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": limit_s,
            "terminationGracePeriodSeconds": 1,
            "serviceAccountName": release.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"imagePullSecrets": secrets} if secrets else {}),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "runAsGroup": 10001,
                "fsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "affinity": {"podAffinity": _beside_redis_and_head(release)},
            "containers": [_container(release, seed, tokens, compare)],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {
                    "name": "code",
                    "configMap": {
                        "name": name_of(release, run),
                        "items": [{"key": path.replace("/", "."), "path": path} for path in CODE],
                    },
                },
            ],
        },
    }


def _container(release: Release, seed: int, tokens: int, compare: str) -> Manifest:
    image = release.values["image"]
    environment: list[Manifest] = [
        {"name": name, "value": value}
        for name, value in {
            "PYTHONPATH": "/chaos",
            "HERMES_URL": release.url,
            "HERMES_MODEL": release.model,
            "HERMES_CHAOS_SEED": str(seed),
            "HERMES_CHAOS_TOKENS": str(tokens),
            "HERMES_CHAOS_COMPARE": compare,
            "HERMES_HEARTBEAT_S": str(release.heartbeat_s),
            "NVIDIA_VISIBLE_DEVICES": "void",
        }.items()
    ]
    if release.key_secret:
        name, entry = release.key_secret
        key = {"secretKeyRef": {"name": name, "key": entry}}
        environment.append({"name": "HERMES_API_KEY", "valueFrom": key})
    limits = {"memory": "512Mi", **({"cpu": "500m"} if release.values.get("cpuLimits") else {})}
    return {
        "name": "client",
        "image": release.image,
        "imagePullPolicy": image.get("pullPolicy", "IfNotPresent"),
        "command": ["python", "-m", MODULE, "serve"],
        "securityContext": _CONTAINER_SECURITY,
        "env": environment,
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": limits},
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "code", "mountPath": "/chaos", "readOnly": True},
        ],
    }


def _beside_redis_and_head(release: Release) -> Manifest:
    """Nodes are drained and cut that hold neither of them, so the client prefers their nodes."""
    components = {"key": COMPONENT, "operator": "In", "values": ["redis", "head"]}
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": release.labels, "matchExpressions": [components]},
    }
    return {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "podAffinityTerm": term}
        ]
    }


def cut_policy(release: Release, run: str) -> Manifest:
    """Denies all connections of pods with the label `CUT`."""
    expression = {"key": CUT, "operator": "Exists"}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name_of(release, run), "labels": {OWN: run}},
        "spec": {
            "podSelector": {"matchLabels": release.labels, "matchExpressions": [expression]},
            "policyTypes": ["Ingress", "Egress"],
        },
    }
