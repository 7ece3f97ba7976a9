"""A second model for tests, made on the spot: a context of 64k tokens and a tokenizer whose tokens
are no bytes, as the long prompts of coding agents need. Its weights are random, but for an end that
comes after some twenty tokens.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from serve_app.local.environment import ROOT

FOLDER = ROOT / ".hermes" / "bpe-model"
TINY = ROOT / "workers" / "tiny_model"
POSITIONS = 65_536
_VOCABULARY, _WIDTH, _USUAL_TOKENS = 8_192, 64, 20
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


def make(folder: Path = FOLDER) -> None:
    """Write the model's files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(TINY / "chat_template.jinja", folder)
    end, pad = (_SPECIAL.index(name) for name in _SPECIAL[2:])  # they are the first tokens
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS}
    special = {"eos_token": _SPECIAL[2], "pad_token": _SPECIAL[3]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, **special}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        eos_token_id=end,
        pad_token_id=pad,
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    save_file(_weights(config, end), folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> Tokenizer:
    """Trained on this project's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("scripts/tiny-model/text/*.txt")])
    code = sorted([*ROOT.glob("serve_app/**/*.py"), *ROOT.glob("workers/*.py")])
    tokenizer.train([str(file) for file in text + code], trainer)
    return tokenizer


def _weights(config: LlamaConfig, end: int) -> dict[str, torch.Tensor]:
    """Random ones. What the first coordinate of every embedding has in common makes the end as
    likely as `_USUAL_TOKENS` says, whatever was read.
    """
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    embeddings = 0.1 * torch.randn(config.vocab_size, _WIDTH)
    embeddings[:, 0] = 1.0
    root_mean_square = math.sqrt((1 + 0.01 * (_WIDTH - 1)) / _WIDTH)
    weights["model.embed_tokens.weight"] = embeddings
    weights["lm_head.weight"][end, 0] = root_mean_square * math.log(
        config.vocab_size / _USUAL_TOKENS
    )
    return weights
