"""The pure parts of the benchmark: figures, process kinds, arrivals, and counting streamed
tokens.
"""

import math
import os
from dataclasses import fields
from itertools import pairwise

import pytest

from scripts.benchmark.compare import TOTAL, cost_model, ratios
from scripts.benchmark.measurement import Row
from scripts.benchmark.processes import Process, Scope, classify, cpu_by_kind, descendants, members
from scripts.benchmark.stats import (
    Latency,
    percentile,
    poisson_arrivals_s,
    round_ratios,
    split_cost,
)
from tests.tables import each

pytestmark = pytest.mark.nightly  # a tool


def _row(name: str, *, round: int, tokens_per_s: float = 1.0, **changes: object) -> Row:
    none = Latency(0.0, 0.0)
    values: dict[str, object] = {field.name: 0.0 for field in fields(Row)} | {
        **{"name": name, "load": "8", "round": round, "tokens_per_s": tokens_per_s},
        **{"requests": 10, "error_kinds": {}, "tokens": 1280, "wall_s": 1.0, "cpu_s": {}},
        **{"ttft": none, "inter_token": none, "end_to_end": none, "interactive": none},
    }
    return Row(**(values | changes))  # type: ignore[arg-type]


class TestFigures:
    def test_a_percentile_is_interpolated_between_its_neighbours(self) -> None:
        assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
        assert percentile(range(101), 99) == 99
        assert percentile([10.0, 20.0], 99) == pytest.approx(19.9)

    def test_nothing_has_no_percentile(self) -> None:
        assert math.isnan(percentile([], 50))

    def test_a_round_in_which_a_peer_measured_nothing_has_no_ratio(self) -> None:
        assert round_ratios([1.0, 4.0], [0.0, 2.0]) == [2.0]

    def test_the_first_system_is_compared_with_each_of_the_others(self) -> None:
        speeds = {"a": (200.0, 20.0, 300.0), "b": (100.0, 10.0, 100.0), "c": (400.0, 40.0, 600.0)}
        rows = [
            _row(name, round=number, tokens_per_s=speed)
            for name, speed_of_rounds in speeds.items()
            for number, speed in enumerate(speed_of_rounds, 1)
        ]
        found = {ratio.theirs: ratio for ratio in ratios(rows) if ratio.measure == "tokens/s"}
        assert found["b"].per_round == (2.0, 2.0, 3.0)
        assert found["b"].spread.median == 2.0
        assert found["c"].spread.median == 0.5


class TestCostModel:
    def test_equal_shapes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="must exceed"):
            split_cost(128, 1.0, 128, 1.0)

    def test_every_kind_of_process_gets_its_own_cost_and_the_generator_is_no_part_of_the_sum(
        self,
    ) -> None:
        def cpu_s(requests: int, tokens: int) -> dict[str, float]:
            ingress, redis = requests * 1e-3 + tokens * 50e-6, tokens * 10e-6
            return {"ingress replica": ingress, "redis-server": redis, "load generator": 5.0}

        short = _row("own", round=1, requests=100, tokens=200, cpu_s=cpu_s(100, 200))
        long = _row("own", round=1, requests=10, tokens=1280, cpu_s=cpu_s(10, 1280))
        costs = {cost.kind: cost for cost in cost_model([short, long])}
        assert (costs["ingress replica"].per_token_us, costs["ingress replica"].per_request_ms) == (
            50.0,
            1.0,
        )
        assert (costs["redis-server"].per_token_us, costs["redis-server"].per_request_ms) == (
            10.0,
            0.0,
        )
        assert (costs[TOTAL].per_token_us, costs[TOTAL].per_request_ms) == (60.0, 1.0)


class TestArrivals:
    def test_equal_seeds_give_equal_arrivals_and_others_do_not(self) -> None:
        assert poisson_arrivals_s(50, 10, seed=3) == poisson_arrivals_s(50, 10, seed=3)
        assert poisson_arrivals_s(50, 10, seed=3) != poisson_arrivals_s(50, 10, seed=4)

    def test_arrivals_come_in_order_within_the_duration_at_about_the_rate(self) -> None:
        arrivals_s = poisson_arrivals_s(100, 50, seed=1)
        assert arrivals_s == sorted(arrivals_s)
        assert arrivals_s[0] > 0
        assert arrivals_s[-1] < 50
        assert len(arrivals_s) == pytest.approx(5000, rel=0.05)

    def test_the_gaps_vary_as_much_as_their_mean_as_those_of_independent_users_do(self) -> None:
        arrivals_s = poisson_arrivals_s(100, 50, seed=1)
        gaps_s = [later - earlier for earlier, later in pairwise(arrivals_s)]
        mean_s = sum(gaps_s) / len(gaps_s)
        deviation_s = math.sqrt(sum((gap_s - mean_s) ** 2 for gap_s in gaps_s) / len(gaps_s))
        assert deviation_s == pytest.approx(mean_s, rel=0.1)

    def test_a_rate_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="above 0"):
            poisson_arrivals_s(0, 1, seed=0)


class TestProcessKinds:
    @each(
        "command_line, kind",
        [
            ("redis-server *:6379", "redis-server"),
            ("/usr/bin/redis-server 127.0.0.1:7001", "redis-server"),
            ("/venv/bin/haproxy -W -f haproxy.cfg", "haproxy"),
            ("ray::ServeReplica:default:Ingress", "ingress replica"),
            ("ray::ServeReplica:default:OpenAiIngress.handle_request_streaming", "ingress replica"),
            ("ray::ServeReplica:hermes:Worker", "worker replica"),
            ("ray::ServeReplica:ingress:Worker.execute", "worker replica"),
            ("ray::ServeReplica:default:LLMServer:tiny", "worker replica"),
            ("ray::ServeReplica:default:Autoscaler", "other replica"),
            ("ray::ServeController.listen_for_change", "serve controller"),
            ("ray::ProxyActor", "serve proxy"),
            ("ray::HAProxyManager", "serve proxy"),
            ("ray::IDLE", "ray other"),
            ("ray::DashboardAgent", "ray daemons"),
            ("/venv/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "ray daemons"),
            ("/venv/ray/core/src/ray/gcs/gcs_server --log_dir=x", "ray daemons"),
            ("/venv/bin/python -u /venv/ray/dashboard/dashboard.py --host=x", "ray daemons"),
            ("VLLM::EngineCore", "engine core"),
            ("VLLM::EngineCore_DP0", "engine core"),
            ("VLLM::Worker_TP3", "engine worker"),
            ("/venv/bin/python -m vllm.entrypoints.openai.api_server --model m", "vllm api server"),
            ("VLLM::APIServer", "vllm api server"),
            ("/usr/bin/vim redis-server.conf", "other"),
            ("", "other"),
        ],
    )
    def test_a_command_line_tells_the_kind_of_process(self, command_line: str, kind: str) -> None:
        assert classify(command_line) == kind

    @staticmethod
    def _table(*lines: tuple[int, int, float, str]) -> dict[int, Process]:
        return {
            pid: Process(pid, parent, 7, cpu_s, command) for pid, parent, cpu_s, command in lines
        }

    def test_a_scope_is_its_roots_and_all_that_descends_from_them(self) -> None:
        table = self._table(
            (900001, 1, 0, "a"),
            (900002, 900001, 0, "b"),
            (900003, 900002, 0, "c"),
            (900004, 1, 0, "d"),
        )
        assert descendants(table, [900001, 999999]) == {900001, 900002, 900003}

    def test_a_mark_in_the_arguments_finds_what_left_its_parent(self) -> None:
        table = self._table(
            (900001, 1, 0, "raylet --dir=/state/x"),
            (900002, 900001, 0, "ray::IDLE"),
            (900003, 1, 0, "y"),
        )
        assert members(table, Scope(marks=("/state/x",))) == {900001, 900002}

    def test_this_process_and_the_shell_that_was_given_the_mark_are_not_in_the_scope(self) -> None:
        shell, child = os.getppid(), 900001
        table = self._table(
            (shell, 1, 0, "bash --match /state/x"),
            (os.getpid(), shell, 0, "/state/x"),
            (child, shell, 0, "z"),
        )
        assert members(table, Scope(marks=("/state/x",))) == set()

    def test_without_roots_or_marks_every_known_kind_counts_that_no_other_system_owns(self) -> None:
        table = self._table(
            (900001, 1, 0, "redis-server *:1"),
            (900002, 1, 0, "redis-server *:2"),
            (900003, 1, 0, "vim"),
        )
        assert members(table, Scope(), [Scope(roots=frozenset({900002}))]) == {900001}

    def test_cpu_is_the_difference_of_two_readings_summed_by_kind(self) -> None:
        before = self._table((1, 0, 5.0, "redis-server"), (2, 0, 1.0, "VLLM::EngineCore"))
        after = self._table(
            (1, 0, 7.5, "redis-server"),
            (2, 0, 2.0, "VLLM::EngineCore"),
            (3, 0, 0.5, "redis-server"),
        )
        assert cpu_by_kind(before, after, {1, 2, 3}) == {"redis-server": 3.0, "engine core": 1.0}

    def test_a_pid_that_came_to_mean_another_process_counts_from_its_birth(self) -> None:
        before = {1: Process(1, 0, 7, 50.0, "redis-server")}
        after = {1: Process(1, 0, 8, 0.25, "redis-server")}
        assert cpu_by_kind(before, after, {1}) == {"redis-server": 0.25}
