"""Answers that xgrammar allows for a schema: random walks through the grammar, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import xgrammar

_STOP = 256
"""The token that ends an answer; the others are the bytes."""
_LONGEST_BYTES = 400
_ENDS = frozenset(b'"}],:0123456789')
_SPACES = frozenset(b" \t\r\n")


@cache
def compiler() -> xgrammar.GrammarCompiler:
    """For a vocabulary of single bytes."""
    bytes_ = [bytes([byte]) for byte in range(_STOP)]
    info = xgrammar.TokenizerInfo([*bytes_, b"</s>"], stop_token_ids=[_STOP])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def answers(schema: Any, count: int, seed: int = 0) -> Iterator[str]:
    """Answers to a schema, all different walks; those that come to no end are left out.

    Raises:
        RuntimeError: xgrammar does not compile the schema.
        AssertionError: nothing can be written any more although the answer is not whole.
    """
    grammar = compiler().compile_json_schema(json.dumps(schema))
    random = Random(seed)
    for _ in range(count):
        if (text := _walk(grammar, random)) is not None:
            yield text


def _walk(grammar: Any, random: Random) -> str | None:
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, _STOP + 1)
    written = b""
    while len(written) < _LONGEST_BYTES:
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [token for token in range(_STOP + 1) if words[token >> 5] >> (token & 31) & 1]
        assert allowed, f"nothing may follow {written!r}"
        token = _chosen(allowed, random)
        if token == _STOP:
            return written.decode()
        matcher.accept_token(token)
        written += bytes([token])
    return None


def _chosen(allowed: list[int], random: Random) -> int:
    """Often what brings an answer to its end, as JSON allows white space without end."""
    if _STOP in allowed and random.random() < 0.7:
        return _STOP
    dense = [token for token in allowed if token not in _SPACES] or allowed
    ending = [token for token in dense if token in _ENDS]
    if ending and random.random() < 0.5:
        return random.choice(ending)
    ascii_ = [token for token in dense if token < 128]
    return random.choice(ascii_ or dense)
