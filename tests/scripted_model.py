"""A model that plays a script, inside the real engine: vLLM's route, parser, grammar, sampler and
journal see tokens that an engine made. A prompt with `Play /some/script.json` gets, for each result
of a tool that follows it, the next call of the script, and at last its text; all other prompts get
what the model says.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from tests.scripts_to_play import Script

_PLAYED, _RESULT, _TOOLS, _END = re.compile(r"Play (/\S+\.json)"), "<tool_response>", "<tools>", 2


class _Turn:
    """A request that plays a turn of a script."""

    def __init__(self, tokens: list[int], output: list[int], held_at: int, marks: Path) -> None:
        self._tokens = tokens
        self._output = output
        self._held_at = held_at
        self._marks = marks

    def next_token(self) -> int:
        at = len(self._output)
        if at == self._held_at:
            self._hold()
        return self._tokens[min(at, len(self._tokens) - 1)]

    def _hold(self) -> None:
        held, go = (self._marks.with_name(f"{word}-{self._marks.name}") for word in ("held", "go"))
        if not go.exists():
            written = held.with_suffix(".new")
            written.write_text(str(os.getpid()))
            written.rename(held)
        while not go.exists():
            time.sleep(0.02)


class Scripted(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        folder = Path(vllm_config.model_config.tokenizer)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._turns: dict[int, _Turn] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._turns, batch_update, self._turn)

    def _turn(self, _: Any, prompt: list[int] | None, output: list[int]) -> _Turn | None:
        text = self._tokenizer.decode(prompt or [], skip_special_tokens=False)
        played = list(_PLAYED.finditer(text))
        if not played:
            return None
        file = Path(played[-1][1])
        script = Script(**json.loads(file.read_text()))
        number = text.count(_RESULT, played[-1].end())
        if _TOOLS not in text:  # an agent wants a title for its session
            number = len(script.calls)
        said = self._tokenizer.encode(script.says(number), add_special_tokens=False).ids
        held_at = len(said) // 2 if number in script.held else -1
        return _Turn([*said, _END], output, held_at, file.with_name(str(number)))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, turn in self._turns.items():
            token = turn.next_token()
            allowed = logits[row, token].item()
            logits[row] = float("-inf")
            logits[row, token] = allowed  # what a grammar forbids stays so
        return logits
