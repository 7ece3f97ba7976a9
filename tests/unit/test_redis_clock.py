"""Redis's clock, as a process reckons it from the answers to `TIME`."""

from __future__ import annotations

import time

from serve_app.redis_clock import RedisClock


def test_until_redis_has_answered_it_is_this_machines_own() -> None:
    clock = RedisClock(lambda: 1_000.5)
    assert not clock.known
    assert clock.now_ms() == 1_000_500


def test_from_then_on_it_is_rediss_whatever_this_machines_shows() -> None:
    clock = RedisClock(lambda: time.time() + 8)
    clock.told((5_000, 250_000), time.monotonic())
    assert clock.known
    assert 5_000.2 < clock.now_s() < 5_060


def test_an_answer_that_took_long_counts_only_where_there_is_no_better_one() -> None:
    clock = RedisClock()
    clock.told((5_000, 0), time.monotonic() - 4)
    assert 5_002 <= clock.now_s() < 5_060, "it was given at some time in between"
    clock.told((9_000, 0), time.monotonic())
    clock.told((5_000, 0), time.monotonic() - 4)
    assert 9_000 <= clock.now_s() < 9_060
