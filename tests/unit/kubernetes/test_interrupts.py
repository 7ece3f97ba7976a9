"""Ctrl-C and SIGTERM undo the fault of the moment, and remove what the run created."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest

from scripts.local.environment import ROOT
from tests.unit.kubernetes.conftest import REQUIRED, Run
from tests.unit.kubernetes.world import World
from tests.waiting import until

pytestmark = pytest.mark.nightly  # a tool

DRAIN = ("--faults", "drain")


def called(world: World, call: str, process: subprocess.Popen[str]) -> None:
    """Wait until a call has been made."""

    def made() -> bool:
        assert process.poll() is None, process.communicate()
        return any(one.startswith(call) for one in world.calls)

    until(call, made)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_drain(world: World, number: signal.Signals) -> None:
    world.write(held="drain")
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.chaos_testing", "--kubernetes", *REQUIRED, *DRAIN],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    called(world, "kubectl drain", process)
    process.send_signal(number)
    called(world, "kubectl uncordon node-2", process)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert [call.split()[1] for call in world.changes[-3:]] == ["drain", "uncordon", "delete"]
    assert world.read("created") == []
    assert "removing what this run created" in out


def test_a_second_signal_does_not_interrupt_the_undoing(world: World) -> None:
    world.write(held="uncordon")
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.chaos_testing", "--kubernetes", *REQUIRED, *DRAIN],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    called(world, "kubectl uncordon", process)
    process.send_signal(signal.SIGINT)
    assert process.stdout
    assert any("the fault is undone first" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    (world.folder / "released").touch()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert "kubectl finished uncordon node-2" in world.calls
    assert world.changes[-1].startswith("kubectl delete pods,configmaps,networkpolicies")


@pytest.mark.parametrize("words", [("--faults", "engine", "--dry-run"), ("--faults", "nothing")])
def test_signals_do_afterwards_what_they_did_before(
    world: World, run: Run, words: tuple[str, ...]
) -> None:
    def of_the_caller(number: int, frame: object) -> None:
        raise AssertionError(f"signal {number} came")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, of_the_caller) for number in numbers]
    try:
        with contextlib.suppress(SystemExit):  # the second one's options are refused
            run(*words)
        assert [signal.getsignal(number) for number in numbers] == [of_the_caller] * 2
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
