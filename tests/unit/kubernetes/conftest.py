"""A world for each test, and the command run in it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.chaos_testing.kubernetes import command, executor
from tests.unit.kubernetes.world import World

Run = Callable[..., int]
REQUIRED = ("--release", "hermes", "--namespace", "prod")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Two to eight engines on two nodes, four ingresses; head and Redis on another node."""
    return use(World(tmp_path), monkeypatch)


def use(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Put a world's kubectl and helm on PATH."""
    monkeypatch.setenv("PATH", f"{world.path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(world.folder))
    return world


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, without the times that only a real service needs."""
    monkeypatch.setattr(executor, "LOOK_S", 0.01)
    monkeypatch.setattr(executor, "FLOWS_ON_S", 0.0)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "abc123")
    return lambda *words: command.main([*REQUIRED, *words])
