"""Lets vLLM's engine resume a request that it has never seen, and bounds what a grammar may take.

vLLM resumes its own preempted requests exactly: it computes prompt and output again and knows
which tokens are output, so penalties, bad words, `min_tokens` and stop conditions count them. This
plug-in makes a request that carries `PRIOR` in its `extra_args` look like one of those, and
advances its grammar over these tokens. vLLM loads it in every process of an engine by the entry
point `vllm.general_plugins`; `workers/warm_up.py` checks at the start that it works.

Source: vLLM 0.32, `v1/request.py`, `v1/worker/gpu_input_batch.py`, `v1/structured_output`. The
second model runner (`v1/worker/gpu`) takes prompt and output from the scheduler, as for a preempted
request, and needs no patch.
"""

from __future__ import annotations

import functools
from typing import Any

from workers import mask_time

PRIOR = "hermes_prior_token_ids"
"""Key in `SamplingParams.extra_args`: ids of the output tokens of earlier attempts. No client sets
it (`workers/resumable.py`)."""


def prior_of(params: Any) -> list[int]:
    """The output tokens that a request begins with; usually none."""
    return (params.extra_args or {}).get(PRIOR) or [] if params is not None else []


def install() -> None:
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    if getattr(Request, "resumes", False):
        return
    Request.resumes = True
    Request.__init__ = _resumed_request(Request.__init__)
    CachedRequestState.__post_init__ = _resumed_state(CachedRequestState.__post_init__)
    mask_time.install(StructuredOutputManager)
    StructuredOutputManager._create_grammar = _advanced(StructuredOutputManager._create_grammar)


def _resumed_request(create: Any) -> Any:
    """The scheduler's side: what counts tokens, and hands them to the second model runner."""

    @functools.wraps(create)
    def created(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        if prior := prior_of(self.sampling_params):
            self.append_output_token_ids(prior)
            # For a request that was not preempted vLLM asserts that the prefix cache holds no more
            # than its prompt; here the cache may hold output, too.
            self.prefill_stats = None

    return created


def _resumed_state(complete: Any) -> Any:
    """The first model runner's side: the sampler's view of a request."""

    @functools.wraps(complete)
    def completed(self: Any) -> None:
        complete(self)
        if prior := prior_of(self.sampling_params):
            self.output_token_ids.extend(prior)

    return completed


def _advanced(create: Any) -> Any:
    """A grammar that has accepted what is there, from the end of the reasoning on."""

    @functools.wraps(create)
    def created(self: Any, request: Any) -> Any:
        grammar = create(self, request)
        prior = prior_of(request.sampling_params)
        if not prior:
            return grammar
        start, _ = self._get_constraint_bounds(request, prior, spec_tokens_committed=True)
        if start <= len(prior):
            request.structured_output_request.reasoning_ended = True
            if not grammar.accept_tokens(request.request_id, prior[start:]):
                raise ValueError("the grammar does not accept the tokens of the earlier attempt")
        return grammar

    return created
