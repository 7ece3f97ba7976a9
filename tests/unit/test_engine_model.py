"""The engine model: every token is generated once, the KV cache never holds more than it has, and
what is preempted ends.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.simulation.engine_model import EngineModel, Sequence
from scripts.simulation.engines import EngineParameters, Timing, decode_parameters
from serve_app.errors import SettingsError
from tests.tables import each

TIMING = Timing(
    step_ms=3.0,
    prefill_token_us=10.0,
    decode_sequence_us=50.0,
    context_token_ns=20.0,
    prefill_context_token_ps=500.0,
    new_sequence_us=30.0,
)
BLOCK = 16


def parameters(blocks: int = 40, **limits: object) -> EngineParameters:
    """A small engine."""
    return decode_parameters(
        {"name": "e", "timing": {"step_ms": 3.0}, "num_gpu_blocks": blocks, **limits}
    )


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[float, Sequence]]:
    """Sequences and when they come; some begin with the same text."""
    found: list[tuple[float, Sequence]] = []
    for number in range(draw(st.integers(1, 25))):
        prompt, group = draw(st.integers(1, 300)), draw(st.integers(0, 2))
        shared = draw(st.integers(0, prompt // BLOCK))
        sequence = Sequence(
            prompt,
            draw(st.integers(1, 120)),
            draw(st.integers(0, 2)),
            -(number + 1) * 1000,
            tuple(range(group * 1000, group * 1000 + shared)),
        )
        found.append((draw(st.floats(0, 2)), sequence))
    return sorted(found, key=lambda one: one[0])


engines = st.builds(
    EngineParameters,
    name=st.just("e"),
    timing=st.just(TIMING),
    num_gpu_blocks=st.integers(30, 80),
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.integers(16, 400),
    enable_prefix_caching=st.booleans(),
    priority_scheduling=st.booleans(),
)


def run(model: EngineModel, timed: list[tuple[float, Sequence]]) -> list[int]:
    """The sequences in the order in which they ended."""
    now_s, waiting = 0.0, list(enumerate(timed))
    numbers = {id(sequence): number for number, (_, sequence) in waiting}
    ends: list[int] = []
    while waiting or not model.idle:
        while waiting and (waiting[0][1][0] <= now_s or model.idle):
            _, (at_s, sequence) = waiting.pop(0)
            now_s = max(now_s, at_s)
            model.add(sequence)
        step = model.schedule()
        assert step is not None, "there is work, and none of it can run"
        assert model.kv.used <= model.kv.total
        held = sum(sequence.blocks for sequence in model.running)
        assert held >= model.kv.used, "blocks that nobody holds"
        assert len(model.running) <= model.parameters.max_num_seqs
        computed = sum(tokens for _, tokens in step.chunks) + len(step.decoding)
        assert computed <= model.parameters.max_num_batched_tokens
        now_s += step.duration_s
        ends += [numbers[id(sequence)] for sequence in model.complete(step)]
    return ends


@settings(max_examples=60, deadline=None)
@given(engines, arrivals())
def test_every_sequence_ends_with_its_tokens_and_leaves_no_block_behind(
    engine: EngineParameters, timed: list[tuple[float, Sequence]]
) -> None:
    model = EngineModel(engine)
    ends = run(model, timed)
    sequences = [sequence for _, sequence in timed]
    assert sorted(ends) == list(range(len(timed)))
    assert all(one.produced == one.output_tokens for one in sequences)
    assert model.kv.used == 0
    assert model.kv.free == model.kv.total
    metrics = model.metrics()
    assert metrics["vllm:generation_tokens_total"] == sum(one.output_tokens for one in sequences)
    assert metrics["vllm:prompt_tokens_total"] == sum(one.prompt_tokens for one in sequences)
    assert metrics["vllm:num_preemptions_total"] == sum(one.preemptions for one in sequences)
    assert metrics["vllm:prefix_cache_hits_total"] == sum(one.hit_tokens for one in sequences)
    assert metrics["vllm:request_success_total"] == len(timed)


def test_a_long_prompt_is_computed_in_chunks_beside_those_that_generate() -> None:
    model = EngineModel(parameters(max_num_batched_tokens=100))
    short, long = Sequence(10, 50, base=-1000), Sequence(250, 5, base=-2000)
    for sequence in (short, long):
        model.add(sequence)
    seen = []
    for _ in range(4):
        step = model.schedule()
        assert step is not None
        seen.append(([tokens for _, tokens in step.chunks], len(step.decoding)))
        model.complete(step)
    assert seen == [([10, 90], 0), ([99], 1), ([61], 1), ([], 2)]
    assert (short.produced, long.produced) == (4, 2)


def test_the_last_that_came_is_preempted_and_begins_again_first() -> None:
    model = EngineModel(parameters(blocks=8, enable_prefix_caching=False))
    first, second, third = (Sequence(48, 60, base=-1000 * n) for n in (1, 2, 3))
    for sequence in (first, second, third):
        model.add(sequence)
    order = run_to_the_end(model)
    assert order == [first, second, third]
    assert first.preemptions == 0
    assert second.preemptions > 0


def test_priority_scheduling_preempts_the_least_urgent() -> None:
    model = EngineModel(parameters(blocks=8, enable_prefix_caching=False, priority_scheduling=True))
    batch, urgent = Sequence(48, 60, 2, -1000), Sequence(48, 60, 0, -2000)
    model.add(batch)
    step = model.schedule()
    assert step is not None
    model.complete(step)
    model.add(urgent)
    assert run_to_the_end(model) == [urgent, batch]
    assert (urgent.preemptions, batch.preemptions) == (0, 1)


def run_to_the_end(model: EngineModel) -> list[Sequence]:
    """The sequences in the order in which they ended."""
    ended: list[Sequence] = []
    while (step := model.schedule()) is not None:
        ended += model.complete(step)
    return ended


@each(
    "prompt, base, hit",
    [
        # 129 tokens have KV: the last one that is generated is not computed.
        (150, 7000, 128),
        (150, 8000, 0),
        (96, 7000, 80),  # a prompt that is there as a whole still computes a token
    ],
)
def test_a_conversation_finds_its_beginning_in_the_cache(prompt: int, base: int, hit: int) -> None:
    model = EngineModel(parameters())
    follower = Sequence(prompt, 5, base=base)
    for sequence in (Sequence(100, 30, base=7000), follower):
        model.add(sequence)
        run_to_the_end(model)
    assert follower.hit_tokens == hit
    assert model.metrics()["vllm:prefix_cache_queries_total"] == 100 + prompt


def test_the_least_recently_used_beginning_is_forgotten_first() -> None:
    model = EngineModel(parameters(blocks=20))

    def hit(base: int) -> int:
        sequence = Sequence(96, 1, base=base)
        model.add(sequence)
        run_to_the_end(model)
        return sequence.hit_tokens

    assert [hit(base) for base in (1000, 2000, 3000)] == [0, 0, 0]
    assert hit(1000) == 80, "used again, so 2000 is the oldest"
    hit(4000)
    assert hit(1000) == 80
    assert hit(2000) == 16, "its end is forgotten before its beginning"


def test_what_can_never_fit_is_refused_and_wrong_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        EngineModel(parameters(blocks=4)).add(Sequence(60, 5))
    with pytest.raises(SettingsError, match="num_gpu_blocks"):
        decode_parameters({"name": "e", "timing": {"step_ms": 1.0}})
