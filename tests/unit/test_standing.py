"""What clients are told of their tenant's limits."""

from __future__ import annotations

import datetime
import json

import msgspec
import pytest

from serve_app.contract import ANTHROPIC, MESSAGE, Reason
from serve_app.journal.entries import RequestFacts
from serve_app.policy.tenant_limits import HEADERS, Limits, Over, Reserved, Standing, month_of

CHATS = "/v1/chat/completions"
LIMITS = Limits(60, 1_000, 4, 500, 0, 10_000)
NOON_MS = int(datetime.datetime(2026, 12, 31, 12, tzinfo=datetime.UTC).timestamp() * 1000)
NOW, MONTH = NOON_MS // 60_000, month_of(NOON_MS)
FULL = Standing(LIMITS, Over.NONE, NOW, MONTH, 9_000, 60, 1_200, 4, 450)
ASKS = Reserved(300, 0, MONTH)


def test_openais_and_anthropics_headers_tell_the_same() -> None:
    now_ms = NOON_MS + 1_500
    standing = FULL._replace(requests=3, tokens=400)
    assert standing.headers(CHATS, now_ms) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "57",
        "x-ratelimit-reset-requests": "59s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "600",
        "x-ratelimit-reset-tokens": "59s",
    }
    assert standing.headers(MESSAGE, now_ms) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "57",
        "anthropic-ratelimit-requests-reset": "2026-12-31T12:01:00Z",
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": "600",
        "anthropic-ratelimit-tokens-reset": "2026-12-31T12:01:00Z",
    }
    told = [name for path in (CHATS, MESSAGE) for name in standing.headers(path, now_ms)]
    assert sorted(told) == sorted(HEADERS)
    assert standing.headers(CHATS, NOON_MS + 120_000)["x-ratelimit-reset-tokens"] == "0s"
    assert standing.headers(CHATS, NOON_MS)["x-ratelimit-reset-tokens"] == "1m0s"


def test_a_limit_that_is_not_set_has_no_headers() -> None:
    only = FULL._replace(limits=Limits(tokens_per_minute=1_000))
    assert {name.rpartition("-")[2] for name in only.headers(CHATS, NOON_MS)} == {"tokens"}
    assert FULL._replace(limits=Limits(concurrent_requests=1)).headers(CHATS, NOON_MS) == {}


@pytest.mark.parametrize(
    ("over", "reason", "in_s", "said"),
    [
        (Over.MONTH, Reason.QUOTA_EXCEEDED, 43_200, "until 2027-01-01T00:00:00Z"),
        (Over.REQUESTS, Reason.RATE_LIMIT_EXCEEDED, 60, "60 of your 60 requests"),
        (Over.TOKENS, Reason.RATE_LIMIT_EXCEEDED, 60, "1,200 of your 1,000 tokens"),
        (Over.CONCURRENT, Reason.CONCURRENCY_LIMIT, 1, "4 of your requests wait or run"),
        (Over.BACKGROUND, Reason.CONCURRENCY_LIMIT, 1, "hold 450 of 500 tokens"),
    ],
)
def test_a_refusal_says_what_is_used_and_nobody_comes_back_too_early(
    over: Over, reason: Reason, in_s: float, said: str
) -> None:
    refused = FULL._replace(over=over).refusal(ASKS, CHATS, NOON_MS, 1.0)
    assert (refused.reason, refused.retry_after_s) == (reason, in_s)
    assert said in refused.message
    for _ in range(50):
        headers = refused.headers()
        assert in_s <= int(headers["retry-after"]) <= in_s * 1.1 + 1
        assert in_s * 1000 <= int(headers["retry-after-ms"]) <= in_s * 1100 + 1
        assert headers["x-ratelimit-remaining-tokens"] == "0"
    for path in ANTHROPIC:
        assert refused.status_at(path) == 429
        assert json.loads(refused.body(path))["error"]["type"] == "rate_limit_error"


def test_a_used_up_quota_has_openais_type() -> None:
    refused = FULL._replace(over=Over.MONTH).refusal(ASKS, CHATS, NOON_MS, 1.0)
    assert json.loads(refused.body())["error"]["type"] == "insufficient_quota"


@pytest.mark.parametrize(
    ("asks", "used", "over"),
    [
        (Reserved(1_000, 0, MONTH), {"tokens": 0}, Over.NONE),
        (Reserved(1_001, 0, MONTH), {"tokens": 0}, Over.MONTH),
        (Reserved(101, 0, MONTH), {"tokens": 900}, Over.TOKENS),
        (Reserved(0, 0, MONTH), {"tokens": 1_200}, Over.NONE),
        (Reserved(1, 0, MONTH), {"tokens": 0, "requests": 60}, Over.REQUESTS),
        (Reserved(1, 0, MONTH), {"tokens": 0, "concurrent": 4}, Over.CONCURRENT),
        (Reserved(51, 51, MONTH), {"tokens": 0}, Over.BACKGROUND),
        (Reserved(50, 50, MONTH), {"tokens": 0}, Over.NONE),
    ],
)
def test_another_request_is_refused_by_what_it_has_no_place_in(
    asks: Reserved, used: dict[str, int], over: Over
) -> None:
    free = FULL._replace(requests=0, concurrent=0)
    assert free._replace(**used).refuses(asks) is over  # type: ignore[arg-type] # as they are


def test_months_follow_each_other_over_the_end_of_a_year() -> None:
    assert month_of(NOON_MS + 43_199_999) == MONTH
    assert month_of(NOON_MS + 43_200_000) == MONTH + 1


def test_a_reservation_with_a_newer_versions_fields_can_be_read() -> None:
    facts = RequestFacts("standard", "t", "s", "m", True, 1, 2, "", reserved=ASKS)
    newer = msgspec.json.encode(facts).replace(b"]", b',"new"]')
    assert b'"new"' in newer
    assert msgspec.json.decode(newer, type=RequestFacts) == facts
