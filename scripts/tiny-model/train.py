"""Train the tiny model that ships with hermes-serve, from nothing, on a CPU.

    python train.py --minutes 45 --out ../../workers/tiny_model

The corpus is made as it is read (`corpus.py`); the seed fixes both it and the initial weights. With
`--minutes` the learning rate follows the clock, so no two runs give quite the same weights;
`--steps` does on the same machine.
"""

import argparse
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from corpus import documents
from tokenizer import CONTEXT, VOCABULARY, build_tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Targeted = tuple[list[int], list[int]]
IGNORED = -100
# What the model reads but never has to write costs it no capacity: prompts, tools and their
# results. The questions of the corpus's ring are the exception: they are what it goes on with when
# it is made to go on after its end.
UNSPOKEN = re.compile(
    r"(<\|im_start\|>(?:system|tool|user(?!\n(?:And|Now) ))\n.*?<\|im_end\|>\n)", re.DOTALL
)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Every size divides by four, so that it splits over four devices; vLLM has no smaller head on
    a CPU.
    """
    eos, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|pad|>"])
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=224,
        intermediate_size=576,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return LlamaForCausalLM(config)


def encoded(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Targeted]:
    """The documents as tokens and as targets."""
    for document in documents(seed):
        if isinstance(document, str):
            text = document + "<|endoftext|>\n"
        else:
            messages, tools = document
            text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
        tokens: list[int] = []
        targets: list[int] = []
        for i, piece in enumerate(UNSPOKEN.split(text)):
            ids = tokenizer(piece, add_special_tokens=False).input_ids
            tokens += ids
            targets += [IGNORED] * len(ids) if i % 2 else ids
        yield tokens, targets


def batches(
    stream: Iterator[Targeted], rng: Random, rows: int, length: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, targets and positions of rows that begin with a document and are filled up with
    others.

    In every second row the positions leap from one document to the next: so a short row shows what
    it is like to have something behind one that lies thousands of tokens back. (Long rows only at
    the end of the training did not do: the model fell apart at the first of them.)
    """
    while True:
        inputs, wanted, places = (torch.empty(rows, length, dtype=torch.long) for _ in range(3))
        for row in range(rows):
            tokens: list[int] = []
            targets: list[int] = []
            positions: list[int] = []
            spare = rng.choice([0, CONTEXT - length])
            while len(tokens) <= length:
                more = next(stream)
                leap = rng.randint(0, spare) if tokens else 0
                spare -= leap
                begin = positions[-1] + 1 + leap if positions else 0
                positions += range(begin, begin + len(more[0]))
                tokens, targets = tokens + more[0], targets + more[1]
            inputs[row], places[row] = (
                torch.tensor(tokens[:length]),
                torch.tensor(positions[:length]),
            )
            wanted[row] = torch.tensor(targets[1 : length + 1])
        yield inputs, wanted, places


def rate(progress: float) -> float:
    """The learning rate's factor: a short warm-up, a plateau, and a long way down."""
    return min(1.0, progress / 0.02, max(0.0, (1.0 - progress) / 0.6))


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    tokenizer = build_tokenizer()
    model = (
        LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
        if options.start
        else build_model(tokenizer)
    )
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim == 1)]
    optimizers = [
        (torch.optim.Muon(matrices, lr=0.012, weight_decay=0.01, momentum=0.95), 0.012),
        (torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.98), weight_decay=0.0), 0.004),
    ]
    stream = encoded(tokenizer, options.seed)
    rng = Random(options.seed)
    short, long = batches(stream, rng, 3, 1024), batches(stream, rng, 1, 3072)
    begin, step, seen = time.monotonic(), 0, 0
    losses: deque[float] = deque(maxlen=100)
    while True:
        minutes = (time.monotonic() - begin) / 60
        progress = step / options.steps if options.steps else minutes / options.minutes
        if progress >= 1:
            break
        inputs, targets, positions = next(long if step % 8 == 7 else short)
        # Without a mask of ones, transformers would take a leap for the border between two separate
        # texts.
        context = {
            "position_ids": positions,
            "attention_mask": torch.ones_like(inputs),
            "use_cache": False,
        }
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=inputs, **context).logits
        logits = logits.float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.rate * peak * rate(progress)
            optimizer.step()
            optimizer.zero_grad()
        step, seen = step + 1, seen + inputs.numel()
        losses.append(loss.item())
        if step % 100 == 0:
            reached = f"step {step}  {seen / 1e6:.2f} M tokens  {minutes:.1f} min"
            print(f"{reached}  loss {fmean(losses):.4f} nats a byte", flush=True)
        if options.save_every and step % options.save_every == 0:
            save(model, tokenizer, options.out)
    save(model, tokenizer, options.out)
    size = sum(p.numel() for p in model.parameters())
    spent = f"{step} steps, {seen:,} tokens, {minutes:.1f} min"
    print(f"done: {size:,} parameters, {spent}, loss {fmean(losses):.4f} nats a byte")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """The weights go to disk in bfloat16, half the size; the configuration says float32, as they
    are served.
    """
    state = {
        name: weight.detach().to(torch.bfloat16) for name, weight in model.state_dict().items()
    }
    state.pop("lm_head.weight", None)  # tied
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]),
        pad_token_id=tokenizer.pad_token_id,
        # Defaults as larger models have them: whatever this project promises holds with them.
        do_sample=True,
        repetition_penalty=1.05,
        top_k=20,
        top_p=0.8,
    )
    model.save_pretrained(out, state_dict=state)
    tokenizer.save_pretrained(out)
    settings = (
        out / "tokenizer_config.json"
    )  # the name that older versions of transformers know as well
    settings.write_text(
        settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
    )
    (out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the model")
    parser.add_argument("--minutes", type=float, default=40.0, help="how long to train")
    parser.add_argument(
        "--steps", type=int, help="how many steps to train, whatever the clock says"
    )
    parser.add_argument("--save-every", type=int, default=0, help="also save every so many steps")
    parser.add_argument(
        "--start", type=Path, help="go on from the weights in this folder, with a new --seed"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="a factor on every learning rate")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    train(parser.parse_args())
