"""What a tenant may use, how it stands with these limits, and what its clients are told of that.
Pure.

`requests/lifecycle.lua` counts, in the scripts that accept and end requests. A minute and a month
are those of Redis's clock, in UTC.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple

import msgspec

from serve_app.contract import ANTHROPIC, Reason
from serve_app.errors import RequestRefused

MINUTE = 60_000
"""Milliseconds."""
_LATER = 0.1
"""Clients that were refused together come back within so much more of the time."""
_PARTS, _WHAT = ("limit", "remaining", "reset"), ("requests", "tokens")
HEADERS = (
    *(f"x-ratelimit-{part}-{what}" for what in _WHAT for part in _PARTS),
    *(f"anthropic-ratelimit-{what}-{part}" for what in _WHAT for part in _PARTS),
)
"""What the answers to a tenant with limits may have: OpenAI's names, and Anthropic's.

Source: https://platform.openai.com/docs/guides/rate-limits and
https://docs.claude.com/en/api/rate-limits
"""


class Limits(NamedTuple):
    """What a tenant may use, over all its keys and all ingresses; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompt and output: what is expected when a request is accepted, corrected when it ends."""
    concurrent_requests: int = 0
    """That wait or run."""
    background_tokens: int = 0
    """Prompt and expected output of the background requests that have not ended."""
    max_output_tokens: int = 0
    """Of one answer."""
    tokens_per_month: int = 0
    """Of a calendar month, UTC."""


NO_LIMITS = Limits()


class Reserved(msgspec.Struct, array_like=True, frozen=True):
    """What a request has taken of its tenant's limits, besides a request that runs. A newer version
    may add fields.
    """

    tokens: int
    """Its prompt and the answer that is expected."""
    background_tokens: int
    """The same if it goes on without a reader, otherwise 0."""
    month: int


class Over(IntEnum):
    """The limit that refuses a request, by the number that the script has for it."""

    NONE = 0
    MONTH = 1
    REQUESTS = 2
    TOKENS = 3
    CONCURRENT = 4
    BACKGROUND = 5


_LIMITS = [of for of in Over if of]
_FIELDS = {
    Over.MONTH: "tokens_per_month",
    Over.REQUESTS: "requests_per_minute",
    Over.TOKENS: "tokens_per_minute",
    Over.CONCURRENT: "concurrent_requests",
    Over.BACKGROUND: "background_tokens",
}
"""Of `Limits`."""
BY_THE_MINUTE = Over.REQUESTS, Over.TOKENS


class Standing(NamedTuple):
    """What a tenant has used of its limits, with a request that was just accepted."""

    limits: Limits
    over: Over
    """The limit for which that request was refused."""
    minute: int
    """Since 1970."""
    month: int
    """See `month_of`."""
    month_tokens: int
    requests: int
    """Of this minute."""
    tokens: int
    """Of this minute: reserved, and what earlier answers took beyond their reservations."""
    concurrent: int
    background_tokens: int

    def refuses(self, reserved: Reserved) -> Over:
        """The limit that refuses another request, which would take so much, as in the script."""
        tokens, background_tokens = reserved.tokens, reserved.background_tokens
        needs = tokens, 1, tokens, 1, background_tokens
        for of, needed in zip(_LIMITS, needs, strict=True):
            if needed and 0 < _limit(self.limits, of) < self._used(of) + needed:
                return of
        return Over.NONE

    def used(self) -> Iterator[tuple[str, float]]:
        """Of each limit that is set its name in `Limits`, and which share of it is used; above 1 if
        answers took more than was expected.
        """
        for of in _LIMITS:
            if limit := _limit(self.limits, of):
                yield _FIELDS[of], self._used(of) / limit

    def resets_ms(self, now_ms: int, soon_s: float) -> int:
        """When the limit that refuses is reset. `soon_s`: a guess of when a request will end, for
        those limits that this resets.
        """
        if self.over is Over.MONTH:
            return _begin_ms(self.month + 1)
        if self.over in (Over.CONCURRENT, Over.BACKGROUND):
            return now_ms + int(soon_s * 1000)
        return (self.minute + 1) * MINUTE

    def refusal(self, reserved: Reserved, path: str, now_ms: int, soon_s: float) -> RequestRefused:
        """The answer to a request that would take so much."""
        in_s = max(0.0, (self.resets_ms(now_ms, soon_s) - now_ms) / 1000)
        reason, said = _SAID[self.over]
        message = said.format(
            used=self._used(self.over),
            limit=_limit(self.limits, self.over),
            tokens=reserved.tokens,
            reset=_duration(in_s),
            date=_rfc_3339(_begin_ms(self.month + 1)),
        )
        headers = self.headers(path, now_ms)
        return RequestRefused(
            reason, message, retry_after_s=in_s, jitter=_LATER, more_headers=headers
        )

    def headers(self, path: str, now_ms: int) -> Mapping[str, str]:
        """What an answer of this path tells of the limits by the minute, if there are any."""
        ends_ms = (self.minute + 1) * MINUTE
        theirs = path in ANTHROPIC
        reset = _rfc_3339(ends_ms) if theirs else _duration(max(0, ends_ms - now_ms) / 1000)
        return dict(self._headers(theirs, reset))

    def _headers(self, theirs: bool, reset: str) -> Iterator[tuple[str, str]]:
        for what, of in zip(_WHAT, BY_THE_MINUTE, strict=True):
            limit = _limit(self.limits, of)
            for part, value in zip(_PARTS, (limit, self._left(of), reset), strict=True):
                if limit:
                    name = f"anthropic-ratelimit-{what}-{part}"
                    yield name if theirs else f"x-ratelimit-{part}-{what}", str(value)

    def _used(self, of: Over) -> int:
        used = self.month_tokens, self.requests, self.tokens
        return (*used, self.concurrent, self.background_tokens)[of - 1] if of else 0

    def _left(self, of: Over) -> int:
        return max(0, _limit(self.limits, of) - self._used(of))


def check_size(limits: Limits, reserved: Reserved) -> None:
    """Refuse a request that alone is more than a limit permits."""
    needs = {Over.TOKENS: reserved.tokens, Over.BACKGROUND: reserved.background_tokens}
    for of, tokens in needs.items():
        limit = _limit(limits, of)
        if limit and tokens > limit:
            what = "a minute" if of is Over.TOKENS else "in the background at a time"
            raise RequestRefused(
                Reason.RATE_LIMIT_EXCEEDED,
                f"Request too large: it needs about {tokens:,} tokens (prompt and expected answer) "
                f"of the {limit:,} that you may use {what}; send a shorter one, or ask for a "
                "shorter answer (max_tokens).",
                more_headers={"x-should-retry": "false"},
            )


def month_of(unix_ms: int) -> int:
    """The number of a calendar month, UTC: successive months have successive numbers."""
    date = datetime.datetime.fromtimestamp(unix_ms / 1000, datetime.UTC)
    return date.year * 12 + date.month - 1


def _begin_ms(month: int) -> int:
    begin = datetime.datetime(month // 12, month % 12 + 1, 1, tzinfo=datetime.UTC)
    return int(begin.timestamp() * 1000)


def _limit(limits: Limits, of: Over) -> int:
    limit: int = getattr(limits, _FIELDS[of])
    return limit


def in_order(limits: Limits) -> list[int]:
    """The limits by the numbers of `Over`."""
    return [_limit(limits, of) for of in _LIMITS]


def _duration(seconds: float) -> str:
    """As OpenAI writes it, never too short: `12s`, `1m3s`."""
    minutes, rest_s = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"


def _rfc_3339(unix_ms: int) -> str:
    return f"{datetime.datetime.fromtimestamp(unix_ms / 1000, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


_SAID = {
    Over.MONTH: (
        Reason.QUOTA_EXCEEDED,
        "You have used {used:,} of your {limit:,} tokens of this month, and this request needs "
        "about {tokens:,}: ask the operator for more, or wait until {date}.",
    ),
    Over.REQUESTS: (
        Reason.RATE_LIMIT_EXCEEDED,
        "You have sent {used:,} of your {limit:,} requests of this minute; please try again in "
        "{reset}.",
    ),
    Over.TOKENS: (
        Reason.RATE_LIMIT_EXCEEDED,
        "You have used {used:,} of your {limit:,} tokens of this minute, and this request needs "
        "about {tokens:,}; please try again in {reset}.",
    ),
    Over.CONCURRENT: (
        Reason.CONCURRENCY_LIMIT,
        "{used:,} of your requests wait or run, as many as may; please wait for one of them to "
        "end.",
    ),
    Over.BACKGROUND: (
        Reason.CONCURRENCY_LIMIT,
        "Your background requests that have not ended hold {used:,} of {limit:,} tokens, and this "
        "one needs about {tokens:,}; please wait for one of them to end.",
    ),
}
"""The reason of each, and what the client is told."""
