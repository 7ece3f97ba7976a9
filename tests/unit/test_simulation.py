"""The service in virtual time: equal seeds give equal results, faults lose nothing, and the orders
of work differ as they should.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest

from scripts.simulation import virtual_time
from scripts.simulation.engine import VirtualEngine
from scripts.simulation.engine_model import Sequence
from scripts.simulation.engines import EngineParameters, Timing, engine_names, load_engine
from scripts.simulation.figures import figures
from scripts.simulation.service import Cluster, Fault, Outcome, simulate
from scripts.simulation.work import Work
from scripts.simulation.workloads import (
    Kind,
    Lengths,
    Talk,
    bursts,
    closed_loop,
    conversations,
    open_loop,
    poisson,
)

ENGINE = EngineParameters(
    "e", Timing(step_ms=5.0, prefill_token_us=20.0, decode_sequence_us=100.0), num_gpu_blocks=2000
)
REALTIME = Kind(Lengths(100), Lengths(30), "realtime", "tenant-r")
BATCH = Kind(Lengths(100), Lengths(60), "batch", "tenant-b")


def flooded(policy: str = "hermes", seed: str = "1") -> Outcome:
    """200 batch requests at once, and realtime ones that come later."""
    sources = [
        open_loop([0.0] * 200, BATCH, f"{seed}/b"),
        open_loop(poisson(4, 10, f"{seed}/r", 1.0), REALTIME, f"{seed}/r"),
    ]
    return simulate(Cluster(ENGINE, 2, 4), sources, policy)


def times(outcome: Outcome) -> list[tuple[float | None, ...]]:
    return [(one.started_s, one.first_token_s, one.ended_s) for one in outcome.records]


def test_time_jumps_to_the_next_timer() -> None:
    seen: list[str] = []

    async def one(name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        seen.append(name)

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(one("b", 7200.0))
            group.create_task(one("a", 3600.0))
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 7200.0
    assert seen == ["a", "b"]


def test_a_simulation_that_waits_for_nothing_says_so() -> None:
    with pytest.raises(RuntimeError, match="nothing will ever cause"):
        virtual_time.run(asyncio.Event().wait())


def test_equal_seeds_give_equal_results() -> None:
    assert times(flooded()) == times(flooded())
    assert times(flooded()) != times(flooded(seed="2"))


@pytest.mark.parametrize("policy", ["hermes", "fcfs"])
def test_every_request_is_answered_once_with_all_of_its_tokens(policy: str) -> None:
    outcome = flooded(policy)
    assert all(one.answered and one.attempts == 1 for one in outcome.records)
    assert all(one.tokens == one.work.output_tokens for one in outcome.records)
    assert sum(outcome.served.values()) == sum(one.tokens for one in outcome.records)
    for one in outcome.records:
        assert one.started_s is not None
        assert one.first_token_s is not None
        assert one.ended_s is not None
        assert one.arrived_s <= one.started_s < one.first_token_s <= one.ended_s


def test_urgent_requests_wait_for_a_flood_only_without_an_order_of_work() -> None:
    waits = {
        policy: {group.name: group.wait_p99_s for group in figures(flooded(policy), 1, {}).groups}
        for policy in ("hermes", "fcfs")
    }
    assert waits["hermes"]["realtime"] < waits["hermes"]["batch"]
    assert waits["hermes"]["realtime"] < waits["fcfs"]["realtime"] / 2


def test_no_slot_is_free_for_longer_than_a_claim_takes_while_requests_wait() -> None:
    outcome = flooded()
    found = figures(outcome, 1, {})
    # Redis's round trip, and the pause of the dispatcher that waits for arrivals
    assert found.idle_slot_s < len(outcome.records) * 2 * outcome.cluster.claim_ms / 1e3
    assert found.slots_used > 0.9


@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_an_engine_that_fails_loses_no_token(kind: str) -> None:
    sources = [open_loop(poisson(10, 20, "1"), BATCH, "1")]
    outcome = simulate(Cluster(ENGINE, 2, 16), sources, faults=[Fault(kind, 5.0, 0, 5.0)])
    again = [one for one in outcome.records if one.attempts > 1]
    assert again, "nothing was running on it"
    assert all(one.tokens == one.work.output_tokens for one in outcome.records)
    if kind == "hang":
        assert max(one.whole_s for one in again) > 3.0, "a hang is found out by the lease"
    generated = sum(one.metrics()["vllm:generation_tokens_total"] for one in outcome.engines)
    assert generated == sum(one.work.output_tokens for one in outcome.records)


def test_turns_of_a_conversation_reach_the_engine_that_knows_them() -> None:
    talk = Talk(Lengths(5, 1.3), Lengths(100), Lengths(50), 2.0, 3000)
    outcome = simulate(
        Cluster(ENGINE, 3, 16, ingresses=2), [conversations(poisson(6, 20, "1"), talk, "1")]
    )
    turns: dict[str, list[str]] = {}
    for one in outcome.records:
        turns.setdefault(one.work.session, []).append(one.engine)
    stayed = [after == before for engines in turns.values() for before, after in pairwise(engines)]
    assert len(stayed) > 100
    # The load bound moves some; without affinity a third would stay.
    assert sum(stayed) / len(stayed) > 0.7
    assert sum(one.hit_tokens for one in outcome.records) > 1000


def test_users_of_a_closed_loop_wait_for_their_answers() -> None:
    outcome = simulate(Cluster(ENGINE), [closed_loop(3, BATCH, 20, "1", think_s=0.5)])
    assert max(one.arrived_s for one in outcome.records) < 20
    ordered = sorted(outcome.records, key=lambda one: one.arrived_s)
    for one in ordered[3:]:
        open_then = [
            other
            for other in ordered
            if other.arrived_s < one.arrived_s and (other.ended_s or 0.0) > one.arrived_s
        ]
        assert len(open_then) < 3


def test_what_is_too_long_is_refused_and_what_is_too_late_expires() -> None:
    async def source(service: object) -> None:
        service.submit(Work(5000, 1))  # type: ignore[attr-defined]
        for _ in range(3):
            service.submit(Work(100, 1000, deadline_s=6.0))  # type: ignore[attr-defined]

    outcome = simulate(Cluster(ENGINE, 1, 1), [source])
    (everyone, *_) = figures(outcome, 1, {}).groups
    assert (everyone.refused, everyone.answered, everyone.expired) == (1, 2, 1)


def test_a_simulation_can_stop_in_the_middle() -> None:
    outcome = simulate(Cluster(ENGINE, 1, 1), [open_loop([0.0] * 3, BATCH, "1")], until_s=0.2)
    assert outcome.end_s == pytest.approx(0.2)
    (everyone, *_) = figures(outcome, 1, {}).groups
    assert everyone.open == 3
    # a step takes 5.1 ms, the prompt's a little longer
    assert 30 < everyone.tokens < 40


def test_bursts_have_the_rate_and_the_unevenness_that_were_asked_for() -> None:
    at_s = bursts(10, 3, 2000, "1")
    gaps = [after - before for before, after in pairwise(at_s)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 1 / mean == pytest.approx(10, rel=0.15)
    assert spread / mean == pytest.approx(3, rel=0.15)


@pytest.mark.parametrize("name", engine_names())
def test_every_engine_of_the_repository_loads_and_says_where_its_figures_come_from(
    name: str,
) -> None:
    engine = load_engine(name)
    assert engine.name == name
    assert len(engine.source) > 20
    assert name.startswith("estimate-") == ("ESTIMATE" in engine.source)


@pytest.mark.nightly  # a tool
@pytest.mark.parametrize("users", [1, 8, 32, 128])
def test_the_tiny_models_engine_is_as_far_from_what_was_measured_as_the_document_says(
    users: int,
) -> None:
    parameters, seconds = load_engine("tiny-cpu"), 30.0
    first_s: list[float] = []
    each_s: list[float] = []
    whole_s: list[float] = []

    async def user(engine: VirtualEngine, number: int) -> None:
        loop = asyncio.get_running_loop()
        for asked in range(1000):
            began_s, came_s = loop.time(), list[float]()
            sequence = Sequence(64, 128, base=-(1000 * number + asked + 1) << 20)
            await engine.run(sequence, lambda: came_s.append(loop.time()))  # noqa: B023
            if loop.time() > seconds:
                return
            first_s.append(came_s[0] - began_s)
            each_s.append((loop.time() - came_s[0]) / 127)
            whole_s.append(loop.time() - began_s)

    async def main() -> None:
        engine = VirtualEngine("e", parameters)
        async with asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(engine, number))

    virtual_time.run(main())
    modelled = (
        f"{median(first_s) * 1e3:.1f}",
        f"{median(each_s) * 1e3:.2f}",
        f"{users * 128 / mean(whole_s):,.0f}",  # of a closed loop
    )
    print(users, modelled)
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {users} |"))
    shown = [cell.partition(" / ")[2].partition(" ")[0] for cell in row.split(" | ")[1:4]]
    for found, written in zip(modelled, shown, strict=True):
        if written:
            exact = float(written.replace(",", ""))
            assert float(found.replace(",", "")) == pytest.approx(exact, rel=0.03)
