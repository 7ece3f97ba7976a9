"""The settings of all policies of the order of work. Pure."""

from __future__ import annotations

from typing import NamedTuple

from serve_app.policy.classes import ClassRules
from serve_app.policy.tenants import TenantRules
from serve_app.policy.waiting import Claimed

_PASSED_FOR = 1 / 4
"""The part of the time until its deadline in which later requests can pass a long one. Without this
bound, a prompt of 60,000 tokens would wait behind all that comes in its first ten minutes.
"""
_PROMPTS_COUNT = 1 / 4
"""The part of a prompt's cost that ranks a request. An engine reads thousands of prompt tokens in
the time in which it writes a few, and prompts differ more than answers do: with all of their cost,
long prompts would wait for much longer than first come, first served.
"""


class Rules(NamedTuple):
    """The settings of all policies."""

    classes: ClassRules = ClassRules()
    tenants: TenantRules = TenantRules()
    claim_ahead: float = 4.0
    """Requests of each class that are claimed and wait, in multiples of the capacity."""
    short_first_ms_per_token: float = 2.0
    kv_room: bool = True
    """Whether requests start only when there is room for them in the engines' memory."""
    slice_tokens: int = 0
    """After so many tokens, a request may have to yield its place; 0: none ever has to."""

    def handicap_ms(self, entry: Claimed, output_tokens: float) -> float:
        """By how much later a request ranks than one that needs no work."""
        cost = self.tenants.cost(int(_PROMPTS_COUNT * entry.prompt_tokens), output_tokens)
        most = max(0.0, _PASSED_FOR * (entry.deadline_ms - entry.enqueued_ms))
        return min(self.short_first_ms_per_token * cost, most)


DEFAULT_RULES = Rules()
