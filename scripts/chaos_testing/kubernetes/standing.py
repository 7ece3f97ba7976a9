"""How the release stands: which pods are its own, and whether all of them are ready. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.chaos_testing.kubernetes.release import Refused, Release

COMPONENTS = ("head", "ingress", "engine", "redis")
COMPONENT = "app.kubernetes.io/component"
OWNER_KINDS = "rayservices.ray.io,rayclusters.ray.io,statefulsets.apps"

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """One pod of the release that a fault may strike."""

    name: str
    component: str
    node: str
    cluster: str
    """The Ray cluster; empty for Redis."""
    ready: bool


@dataclass(frozen=True)
class Standing:
    """One reading. `clusters`: the release's Ray clusters; `active`: the one that serves."""

    pods: tuple[Pod, ...]
    wanted: Mapping[str, int]
    clusters: tuple[str, ...]
    active: str
    says_ready: bool

    def ready_pods(self, component: str) -> list[Pod]:
        """The pods that serve now, in the order of their names."""
        return sorted(
            (
                pod
                for pod in self.pods
                if pod.component == component and pod.ready and pod.cluster in ("", self.active)
            ),
            key=lambda pod: pod.name,
        )

    @property
    def missing(self) -> str:
        """What is not as it should be; empty if nothing is."""
        if not self.says_ready:
            return "the RayService is not Ready"
        if self.clusters != (self.active,):
            return f"Ray clusters: {', '.join(self.clusters)}"
        for component, count in self.wanted.items():
            if (ready := len(self.ready_pods(component))) < count:
                return f"{ready} of {count} {component} pods are ready"
        return ""


def standing(release: Release, owners: Sequence[Object], pods: Sequence[Object]) -> Standing:
    """Evaluate what kubectl answered.

    Args:
        owners: every object of `OWNER_KINDS` in the namespace.
        pods: every pod with the release's labels.

    Raises:
        Refused: the labels match what is not the release's.
    """
    service = _service(release, owners)
    clusters = [item for item in _of(owners, "RayCluster") if _owned_by(item, {_uid(service)})]
    sets = [item for item in _of(owners, "StatefulSet") if _is_helms(release, item)]
    own = {_uid(item) for item in (*clusters, *sets)}
    found = []
    for item in pods:
        if _component(item) not in COMPONENTS or _is_clean_up(item):
            continue
        if not _owned_by(item, own):
            raise Refused(
                f"the pod {item['metadata']['name']} has the labels of the release {release.name}, "
                f"but belongs to {_owner(item)}: nothing was touched; correct its labels first"
            )
        if "deletionTimestamp" not in item["metadata"]:
            found.append(_pod(item))
    status = service.get("status", {})
    return Standing(
        tuple(found),
        {**_wanted_of(service), **_wanted_of_sets(sets)},
        tuple(sorted(item["metadata"]["name"] for item in clusters)),
        status.get("activeServiceStatus", {}).get("rayClusterName", ""),
        _condition(service, "Ready"),
    )


def _service(release: Release, owners: Sequence[Object]) -> Object:
    named = [item for item in _of(owners, "RayService") if item["metadata"]["name"] == release.name]
    if not named:
        raise Refused(f"the namespace {release.namespace} has no RayService {release.name}")
    if not _is_helms(release, named[0]):
        raise Refused(f"the RayService {release.name} is not of the Helm release {release.name}")
    return named[0]


def _of(objects: Sequence[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def _uid(item: Object) -> str:
    return str(item["metadata"]["uid"])


def _is_helms(release: Release, item: Object) -> bool:
    """Helm marks what it manages; labels anybody can copy."""
    notes: dict[str, str] = item["metadata"].get("annotations", {})
    return (
        notes.get("meta.helm.sh/release-name") == release.name
        and notes.get("meta.helm.sh/release-namespace") == release.namespace
    )


def _owned_by(item: Object, uids: set[str]) -> bool:
    return any(owner["uid"] in uids for owner in item["metadata"].get("ownerReferences", ()))


def _owner(item: Object) -> str:
    owners = [f"{o['kind']} {o['name']}" for o in item["metadata"].get("ownerReferences", ())]
    return owners[0] if owners else "nobody"


def _component(item: Object) -> str:
    return str(item["metadata"].get("labels", {}).get(COMPONENT, ""))


def _is_clean_up(item: Object) -> bool:
    """KubeRay's job that deletes an old cluster's data in Redis has the head's labels."""
    return any(owner["kind"] == "Job" for owner in item["metadata"].get("ownerReferences", ()))


def _condition(item: Object, kind: str) -> bool:
    conditions = item.get("status", {}).get("conditions", ())
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def _pod(item: Object) -> Pod:
    return Pod(
        item["metadata"]["name"],
        _component(item),
        item["spec"].get("nodeName", ""),
        item["metadata"]["labels"].get("ray.io/cluster", ""),
        _condition(item, "Ready"),
    )


def _wanted_of(service: Object) -> dict[str, int]:
    """The least number of pods of each component, from the RayService."""
    wanted: Counter[str] = Counter(head=1)
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        least = group.get("minReplicas", group.get("replicas", 1)) * group.get("numOfHosts", 1)
        wanted[_component(group["template"])] += least
    return dict(wanted)


def _wanted_of_sets(sets: Sequence[Object]) -> dict[str, int]:
    wanted: Counter[str] = Counter()
    for item in sets:
        wanted[_component(item["spec"]["template"])] += item["spec"].get("replicas", 1)
    return {component: count for component, count in wanted.items() if component in COMPONENTS}
