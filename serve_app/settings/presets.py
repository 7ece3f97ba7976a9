"""Presets: one word for the settings that decide between short waits and high throughput. It fills
in what the configuration leaves out, before the tree is validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

PresetName = Literal["latency", "balanced", "throughput"]
AUTO_FIT = -1
"""vLLM's word for the model's own length, or as much of it as fits into the KV cache."""


class Preset(NamedTuple):
    """What one word stands for."""

    sequences: int
    """How many requests one engine runs at a time."""
    batched_tokens: int
    """How many tokens of prompts and answers one step of the engine computes at most."""
    memory_share: float
    """Share of a GPU's memory that the engine takes."""
    busy_share: float
    """Share of what an engine may run that autoscaling aims for: the lower, the earlier another
    replica starts; the higher, the less is idle.
    """


PRESETS: dict[PresetName, Preset] = {
    "latency": Preset(64, 8_192, 0.85, 0.25),
    "balanced": Preset(256, 32_768, 0.90, 0.5),
    "throughput": Preset(512, 65_536, 0.92, 0.75),
}


def fill_in(args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the values of their preset, where they set none themselves. A malformed
    section stays as it is: its own validation explains what is wrong.
    """
    preset = PRESETS.get(args["preset"]) if isinstance(args.get("preset"), str) else None
    workers, engine = _section(args, "workers"), _section(args, "engine")
    if preset is None or workers is None or engine is None:
        return dict(args)
    filled = _with_sizes(preset, workers)
    given = _section(engine, "args")
    if engine.get("kind", "vllm") != "vllm" or given is None:
        return {**args, "workers": filled}
    on_gpu = workers.get("device") == "gpu"
    of_engine = {**engine, "args": _with_vllm(preset, given, on_gpu=on_gpu)}
    return {**args, "workers": filled, "engine": of_engine}


def _with_sizes(preset: Preset, workers: Mapping[str, Any]) -> dict[str, Any]:
    """The workers' section. With a target above what an engine runs, no replica would be added."""
    filled = {"max_running_requests": preset.sequences, **workers}
    autoscaling, running = _section(workers, "autoscaling"), filled["max_running_requests"]
    if workers.get("autoscaling") is None or autoscaling is None or not isinstance(running, int):
        return filled
    target = max(1.0, preset.busy_share * running)
    return {**filled, "autoscaling": {"target_ongoing_requests": target, **autoscaling}}


def _with_vllm(preset: Preset, given: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """vLLM's arguments. On a CPU there is no share of memory: VLLM_CPU_KVCACHE_SPACE bounds the
    cache there, and vLLM reads the share as one of the whole machine.
    """
    ours: dict[str, Any] = {
        "max_num_batched_tokens": preset.batched_tokens,
        "enable_prefix_caching": True,
        "max_model_len": AUTO_FIT,
    }
    if on_gpu:
        ours["gpu_memory_utilization"] = preset.memory_share
    chosen = {name.replace("-", "_") for name in given}
    return {**{name: value for name, value in ours.items() if name not in chosen}, **given}


def _section(args: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What is set in a section; empty if it is left out, None if it is no section."""
    value = args.get(name)
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else None
