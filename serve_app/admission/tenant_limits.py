"""The limits of tenants, as one ingress knows them between two requests.

The script that accepts a request counts, and refuses (`requests/lifecycle.lua`). What it has
refused is kept away from Redis until the limit is reset: what has no place in this minute is
refused here, and for what another request's end may permit, Redis is asked without the body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from serve_app import timings
from serve_app.contract import COUNTING
from serve_app.errors import RequestRefused
from serve_app.journal.entries import RequestFacts
from serve_app.policy.prediction import Claimed
from serve_app.policy.standing import (
    BY_THE_MINUTE,
    Over,
    Reserved,
    Standing,
    check_size,
    month_of,
)
from serve_app.policy.tenants import NO_LIMITS, Limits
from serve_app.policy.work import Work


class Expected(NamedTuple):
    """A request that is not accepted yet, as predictions need it."""

    request_class: str
    tenant: str
    accepted_ms: int
    deadline_ms: int
    prompt_tokens: int
    max_output_tokens: int
    kind: str
    sequences: int


class TenantLimits:
    """What the last refusals were. `output_tokens`: what each sequence of a request will probably
    write, no more than it may.
    """

    def __init__(self, output_tokens: Callable[[Claimed], float]) -> None:
        self._output_tokens = output_tokens
        self._refused: dict[str, tuple[int, Standing]] = {}
        """By tenant, and when that limit is reset."""

    def reserve(self, facts: RequestFacts, work: Work, limits: Limits, path: str) -> RequestFacts:
        """The facts with what the request takes of its tenant's limits; what only counts tokens
        takes none.

        Raises:
            RequestRefused: `rate_limit_exceeded` if it alone is too large.
        """
        if limits == NO_LIMITS:
            return msgspec.structs.replace(facts, reserved=None)
        whose = facts.request_class, facts.tenant, facts.admitted_ms, facts.deadline_ms
        each = self._output_tokens(Expected(*whose, *work))
        tokens = 0 if path in COUNTING else work.prompt_tokens + int(work.sequences * each)
        month = month_of(facts.admitted_ms)
        reserved = Reserved(tokens, tokens if facts.detached else 0, month)
        check_size(limits, reserved)
        return msgspec.structs.replace(facts, reserved=reserved)

    def asks_first(self, facts: RequestFacts, limits: Limits, path: str) -> bool:
        """Whether the script shall be asked before it gets the body.

        Raises:
            RequestRefused: no request is accepted now, and this one can join none.
        """
        until_ms, standing = self._refused.get(facts.tenant, (0, None))
        if standing is None or facts.reserved is None or standing.limits != limits:
            return False
        if facts.admitted_ms >= until_ms:
            del self._refused[facts.tenant]
            return False
        over = standing.refuses(facts.reserved)
        if over in BY_THE_MINUTE and not facts.twins:  # within it nothing is given back
            raise _refusal(standing._replace(over=over), facts, path)
        return over is not Over.NONE

    def check(self, facts: RequestFacts, standing: Standing | None, path: str) -> None:
        """Remember and raise the script's refusal."""
        if standing is None or standing.over is Over.NONE:
            return
        until_ms = standing.resets_ms(facts.admitted_ms, timings.RETRY_AFTER_S)
        self._refused[facts.tenant] = until_ms, standing
        raise _refusal(standing, facts, path)


def _refusal(standing: Standing, facts: RequestFacts, path: str) -> RequestRefused:
    assert facts.reserved is not None, "only who has limits is refused"
    return standing.refusal(facts.reserved, path, facts.admitted_ms, timings.RETRY_AFTER_S)
