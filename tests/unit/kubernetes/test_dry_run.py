"""`scripts/chaos --kubernetes --dry-run` prints the commands of a run, and only reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chart.charts import CHART
from tests.unit.kubernetes.conftest import Run, use
from tests.unit.kubernetes.world import World

pytestmark = pytest.mark.nightly  # a tool

HERE = Path(__file__).parent


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.replace(str(CHART), "helm/hermes-serve")


def test_a_release_with_default_values(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = use(World(tmp_path, stage="single-gpu"), monkeypatch)
    assert run("--dry-run") == 0
    assert printed(capsys) == (HERE / "default.txt").read_text()
    assert not world.changes


def test_every_fault_with_every_option(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--context", "blue", "--allow-node-cut", "--key-secret", "keys/mine", "--users", "4")
    more = ("--tokens", "50", "--seed", "9", "--minutes", "30", "--compare", "record")
    assert run("--dry-run", *options, *more) == 0
    assert printed(capsys) == (HERE / "every_fault.txt").read_text()
    assert not world.changes


def test_what_is_not_possible_is_left_out_with_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    redis = {
        "internal": {"enabled": False},
        "external": {
            "enabled": True,
            "existingSecret": "redis-url",
            "gcsAddress": "redis:6379",
            "cidrs": ["10.0.0.0/8"],
        },
    }
    world = World(tmp_path, {"redis": redis, "upgrade": {"type": "None"}}, stage="multi-gpu")
    use(world, monkeypatch)
    assert run("--dry-run", "--faults", "redis-pod,redis-kill,scale,upgrade") == 0
    lines = printed(capsys).splitlines()
    left_out = [line.removeprefix("# left out: ") for line in lines if "left out" in line]
    assert left_out == [
        "redis-pod: Redis is not the release's own (redis.external)",
        "redis-kill: Redis is not the release's own (redis.external)",
        "scale: without settings.workers.autoscaling, engines come and go by upgrades only",
        "upgrade: upgrade.type is not NewCluster, so an upgrade starts no second cluster",
    ]


def test_an_upgrade_needs_the_chart_that_is_installed(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write(releases=[{**world.read("releases")[0], "chart": "hermes-serve-0.0.9"}])
    assert run("--dry-run", "--faults", "upgrade") == 0
    assert "# left out: upgrade: the release is of hermes-serve-0.0.9, and" in printed(capsys)
