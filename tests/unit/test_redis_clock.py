"""Redis's clock, as a process estimates it from the answers to `TIME`."""

from __future__ import annotations

from serve_app import timings
from serve_app.clock import RedisClock
from tests.turned_clock import TurnedClock


def test_until_redis_has_answered_it_is_this_machines_own() -> None:
    clock = RedisClock(TurnedClock())
    assert not clock.known
    assert clock.now_ms() == 1_000_500


def test_from_then_on_it_is_rediss_whatever_this_machines_shows() -> None:
    local = TurnedClock()
    clock = RedisClock(local)
    clock.told((5_000, 250_000), local.now_s)
    assert clock.known
    local.unix_offset_s += 8
    local.now_s += 2
    assert clock.now_s() == 5_002.25


def test_the_quickest_of_the_recent_answers_sets_the_clock() -> None:
    local = TurnedClock()
    clock = RedisClock(local)
    clock.told((5_000, 0), local.now_s - 4)
    assert clock.now_s() == 5_002, "it was given at some time in between"
    clock.told((9_000, 0), local.now_s)
    clock.told((5_000, 0), local.now_s - 4)
    assert clock.now_s() == 9_000


def test_an_old_answer_gives_way_to_the_quickest_after_it() -> None:
    """One slow answer after it must not set the clock: on a busy machine it is wrong by half of the
    time that it took.
    """
    local = TurnedClock()
    clock = RedisClock(local)
    clock.told((9_000, 0), local.now_s)
    local.now_s += timings.CLOCK_GOOD_FOR_S
    clock.told((5_000, 0), local.now_s - 0.002)
    assert clock.now_s() == 9_000 + timings.CLOCK_GOOD_FOR_S, "it is not old yet"
    local.now_s += 1
    clock.told((7_000, 0), local.now_s - 0.2)
    assert clock.now_s() == 5_000 + 0.001 + 1
