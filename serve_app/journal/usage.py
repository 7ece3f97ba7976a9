"""What a request has used: the counts in its journal (the sums are in the `ledger`). Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from serve_app.errors import decoding
from serve_app.journal.events import SEPARATOR


class Usage(NamedTuple):
    """Tokens of requests. What earlier attempts made of an answer counts once."""

    prompt: int = 0
    """Tokens of its prompts, as the engine counted them."""
    cached: int = 0
    """How many of them the engine's prefix cache had."""
    output: int = 0
    reasoning: int = 0
    """How many of the output were reasoning, if the engine's server says so."""
    recomputed: int = 0
    """Tokens, of prompt or output, that were computed again after an engine's death. Nobody is
    billed for them.
    """

    @classmethod
    @decoding
    def decode(cls, raw: bytes) -> Usage:
        """Parse the field `u`; a newer version may have added numbers."""
        return cls(*map(int, raw.split()[: len(cls._fields)]))


class _Details(msgspec.Struct):
    reasoning_tokens: int = 0


class _OfAnAnswer(msgspec.Struct):
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _OfAnAnswer | None = None
    response: _Answer | None = None


_answers = msgspec.json.Decoder(_Answer)


def reasoning_tokens(answer: bytes, streamed: bool) -> int:
    """How many tokens of reasoning an answer, or the last events of a streamed one, tell of; 0 if
    they tell of none.
    """
    parts = answer.split(SEPARATOR) if streamed else [b"data: " + answer]
    for part in reversed(parts):
        try:
            found = _answers.decode(part.partition(b"data: ")[2])
        except msgspec.MsgspecError:
            continue
        usage = (found.response or found).usage
        details = usage and (usage.completion_tokens_details or usage.output_tokens_details)
        if details:
            return details.reasoning_tokens
    return 0
