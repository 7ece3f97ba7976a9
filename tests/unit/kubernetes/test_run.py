"""`scripts/chaos --kubernetes` performs its plan in order, and removes what it created."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from scripts.chaos_testing.kubernetes import faults
from scripts.chaos_testing.kubernetes.steps import Until, Wait
from tests.unit.kubernetes.conftest import Run
from tests.unit.kubernetes.world import CLUSTER, WHOLE, World, pod

pytestmark = pytest.mark.nightly  # a tool

DELETE = f"kubectl delete pods,configmaps,networkpolicies -l hermes-serve/chaos={'abc123'}"
CREATE = "kubectl create -f -"
SELECTOR = "app.kubernetes.io/part-of=hermes-serve,app.kubernetes.io/instance=hermes"


def words_to_the_client(world: World) -> list[str]:
    said = [call.split("in_pod ")[1] for call in world.calls if "in_pod " in call]
    return [word for word in said if word != "state"]


def test_each_kind_of_pod_is_deleted_under_streams_and_the_table_shows_it(
    world: World, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--faults", "engine,ingress,head,redis-pod", "--json", str(tmp_path / "out.json"))
    assert run(*options) == 0
    deleted = [call.split()[3] for call in world.changes if "delete pod " in call]
    assert [name.rstrip("0123456789-") for name in deleted] == [
        f"{CLUSTER}-engine",
        f"{CLUSTER}-ingress",
        f"{CLUSTER}-head",
        "hermes-redis",
    ]
    assert words_to_the_client(world) == ["expect", *["begin 8", "strike", "end", "result"] * 4]
    assert (world.changes[:2], world.changes[-1]) == (
        [CREATE, CREATE],
        f"{DELETE} --ignore-not-found",
    )
    assert world.read("created") == []
    shown = capsys.readouterr().out
    assert "engine pod deleted with --force         8/8          1.7 s            1" in shown
    assert "lost 0, duplicated 0, corrupted 0, ended by an error 0" in shown
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["image"] == "registry.example/hermes-serve:0.2.0"
    assert [one["fault"] for one in found["faults"]] == ["engine", "ingress", "head", "redis-pod"]


@pytest.mark.parametrize(
    ("damage", "status"),
    [
        ({}, 0),
        ({"lost": ["req_1: never ended"]}, 1),
        ({"duplicated": ["req_1: event 3 after event 3"]}, 1),
        ({"corrupted": ["req_1: differs at character 4"]}, 1),
        ({"failed": {"attempt_lost": 1}}, 1),
    ],
)
def test_the_exit_status_says_whether_every_text_was_whole(
    world: World,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    damage: dict[str, object],
    status: int,
) -> None:
    world.write(results=[{**WHOLE, **damage, "whole": 8 - bool(damage)}])
    assert run("--faults", "engine") == status
    for kind in damage:
        assert (f"  engine: {kind}" if kind != "failed" else "ended by attempt_lost") in (
            capsys.readouterr().out
        )


@pytest.mark.parametrize(
    ("client", "central", "drained"),
    [
        ("node-1", "node-1", "node-2"),
        ("node-2", "node-1", "node-3"),
        ("node-1", "node-2", "node-3"),
    ],
)
def test_a_drained_node_holds_neither_head_nor_redis_nor_the_client_and_is_opened_again(
    world: World, run: Run, client: str, central: str, drained: str
) -> None:
    pods = world.read("pods")
    for one in pods:
        if one["metadata"]["labels"]["app.kubernetes.io/component"] in ("head", "redis"):
            one["spec"]["nodeName"] = central
    world.write(client_node=client, pods=pods)
    assert run("--faults", "drain") == 0
    drain, uncordon = [c for c in world.changes if "node-" in c]
    assert drain.startswith(f"kubectl drain {drained} ")
    assert drain.endswith(f"--pod-selector={SELECTOR}")
    assert uncordon == f"kubectl uncordon {drained}"


def test_a_node_with_others_pods_is_drained_only_with_a_flag(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write(others=[pod("db", f"node-{n}", namespace="theirs") for n in (2, 3)])
    assert run("--faults", "drain") == 0
    assert not [call for call in world.calls if "drain node" in call]
    assert (
        "drain: every node with an engine also runs others' pods (node-2: theirs/db): "
        "--allow-shared-nodes drains it all the same" in capsys.readouterr().out
    )
    assert run("--faults", "drain", "--allow-shared-nodes") == 0
    assert [call for call in world.calls if "drain node-2" in call]
    assert (
        "the node node-2 also runs others' pods, which stay: theirs/db" in capsys.readouterr().out
    )


def test_a_node_is_never_drained_whose_other_pods_the_selection_would_match(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = dict(label.split("=") for label in SELECTOR.split(","))
    alike = pod("like", "node-2", labels, namespace="theirs")
    world.write(others=[alike, pod("db", "node-3", namespace="theirs")])
    assert run("--faults", "drain", "--allow-shared-nodes") == 0
    assert [call for call in world.calls if "drain node-3" in call]


def test_a_cut_takes_labels_and_brings_them_back(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "CUT_S", 0.0)
    assert run("--faults", "cut", "--allow-node-cut") == 0
    cut = [call for call in world.changes if "label" in call or "networkpolicy " in call]
    back = "app.kubernetes.io/component={0} hermes-serve/chaos-cut- --overwrite"
    assert [call.endswith("app.kubernetes.io/component=cut --overwrite") for call in cut] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert cut[2].endswith(back.format("ingress"))
    assert cut[3].endswith(back.format("engine"))
    assert cut[4] == "kubectl delete networkpolicy hermes-chaos-abc123 --ignore-not-found"


def test_more_users_scale_the_engines_up_and_their_leaving_down(world: World, run: Run) -> None:
    assert run("--faults", "scale") == 0
    assert words_to_the_client(world) == [
        "expect",
        "begin 8",
        "strike",
        "users 80",
        "users 8",
        "end",
        "result",
    ]


def test_an_upgrade_is_rolled_back_under_the_same_streams(world: World, run: Run) -> None:
    assert run("--faults", "upgrade") == 0
    upgrade, rollback = [call for call in world.calls if "upgrade" in call or "rollback" in call]
    assert upgrade.startswith("helm upgrade hermes ")
    assert upgrade.endswith("--set-string podAnnotations.hermes-serve/chaos=abc123")
    assert rollback == "helm rollback hermes 3"
    assert words_to_the_client(world).count("begin 8") == 1


def test_a_redis_that_is_process_1_of_its_container_is_left_out(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write(failing={"hermes-redis-0": "redis-server is process 1"}, failing_status=3)
    assert run("--faults", "redis-kill,engine") == 0
    shown = capsys.readouterr().out
    assert "left out: redis-kill: kubectl" in shown
    assert "redis-server is process 1" in shown
    assert "engine pod deleted with --force" in shown


def test_a_redis_that_rewrites_its_file_is_killed_with_its_child(tmp_path: Path) -> None:
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    found = tmp_path / "pidof"
    found.write_text("#!/bin/sh\necho " + " ".join(str(each.pid) for each in processes))
    found.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", faults.KILL_REDIS], env=path, capture_output=True, text=True)
    try:
        assert (done.returncode, done.stderr) == (0, "")
        assert [each.wait(60) for each in processes] == [-signal.SIGKILL] * 2
    finally:
        for each in processes:
            each.kill()
            each.wait()


def test_after_a_fault_that_fails_its_undoing_and_the_clean_up_run(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write(failing={"drain": "the eviction was refused"})
    assert run("--faults", "drain,engine") == 1
    assert [call.split()[1] for call in world.changes] == [
        "create",
        "create",
        "drain",
        "uncordon",
        "delete",
    ]
    assert world.read("created") == []
    shown = capsys.readouterr().out
    assert "drain: kubectl --namespace prod drain node-2" in shown
    assert "Error from server: the eviction was refused" in shown


def test_a_service_that_does_not_come_back_is_a_finding(
    world: World,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(faults, "_WHOLE", Wait(Until.WHOLE, 0.0))
    world.write(breaks=True)
    assert run("--faults", "engine,ingress") == 1
    assert "engine: after 0 s: 1 of 2 engine pods are ready" in capsys.readouterr().out
    assert len([call for call in world.calls if "delete pod " in call]) == 1
