"""Traces and presets as work: what a trace says is what is submitted, equal for equal seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.simulation import traces
from scripts.simulation.__main__ import main
from scripts.simulation.presets import PRESETS, cluster_of
from scripts.simulation.traces import Cast
from tests.tables import each

pytestmark = pytest.mark.nightly  # a tool

CAST = Cast(1)


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
    rows = [
        {"timestamp": 0, "input_length": 70, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 64, "output_length": 9, "hash_ids": [0, 7]},
    ]
    (folder / "mooncake_conversation_div16.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_azure_gives_arrivals_and_lengths(data: Path) -> None:
    found = [(at_s, one.prompt_tokens, one.output_tokens) for at_s, one in traces.azure(CAST)]
    assert found == [(0.0, 374, 44), (pytest.approx(4.314579), 396, 109)]


def test_mooncake_gives_beginnings_that_are_the_same(data: Path) -> None:
    (first_s, first), (second_s, second) = traces.TIMED["mooncake-div16"](CAST, 16)
    assert 0 <= first_s < 3 <= second_s < 6, "spread over the trace's ticks"
    assert first.prefix == (0, 1, 2, 3), "only blocks that are full"
    assert second.prefix == (0, 1, 14, 15)


def test_classes_and_tenants_are_drawn_by_the_seed() -> None:
    drawn = [CAST.draw(number) for number in range(500)]
    assert drawn == [Cast(1).draw(number) for number in range(500)]
    assert drawn != [Cast(2).draw(number) for number in range(500)]
    tenants = [tenant for tenant, _ in drawn]
    assert tenants.count("tenant-0") > tenants.count("tenant-3") > 0
    assert {name for _, name in drawn} == {"realtime", "standard", "batch"}


def test_an_absent_trace_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HERMES_DATA", str(tmp_path))
    assert main(["--work", "azure"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is absent: scripts/fetch-data brings it" in line


def test_the_command_prints_a_table_and_writes_the_figures(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = data / "out.json"
    words = ["--work", "azure", "--policy", "hermes", "--policy", "fcfs"]
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
