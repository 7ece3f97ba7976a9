"""A double of Kubernetes behind `kubectl` and `helm`: notes every call, answers from `world.json`,
and changes it as a cluster would. Standard library only; the tests put it on PATH under both names.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["STAND_IN"])
WORLD = FOLDER / "world.json"


def main() -> int:
    """Answer one call."""
    program = Path(sys.argv[0]).name
    words = [word for word in sys.argv[1:] if word]
    if words[:1] and words[0] in ("--context", "--kube-context"):
        words = words[2:]
    words = words[2:] if words[:1] == ["--namespace"] else words
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stdin = "" if sys.stdin.isatty() or "-" not in words else sys.stdin.read()
        with (FOLDER / "calls").open("a") as calls:
            print(json.dumps([program, *words]), file=calls)
        world = json.loads(WORLD.read_text())
        status = (helm if program == "helm" else kubectl)(world, words, stdin)
        WORLD.write_text(json.dumps(world))
    if world["held"] and world["held"] in words:
        while not (FOLDER / "released").exists():  # a command that takes long
            time.sleep(0.02)
        with (FOLDER / "calls").open("a") as calls:
            print(json.dumps([program, "finished", *words]), file=calls)
    return status


def say(answer: Any) -> int:
    """Print an answer."""
    print(answer if isinstance(answer, str) else json.dumps(answer))
    return 0


def fail(sentence: str, status: int = 1) -> int:
    """Fail as the programs do."""
    print(f"Error from server: {sentence}", file=sys.stderr)
    return status


def helm(world: dict[str, Any], words: list[str], stdin: str) -> int:
    """`helm`."""
    match words:
        case ["list", *_]:
            return say(world["releases"])
        case ["get", "values", *_]:
            return say(world["values"])
        case ["upgrade" | "rollback", *_]:
            switch(world)
            return 0
    return fail(f"unknown: {words}")


def switch(world: dict[str, Any]) -> None:
    """A second cluster serves, and the first one is gone."""
    (service,) = [item for item in world["owners"] if item["kind"] == "RayService"]
    (cluster,) = [item for item in world["owners"] if item["kind"] == "RayCluster"]
    old = cluster["metadata"]["name"]
    new = cluster["metadata"]["name"] = f"{old}x"
    service["status"]["activeServiceStatus"]["rayClusterName"] = new
    for pod in world["pods"]:
        if pod["metadata"]["labels"].get("ray.io/cluster") == old:
            pod["metadata"]["labels"]["ray.io/cluster"] = new


def kubectl(world: dict[str, Any], words: list[str], stdin: str) -> int:
    """`kubectl`."""
    for failing, sentence in world["failing"].items():
        if failing in words:
            return fail(sentence, world.get("failing_status", 1))
    match words:
        case ["get", kinds, *rest]:
            return get(world, kinds, rest)
        case ["create", "-f", "-", "-o", "json"]:
            return review(world, json.loads(stdin))
        case ["create", *_]:
            return create(world, json.loads(stdin))
        case ["delete", "pod", name, *_]:
            if world.get("breaks"):
                world["pods"] = [pod for pod in world["pods"] if pod["metadata"]["name"] != name]
            for pod in world["pods"]:
                if pod["metadata"]["name"] == name:
                    pod["metadata"]["name"] = f"{name}-new"
            return 0
        case ["delete", "pods,configmaps,networkpolicies", *_]:
            world["created"] = []
            world["pods"] = [pod for pod in world["pods"] if "spare" not in pod]
            return 0
        case ["delete", "networkpolicy", name, *_]:
            world["created"] = [
                item for item in world["created"] if item[1] != name or item[0] != "NetworkPolicy"
            ]
            return 0
        case ["exec", _, "--", *_, word]:
            return client(world, word)
        case ["exec", _, "--", "python", "-m", _, *_]:
            return 0
        case ["exec" | "wait" | "drain" | "uncordon" | "label", *_]:
            return 0
    return fail(f"unknown: {words}")


def get(world: dict[str, Any], kinds: str, rest: list[str]) -> int:
    """Objects as a list."""
    if rest[-1] == "name":
        return say("\n".join(f"{kind.lower()}/{name}" for kind, name in world["created"]))
    if kinds == "nodes":
        return say({"items": world["nodes"]})
    if kinds != "pods":
        return say({"items": world["owners"]})
    selected = " ".join(rest)
    pods = world["pods"] + world["others"]
    if "spec.nodeName=" in selected:
        node = selected.split("spec.nodeName=")[1].split()[0]
        return say({"items": [pod for pod in pods if pod["spec"]["nodeName"] == node]})
    if "hermes-serve/chaos" in selected:
        return say({"items": [pod for pod in world["pods"] if "spare" in pod]})
    return say({"items": world["pods"]})


def review(world: dict[str, Any], reviews: dict[str, Any]) -> int:
    """May the user do that? One object after another, as kubectl prints them."""
    for item in reviews["items"]:
        asked = item["spec"]["resourceAttributes"]
        name = f"{asked['verb']} {asked['resource']}"
        say({**item, "status": {"allowed": [name, asked["namespace"]] not in world["denied"]}})
    return 0


def create(world: dict[str, Any], manifest: dict[str, Any]) -> int:
    """Keep what was created; a pod runs at once."""
    world["created"].append([manifest["kind"], manifest["metadata"]["name"]])
    if manifest["kind"] == "Pod":
        manifest["spec"]["nodeName"] = world["client_node"]
        manifest["metadata"]["namespace"] = "prod"
        world["pods"].append({**manifest, "spare": True})
    return 0


def client(world: dict[str, Any], word: str) -> int:
    """The client in its pod."""
    if word == "state":
        return say(world["client"])
    if word == "result":
        return say(world["results"].pop(0) if len(world["results"]) > 1 else world["results"][0])
    return say({})


if __name__ == "__main__":
    sys.exit(main())
