"""What a preset sets, vLLM's own parser takes. No engine starts."""

import pytest

pytest.importorskip("vllm")

from serve_app.settings import load_settings
from serve_app.settings.tree import PRESETS, PresetName
from workers.vllm_engine import engine_arguments


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("name", list(PRESETS))
def test_vllm_takes_every_value_of_a_preset(name: PresetName, device: str) -> None:
    preset = PRESETS[name]
    args = engine_arguments(load_settings({"preset": name, "workers": {"device": device}}))
    assert args.max_num_seqs == preset.sequences
    assert args.max_num_batched_tokens == preset.batched_tokens
    assert args.enable_prefix_caching is True
    assert args.max_model_len == -1
    if device == "gpu":
        assert args.gpu_memory_utilization == preset.memory_share
