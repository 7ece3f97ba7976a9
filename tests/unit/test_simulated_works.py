"""Traces and presets as work: what a trace says is what is submitted, equal for equal seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.simulation.__main__ import main
from scripts.simulation.presets import PRESETS, cluster_of
from tests.tables import each

pytestmark = pytest.mark.nightly  # a tool


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of traces with a few rows in each form."""
    monkeypatch.setenv("HERMES_DATA", str(tmp_path))
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "azure2023_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    return tmp_path


def test_an_absent_trace_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HERMES_DATA", str(tmp_path))
    assert main(["--preset", "azure"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is absent: scripts/fetch-data brings it" in line


def test_the_command_prints_a_table_and_writes_the_figures(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = data / "out.json"
    words = ["--preset", "azure", "--policy", "hermes", "--policy", "fcfs"]
    assert main([*words, "--json", str(figures)]) == 0
    assert "azure · fcfs · seed 1" in capsys.readouterr().out
    hermes, fcfs = json.loads(figures.read_text())["runs"]
    assert (hermes["policy"], fcfs["policy"]) == ("hermes", "fcfs")
    assert hermes["groups"][0]["tokens"] == 44 + 109


@each("name", sorted(PRESETS))
def test_every_preset_says_what_it_is_and_makes_its_work(name: str, data: Path) -> None:
    chosen = PRESETS[name]
    plan = chosen.make(cluster_of(chosen, "tiny-cpu", 1, 2, 1), 1)
    assert chosen.about
    assert plan.sources
