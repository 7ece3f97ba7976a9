"""Ends a request whose grammar holds up its engine.

In each of its steps an engine core computes, one after another, which tokens each structured
request may have next. All other requests wait for that. With xgrammar and a vocabulary of 128,000
tokens such a mask takes below 10 ms for most grammars, but 0.6 s for `([a-z]+ ?){1,20}`, with each
token. So the masks of a tenant's grammar have a budget, over all of its requests: what they take
beyond `timings.MASK_S` each is added up, and what they take less is paid back, so that a slow first
mask condemns nothing. Past `timings.MASKS_S` no more of them are computed, and the requests end
with an error, as do later ones with the same grammar.

Source: vLLM 0.32, `v1/structured_output/__init__.py`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Iterable
from typing import Any

from serve_app import timings

_REMEMBERED = 4096
"""Grammars whose time is kept, the last ones used."""

log = logging.getLogger(f"vllm.{__name__}")
"""Below vLLM's, which alone has a handler in an engine core."""


class _Spent:
    """CPU time of a grammar's masks beyond their usual one; shared by its requests."""

    __slots__ = ("s",)

    def __init__(self) -> None:
        self.s = 0.0

    def add(self, cpu_s: float) -> None:
        """A mask has taken so long."""
        self.s = max(0.0, self.s + cpu_s - timings.MASK_S)

    def exceeded(self) -> bool:
        return self.s > timings.MASKS_S


def install(manager: Any) -> None:
    """Give the grammars of vLLM's `StructuredOutputManager` their budgets."""
    manager._create_grammar = _with_budget(manager._create_grammar)
    manager._fill_bitmasks = _timed(manager._fill_bitmasks)
    manager.accept_tokens = _ended(manager.accept_tokens)


@functools.lru_cache(maxsize=_REMEMBERED)
def _spent(grammar: bytes) -> _Spent:
    return _Spent()


def _with_budget(create: Any) -> Any:
    @functools.wraps(create)
    def created(self: Any, request: Any) -> Any:
        grammar = create(self, request)
        # The salt differs from tenant to tenant (`resumable.py`): none spends another one's budget.
        text = repr((request.cache_salt, request.structured_output_request.structured_output_key))
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        grammar.spent = _spent(digest)
        return grammar

    return created


def _timed(fill: Any) -> Any:
    @functools.wraps(fill)
    def filled(self: Any, batch: Iterable[tuple[Any, int, bool]]) -> None:
        for grammar, index, apply in batch:
            spent = grammar.spent
            # CPU time of this thread: a busy machine condemns no grammar.
            start_s = time.thread_time()
            computes = apply and not spent.exceeded()
            fill(self, ((grammar, index, computes),))
            if computes:
                spent.add(time.thread_time() - start_s)

    return filled


def _ended(accept: Any) -> Any:
    @functools.wraps(accept)
    def accepted(self: Any, request: Any, token_ids: list[int]) -> bool:
        shape = request.structured_output_request
        spent = getattr(shape and shape.grammar, "spent", None)
        if spent is not None and spent.exceeded():
            log.warning("grammar_over_budget request=%s spent_s=%.1f", request.request_id, spent.s)
            return False
        return bool(accept(self, request, token_ids))

    return accepted
