"""The engine model: every token is generated once, the KV cache never holds more than it has, and
what is preempted ends.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.simulation.engine_model import EngineModel, Sequence
from scripts.simulation.engines import EngineParameters, Timing

TIMING = Timing(
    step_ms=3.0,
    prefill_token_us=10.0,
    decode_sequence_us=50.0,
    context_token_ns=20.0,
    prefill_context_token_ps=500.0,
    new_sequence_us=30.0,
)
BLOCK = 16


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
