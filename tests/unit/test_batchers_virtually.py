"""`scripts/bench --batching --virtual`: what the batchers reach in front of a model of the engine,
without noise. docs/performance.md has the figures.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.benchmark.__main__ import main
from scripts.benchmark.batchers import parse
from scripts.benchmark.batching import COLUMNS, ratios, virtually
from scripts.benchmark.measurement import Row
from scripts.benchmark.run import Load
from scripts.benchmark.tables import line
from scripts.simulation.engines import FOLDER, load_engine

pytestmark = pytest.mark.nightly  # a tool

_FIXED = ("async:8", "async:16", "async:32", "async:64")
_PARTS = ("dynamic:32/50/8192", "async:16")


def _rows(
    batchers: Sequence[str],
    *,
    users: int = 0,
    rate_per_s: float = 0.0,
    engine: str = "tiny-cpu",
    seed: int = 1,
) -> dict[str, Row]:
    load = Load(users, rate_per_s, window_s=10.0, grace_s=10.0, seed=str(seed))
    measure = virtually(load_engine(engine), 32, 64)
    return {one.name: measure(one, load, 1) for one in parse(",".join(batchers))}


def _speed(rows: dict[str, Row], name: str) -> float:
    return rows[name].tokens_per_s


@pytest.mark.parametrize("seed", [1, 2, 3])
class TestPromises:
    @pytest.mark.parametrize("users", [8, 32, 128])
    def test_the_adaptive_window_is_as_good_as_the_best_fixed_one(
        self, users: int, seed: int
    ) -> None:
        rows = _rows([*_FIXED, "tuned"], users=users, seed=seed)
        assert _speed(rows, "tuned") >= 0.95 * max(_speed(rows, name) for name in _FIXED)
        assert _speed(rows, "tuned") < 1.02 * max(_speed(rows, name) for name in _FIXED)

    @pytest.mark.parametrize("users", [32, 128])
    def test_continuous_batching_beats_one_at_a_time_and_static_batches(
        self, users: int, seed: int
    ) -> None:
        rows = _rows(["serial", "static:4", "continuous"], users=users, seed=seed)
        assert _speed(rows, "continuous") >= 7 * _speed(rows, "serial")
        assert _speed(rows, "continuous") >= 1.5 * _speed(rows, "static:4")

    def test_hybrid_gains_nothing_over_as_many_slots_without_classes(self, seed: int) -> None:
        rows = _rows(["async:48", "hybrid:48"], rate_per_s=500.0, seed=seed)
        assert _speed(rows, "hybrid:48") == pytest.approx(_speed(rows, "async:48"), rel=0.02)

    def test_slots_of_their_own_gain_what_they_add_to_what_is_in_flight(self, seed: int) -> None:
        """The articles' hybrid: 1.6 times its better part, and less than the same slots shared."""
        names = ["split:16/32/50/8192", *_PARTS, "async:48"]
        rows = _rows(names, rate_per_s=1500.0, engine="estimate-h100-llama-8b", seed=seed)
        better = max(_speed(rows, name) for name in _PARTS)
        assert 1.5 * better < _speed(rows, names[0]) < 1.8 * better
        assert _speed(rows, names[0]) < 0.75 * _speed(rows, "async:48")
        in_flight = sum(rows[name].in_flight for name in _PARTS)
        assert rows[names[0]].in_flight == pytest.approx(in_flight, rel=0.05)


class TestVirtualRuns:
    def test_the_same_seed_gives_the_same_row(self) -> None:
        (first,), (again,) = (_rows(["tuned"], users=12).values() for _ in range(2))
        assert line(COLUMNS, first) == line(COLUMNS, again)
        (other,) = _rows(["tuned"], users=12, seed=2).values()
        assert first.tokens_per_s != other.tokens_per_s

    def test_a_request_that_meets_an_idle_engine_takes_the_time_of_its_steps(self) -> None:
        (row,) = _rows(["continuous"], rate_per_s=0.5).values()
        timing = load_engine("tiny-cpu").timing
        first_ms = timing.request_ms + timing.step_ms + 32 * timing.prefill_token_us / 1e3
        assert first_ms < row.end_to_end.p50_ms < first_ms + 64 * (timing.step_ms + 1)

    def test_what_the_server_takes_for_a_request_comes_on_top(self, tmp_path: Path) -> None:
        fields = json.loads((FOLDER / "tiny-cpu.json").read_text())
        fields["timing"]["request_ms"] += 100
        slower = tmp_path / "slower.json"
        slower.write_text(json.dumps(fields))
        times_ms = [
            _rows(["continuous"], rate_per_s=0.5, engine=engine)["continuous"].end_to_end.p50_ms
            for engine in ("tiny-cpu", str(slower))
        ]
        assert times_ms[1] - times_ms[0] == pytest.approx(100)

    def test_a_dynamic_batch_waits_for_as_long_as_it_says(self) -> None:
        rows = _rows(["dynamic:8/300/8192", "continuous"], rate_per_s=0.5)
        waited_ms = (
            rows["dynamic:8/300/8192"].end_to_end.p50_ms - rows["continuous"].end_to_end.p50_ms
        )
        assert waited_ms == pytest.approx(300)


def test_a_split_batcher_is_compared_with_its_better_part() -> None:
    names = ["split:16/32/50/8192", *_PARTS, "async:48"]
    found = ratios(list(_rows(names, rate_per_s=500.0).values()))
    assert {(one.ours, one.theirs) for one in found} == {
        ("split:16/32/50/8192", "async:16"),
        ("split:16/32/50/8192", "async:48"),
    }


def test_the_command_prints_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--virtual", "--batching", "async:8,hybrid:8", "--load-percent", "500"]
    assert main([*words, "--duration-s", "2", "--rounds", "2", "--concurrency", "4,16"]) == 0
    said = capsys.readouterr().out
    assert "| 500 % | hybrid:8 | async:8 | tokens/s | 1.0" in said
    assert "nan" not in said
    assert not math.isnan(float(said.split("100 %: ")[1].split()[0]))
    assert main(["--virtual", "no-such", "--batching"]) == 2
    assert "no engine no-such" in capsys.readouterr().err
