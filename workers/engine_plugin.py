"""Lets vLLM's engine resume a request that it has never seen, and bounds what a grammar may take.

vLLM resumes its own preempted requests exactly: it computes prompt and output again and knows
which tokens are output, so penalties, bad words, `min_tokens` and stop conditions count them. This
plug-in makes a request that carries `PRIOR` in its `extra_args` look like one of those, and
advances its grammar over these tokens. vLLM loads it in every process of an engine by the entry
point `vllm.general_plugins`; `warm_up` in `workers/continuation.py` checks that it works.

Source: vLLM 0.32, `v1/request.py`, `v1/worker/gpu_input_batch.py`, `v1/structured_output`. The
second model runner (`v1/worker/gpu`) takes prompt and output from the scheduler, as for a preempted
request, and needs no patch.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from serve_app import timings

PRIOR = "hermes_prior_token_ids"
"""Key in `SamplingParams.extra_args`: ids of the output tokens of earlier attempts. No client sets
it (`workers/resumable.py`)."""

_REMEMBERED = 4096
"""Grammars whose time is kept, the last ones used."""

log = logging.getLogger(f"vllm.{__name__}")
"""Below vLLM's, which alone has a handler in an engine core."""


def prior_of(params: Any) -> list[int]:
    return (params.extra_args or {}).get(PRIOR) or [] if params is not None else []


def install() -> None:
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager as Grammars
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    wrap(Request, "__init__", _resumed_request)
    wrap(CachedRequestState, "__post_init__", _resumed_state)
    wrap(Grammars, "_create_grammar", _created)
    wrap(Grammars, "_fill_bitmasks", _timed)
    wrap(Grammars, "accept_tokens", _ended)


def _resumed_request(create: Any, self: Any, *args: Any, **options: Any) -> None:
    """The scheduler's side: what counts tokens, and hands them to the second model runner."""
    create(self, *args, **options)
    if prior := prior_of(self.sampling_params):
        self.append_output_token_ids(prior)
        # For a request that was not preempted vLLM asserts that the prefix cache holds no more than
        # its prompt; here the cache may hold output, too.
        self.prefill_stats = None


def _resumed_state(complete: Any, self: Any) -> None:
    """The first model runner's side: the sampler's view of a request."""
    complete(self)
    if prior := prior_of(self.sampling_params):
        self.output_token_ids.extend(prior)


def _created(create: Any, self: Any, request: Any) -> Any:
    """A grammar with a budget, which has accepted what is there since the reasoning ended."""
    grammar = create(self, request)
    # The salt differs from tenant to tenant (`resumable.py`): none spends another one's budget.
    text = repr((request.cache_salt, request.structured_output_request.structured_output_key))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    grammar.spent = _spent(digest)
    if prior := prior_of(request.sampling_params):
        start, _ = self._get_constraint_bounds(request, prior, spec_tokens_committed=True)
        if start <= len(prior):
            request.structured_output_request.reasoning_ended = True
            if not grammar.accept_tokens(request.request_id, prior[start:]):
                raise ValueError("the grammar does not accept the tokens of the earlier attempt")
    return grammar


class _Spent:
    """CPU time of a grammar's masks beyond their usual one; shared by its requests.

    In each step an engine core computes, one after another, which tokens each structured request
    may have next, and all others wait for that. With a vocabulary of 128,000 tokens such a mask
    takes below 10 ms for most grammars, but 0.6 s for `([a-z]+ ?){1,20}`, with each token. So the
    masks of a tenant's grammar have a budget: what they take beyond `timings.MASK_S` each is added
    up, and what they take less is paid back, so that a slow first mask condemns nothing. Past
    `timings.MASKS_S` no more are computed, and all requests with this grammar end with an error.
    """

    __slots__ = ("s",)

    def __init__(self) -> None:
        self.s = 0.0

    def add(self, cpu_s: float) -> None:
        self.s = max(0.0, self.s + cpu_s - timings.MASK_S)

    def exceeded(self) -> bool:
        return self.s > timings.MASKS_S


@functools.lru_cache(maxsize=_REMEMBERED)
def _spent(grammar: bytes) -> _Spent:
    return _Spent()


def _timed(fill: Any, self: Any, batch: Iterable[tuple[Any, int, bool]]) -> None:
    for grammar, index, apply in batch:
        spent = grammar.spent
        # CPU time of this thread: a busy machine condemns no grammar.
        start_s = time.thread_time()
        computes = apply and not spent.exceeded()
        fill(self, ((grammar, index, computes),))
        if computes:
            spent.add(time.thread_time() - start_s)


def _ended(accept: Any, self: Any, request: Any, token_ids: list[int]) -> bool:
    shape = request.structured_output_request
    spent = getattr(shape and shape.grammar, "spent", None)
    if spent is not None and spent.exceeded():
        log.warning("grammar_over_budget request=%s spent_s=%.1f", request.request_id, spent.s)
        return False
    return bool(accept(self, request, token_ids))


# -- functions of ours around vLLM's: each gets vLLM's own first, and then its arguments -----------


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """A method of a class, or a function where it is defined; once in a process."""
    if not hasattr(function := getattr(owner, name), "__wrapped__"):
        setattr(owner, name, _wrapped(function, around))


def replace(function: Callable[..., Any], around: Callable[..., Any]) -> None:
    """In all modules of vLLM, which import it by name; once in a process."""
    if hasattr(function, "__wrapped__"):
        return
    wrapped = _wrapped(function, around)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get(function.__name__) is function:
            setattr(module, function.__name__, wrapped)


def _wrapped(function: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(function, *args, **options)

    @functools.wraps(function)
    async def awaited(*args: Any, **options: Any) -> Any:
        return await around(function, *args, **options)

    return awaited if inspect.iscoroutinefunction(function) else wrapped
