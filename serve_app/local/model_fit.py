"""Whether a model's weights and its KV cache fit into memory, from the files of the model. Standard
library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_KV_BYTES = 2
"""Of one number in the KV cache, unless it is quantized."""


class Model(NamedTuple):
    """What a model's files say. `token_bytes`: of KV cache; 0 if its config does not tell."""

    weights_bytes: int
    token_bytes: int
    longest_tokens: int


def folder_of(model: str) -> Path | None:
    """The folder of a model's files: itself, or the one in the hub's cache; None if it is not on
    this machine.
    """
    if Path(model).is_dir():
        return Path(model)
    cache = downloaded(model)
    main = cache / "refs" / "main"
    revisions = [cache / "snapshots" / main.read_text().strip()] if main.exists() else []
    revisions += sorted(cache.glob("snapshots/*"))
    return next((found for found in revisions if (found / "config.json").exists()), None)


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or f"{home}/hub"))


def downloaded(model: str) -> Path:
    """Where it keeps a model's files, if it has any."""
    return hub_cache() / f"models--{model.replace('/', '--')}"


def read(folder: Path) -> Model:
    """Read a model's config and the sizes of its files.

    Raises:
        OSError: there is no config.
        ValueError: it is not JSON.
    """
    whole = json.loads((folder / "config.json").read_text())
    config = {**whole, **(whole.get("text_config") or {})}
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    shards = [file for file in files if not file.name.startswith("consolidated")]  # the same again
    weights_bytes = sum(file.stat().st_size for file in shards or files)
    if (config.get("dtype") or config.get("torch_dtype")) == "float32":
        weights_bytes //= 2  # vLLM loads them with 16 bits
    return Model(weights_bytes, _token_bytes(config), int(config.get("max_position_embeddings", 0)))


def _token_bytes(config: Mapping[str, Any]) -> int:
    try:
        layers = int(config["num_hidden_layers"])
        if rank := config.get("kv_lora_rank"):  # DeepSeek's latent attention
            return layers * (int(rank) + int(config.get("qk_rope_head_dim") or 0)) * _KV_BYTES
        heads = int(config["num_attention_heads"])
        size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        return 2 * layers * int(config.get("num_key_value_heads") or heads) * size * _KV_BYTES
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        return 0


def problem(name: str, model: Model, tokens: int, free_bytes: float, of: str) -> str:
    """Why the model does not fit; empty if it does.

    Args:
        tokens: of the longest context that is wanted; 0: the longest that fits.
        free_bytes: for weights and KV cache.
        of: what kind of memory, for the message.
    """
    left_bytes = free_bytes - model.weights_bytes
    sizes = f"{model.weights_bytes / 1e9:,.1f} GB of weights"
    if left_bytes <= model.token_bytes:
        return (
            f"{name} has {sizes}, and there are {max(0, free_bytes) / 1e9:,.1f} GB of {of} for "
            "them: choose a smaller or quantized model, or divide it (--tensor-parallel-size)"
        )
    if tokens * model.token_bytes > left_bytes:
        return (
            f"{name} leaves no room for {tokens:,} tokens beside its {sizes} in "
            f"{free_bytes / 1e9:,.1f} GB of {of}: set engine.args.max_model_len to "
            f"{int(left_bytes / model.token_bytes):,} or less"
        )
    return ""
