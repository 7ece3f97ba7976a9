"""What `scripts/chaos --kubernetes` refuses, in one sentence each, before it creates anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.kubernetes.conftest import REQUIRED, Run
from tests.unit.kubernetes.world import World, pod

pytestmark = pytest.mark.nightly  # a tool


def refusal(run: Run, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.removeprefix("  ✗ ")


@pytest.mark.parametrize("missing", ["kubectl", "helm"])
def test_a_missing_program(
    world: World,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
) -> None:
    monkeypatch.setenv("PATH", str(world.path))
    (world.path / missing).unlink()
    said = refusal(run, capsys)
    assert said == f"{missing} is not on PATH: install it, or correct PATH"


def test_missing_permissions_are_named_together(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write(denied=[["delete pods", "prod"], ["list pods", ""], ["patch nodes", ""]])
    said = refusal(run, capsys)
    assert said == (
        "this user may not: delete pods, list pods everywhere, patch nodes (namespace prod)"
    )
    world.write(denied=[["patch nodes", ""]])
    assert run("--faults", "engine", "--dry-run") == 0, "only the drain needs it"


def test_no_such_release(world: World, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    world.write(releases=[])
    said = refusal(run, capsys)
    assert said == "the namespace prod has no Helm release hermes: see helm list -A"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"chart": "redis-1.2.3"}, "the release hermes is of the chart redis-1.2.3, not ours"),
        (
            {"status": "pending-upgrade"},
            "the release hermes is pending-upgrade: wait until it is deployed, or mend it",
        ),
    ],
)
def test_another_release(
    world: World,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str],
    sentence: str,
) -> None:
    world.write(releases=[{**world.read("releases")[0], **change}])
    assert refusal(run, capsys) == sentence


def test_pods_of_others_with_the_labels_of_the_release(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = world.read("pods")
    owner = [{"kind": "ReplicaSet", "name": "theirs", "uid": "uid-theirs"}]
    world.write(pods=[*mine, pod("stranger", "node-2", mine[-1]["metadata"]["labels"], owner)])
    assert (
        refusal(run, capsys, "--faults", "engine")
        == "the pod stranger has the labels of the release hermes, but belongs to ReplicaSet "
        "theirs: nothing was touched; correct its labels first"
    )


def test_a_ray_service_that_is_not_the_releases(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    owners = world.read("owners")
    del owners[0]["metadata"]["annotations"]
    world.write(owners=owners)
    said = refusal(run, capsys)
    assert said == "the RayService hermes is not of the Helm release hermes"


def test_what_another_run_has_left(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write(created=[["Pod", "hermes-chaos-fff"]])
    said = refusal(run, capsys)
    assert said.startswith("another run is in progress or has left pod/hermes-chaos-fff; if none")
    assert said.endswith("delete pods,configmaps,networkpolicies -l hermes-serve/chaos")
    assert not world.changes


def test_the_key_is_an_entry_of_a_secret(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(run, capsys, "--key-secret", "mine")
    assert said == "--key-secret mine is not SECRET/ENTRY"


def test_a_cut_and_an_unknown_fault(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words, sentence in (
        (("--faults", "cut"), "the fault `cut` needs --allow-node-cut"),
        (("--faults", "engine,flood"), "no such fault: flood"),
    ):
        with pytest.raises(SystemExit) as left:
            run(*words)
        assert left.value.code == 2
        assert sentence in capsys.readouterr().err
    assert REQUIRED[0] == "--release"
