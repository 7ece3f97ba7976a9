"""What a worker tells of vLLM's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from workers.vllm_engine import EngineUsage


def config(blocks: int | None = 64) -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=16),
        model_config=SimpleNamespace(max_model_len=512),
    )


@pytest.mark.parametrize(("blocks", "kv_tokens"), [(64, 64 * 16), (1, 0), (None, 0)])
def test_an_engine_that_keeps_no_kv_says_so(blocks: int | None, kv_tokens: int) -> None:
    """vLLM's only block is then the null block, as for encoders that make embeddings."""
    report = EngineUsage().report("e", config(blocks), idle=True)
    assert (report.kv_tokens, report.max_model_len) == (kv_tokens, 512)


def test_what_waits_for_a_grammar_does_not_wait_for_a_place() -> None:
    """vLLM counts it apart. A client's slow schemas must not take places from others."""
    stats = SimpleNamespace(
        kv_cache_usage=0.5, num_running_reqs=3, num_waiting_reqs=1, num_skipped_waiting_reqs=9
    )
    usage = EngineUsage()
    usage.stepped(0, stats, None)
    report = usage.report("e", config(), idle=False)
    assert (report.running, report.waiting, report.used_tokens) == (3, 1, 512)
