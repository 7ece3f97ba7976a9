"""Which node is drained or cut off. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.chaos_testing.kubernetes.release import NotPossible, Release
from scripts.chaos_testing.kubernetes.standing import Object, Pod, Standing
from scripts.chaos_testing.kubernetes.steps import Choose, Victim


@dataclass(frozen=True)
class Node:
    """A node that holds a pod to strike. `others`: pods there that are not the release's;
    `alike`: those among them that a selection by the release's labels would match.
    """

    name: str
    others: tuple[str, ...]
    alike: tuple[str, ...]


def candidates(
    choose: Choose, standing: Standing, nodes: Sequence[Object], client: str
) -> list[str]:
    """The nodes to look at, the best first.

    Args:
        client: the client's node, which is spared.
    """
    closed = {n["metadata"]["name"] for n in nodes if n["spec"].get("unschedulable")}
    central = {pod.node for pod in standing.pods if pod.component in ("head", "redis")}
    found = {pod.node for pod in standing.ready_pods(choose.component)} - closed - {client}
    if choose.victim is Victim.CUT:
        found -= central
    return sorted(found, key=lambda name: (name in central, name))


def node(release: Release, name: str, pods: Sequence[Object]) -> Node:
    """Evaluate the pods of all namespaces on a node. Those with the release's labels in its own
    namespace are its own: `standing` has checked it.
    """
    labels = release.labels.items()
    alike, others = [], []
    for item in pods:
        matches = labels <= item["metadata"].get("labels", {}).items()
        if _stays(item) or (matches and item["metadata"]["namespace"] == release.namespace):
            continue
        others.append(_text(item))
        alike += [_text(item)] if matches else []
    return Node(name, tuple(others), tuple(alike))


def choice(
    choose: Choose, found: Sequence[Node], shared: bool, chance: random.Random
) -> tuple[Node, str]:
    """One of the nodes, and a sentence on others' pods there, if any.

    Args:
        found: the best first.
        shared: whether a node may be drained that runs others' pods.

    Raises:
        NotPossible: there is none.
    """
    if choose.victim is Victim.CUT:
        if found:
            return chance.choice(found), ""
        raise NotPossible("no node holds an engine and neither Redis, nor the head, nor the client")
    possible = [one for one in found if not one.alike]
    alone = [one for one in possible if not one.others]
    if alone:
        return alone[0], ""
    if possible and shared:
        names = ", ".join(possible[0].others)
        said = f"the node {possible[0].name} also runs others' pods, which stay: {names}"
        return possible[0], said
    if possible:
        names = ", ".join(possible[0].others)
        raise NotPossible(
            f"every node with an engine also runs others' pods ({possible[0].name}: {names}): "
            f"--allow-shared-nodes drains it all the same"
        )
    raise NotPossible(
        "no node holds an engine and is open, without the client and without its likes"
    )


def pod_on(standing: Standing, component: str, node_name: str) -> Pod:
    """A pod of the component on a node that was chosen for it."""
    return next(pod for pod in standing.ready_pods(component) if pod.node == node_name)


def variables(pod: Pod) -> Mapping[str, str]:
    """What `$POD` and `$NODE` stand for."""
    return {"POD": pod.name, "NODE": pod.node}


def _text(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def _stays(item: Object) -> bool:
    """A drain leaves it where it is, or nobody misses it."""
    owners = {owner["kind"] for owner in item["metadata"].get("ownerReferences", ())}
    finished = item.get("status", {}).get("phase") in ("Succeeded", "Failed")
    # A static pod's owner is its node.
    return finished or bool(owners & {"DaemonSet", "Node"})
