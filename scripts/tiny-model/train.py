"""Train the tiny model that ships with hermes-serve, from nothing, on a CPU.

    python train.py --minutes 45 --out build/tiny_model

Its tokenizer, chat template and configuration are those in `workers/tiny_model`. Each byte is a
token, so a character of several bytes spans several tokens. That is on purpose: whatever streams
text must cope with a character that is cut in the middle, and with this model it always has to.
Every size divides by four, so that the model splits over four devices.

The corpus is made as it is read (`corpus.py`); the seed fixes both it and the initial weights. The
learning rate follows the clock, so no two runs give quite the same weights.
"""

import argparse
import re
import shutil
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from corpus import documents
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODEL = Path(__file__).resolve().parents[2] / "workers" / "tiny_model"
CONFIG = LlamaConfig.from_pretrained(MODEL)
Targeted = tuple[list[int], list[int]]
IGNORED = -100
# What the model reads but never has to write costs it no capacity: prompts, tools and their
# results. The questions of the corpus's ring are the exception: they are what it goes on with when
# it is made to go on after its end.
UNSPOKEN = re.compile(
    r"(<\|im_start\|>(?:system|tool|user(?!\n(?:And|Now) ))\n.*?<\|im_end\|>\n)", re.DOTALL
)


def encoded(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Targeted]:
    """The documents as tokens and as targets."""
    for document in documents(seed):
        if isinstance(document, str):
            text = document + "<|endoftext|>\n"
        else:
            messages, tools = document
            text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
        tokens, targets = list[int](), list[int]()
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
            tokens, targets, positions = list[int](), list[int](), list[int]()
            spare = rng.choice([0, CONFIG.max_position_embeddings - length])
            while len(tokens) <= length:
                more = next(stream)
                leap = rng.randint(0, spare) if tokens else 0
                spare -= leap
                begin = positions[-1] + 1 + leap if positions else 0
                positions += range(begin, begin + len(more[0]))
                tokens, targets = tokens + more[0], targets + more[1]
            inputs[row] = torch.tensor(tokens[:length])
            places[row] = torch.tensor(positions[:length])
            wanted[row] = torch.tensor(targets[1 : length + 1])
        yield inputs, wanted, places


def rate(progress: float) -> float:
    """The learning rate's factor: a short warm-up, a plateau, and a long way down."""
    return min(1.0, progress / 0.02, max(0.0, (1.0 - progress) / 0.6))


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(2)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    model = (
        LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
        if options.start
        else LlamaForCausalLM(CONFIG)
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
        progress = minutes / options.minutes
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
    save(model, options.out)
    size = sum(p.numel() for p in model.parameters())
    spent = f"{step} steps, {seen:,} tokens, {minutes:.1f} min"
    print(f"done: {size:,} parameters, {spent}, loss {fmean(losses):.4f} nats a byte")


def save(model: LlamaForCausalLM, out: Path) -> None:
    """The weights go to disk in bfloat16, half the size; the configuration says float32, as they
    are served.
    """
    state = {
        name: weight.detach().to(torch.bfloat16)
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    if out.resolve() != MODEL:
        shutil.copytree(MODEL, out, dirs_exist_ok=True)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the model")
    parser.add_argument("--minutes", type=float, default=40.0, help="how long to train")
    parser.add_argument(
        "--start", type=Path, help="go on from the weights in this folder, with a new --seed"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="a factor on every learning rate")
    parser.add_argument("--seed", type=int, default=20)
    train(parser.parse_args())
