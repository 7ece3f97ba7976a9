"""The fit finds an engine's times again from what a client sees of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.simulation import points
from scripts.simulation.__main__ import main
from scripts.simulation.engines import EngineParameters, Timing, load_engine
from scripts.simulation.fit import errors, fit, median_errors
from scripts.simulation.fitting import MEASURED
from scripts.simulation.points import Point, Times, predict

pytestmark = pytest.mark.nightly  # a tool

TRUE = EngineParameters(
    "e",
    Timing(step_ms=5.0, prefill_token_us=60.0, decode_sequence_us=400.0, request_ms=4.0),
    num_gpu_blocks=2000,
)
NOTHING = Times(0.0, 0.0, 0.0)


def measured(engine: EngineParameters = TRUE) -> list[Point]:
    """What a client would measure."""
    shapes = [
        Point(shape, users, prompt, 30, shared, NOTHING)
        for shape, prompt, shared in (("short", 50, 0), ("long", 500, 0), ("prefix", 500, 240))
        for users in (1, 2, 4)
    ]
    return [replace(one, measured=predict(engine, one)) for one in shapes]


def test_more_users_wait_longer_for_tokens_and_get_more_of_them_together() -> None:
    one, two, four = (point.measured for point in measured()[:3])
    assert one.per_token_ms == pytest.approx(5.4, rel=0.01)
    assert one.ttft_ms == pytest.approx(4.0 + 5.0 + 50 * 0.06, rel=0.01)
    assert one.per_token_ms < two.per_token_ms < four.per_token_ms
    assert one.tokens_per_s < two.tokens_per_s < four.tokens_per_s


def test_a_shared_beginning_shortens_the_time_to_the_first_token() -> None:
    _, _, _, long, *_, prefix, _, _ = measured()
    assert (long.users, prefix.users) == (1, 1)
    assert prefix.measured.ttft_ms < 0.75 * long.measured.ttft_ms


def test_the_fit_finds_the_times_again() -> None:
    found = measured()
    fitted = fit(TRUE, found)
    assert max(median_errors(fitted, found).values()) < 0.05
    assert fitted.timing.step_ms == pytest.approx(5.0, rel=0.15)
    slower = measured(load_engine("estimate-a100-llama-8b"))
    assert errors(fitted, slower[0])["inter-token"] > 0.3, "another engine"


def test_the_tiny_models_engine_is_as_far_from_what_was_measured_as_the_document_says() -> None:
    found = points.load(MEASURED / "tiny-cpu.json")
    held_out = median_errors(load_engine("tiny-cpu"), [point for point in found if point.held_out])
    shown = {name: f"{value:.1%}" for name, value in held_out.items()}
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    assert f"Median error of what was held out: {shown['all'].replace('%', ' %')}" in text
    assert shown["all"] in load_engine("tiny-cpu").source


def test_a_round_in_which_the_machine_stood_still_changes_no_median() -> None:
    calm, stalled = Times(20.0, 3.0, 300.0), Times(900.0, 80.0, 9.0)
    rounds = [Point("short", 4, 64, 64, 0, times) for times in (calm, stalled, calm)]
    assert points.median_point(rounds) == rounds[0]


def test_the_command_reads_what_was_measured_and_reports_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "mine.json", tmp_path / "fitted.json"
    how: dict[str, object] = {
        "engine": {"num_gpu_blocks": 2000},
        "machine": {"cpu": "a CPU", "cores": 2},
        "finished": "2026-01-01",
    }
    points.save(path, measured()[:3], how)
    assert points.load(path) == measured()[:3]
    assert main(["--fit", "--measured", str(path), "--out", str(out)]) == 0
    assert "median error, held-out points" in capsys.readouterr().out
    assert "a CPU, 2 cores" in json.loads(out.read_text())["source"]
    assert main(["--errors", "--measured", str(path), "--engine", str(out)]) == 0
    assert main(["--errors", "--measured", str(tmp_path / "absent.json")]) == 2
    assert "is absent: scripts/simulate --fit measures it" in capsys.readouterr().err
