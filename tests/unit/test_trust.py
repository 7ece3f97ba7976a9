"""When a missing lease means a death: never after a Redis that was away, always after a bounded time."""

from __future__ import annotations

from serve_app.membership import LEASE_MS, PATIENCE_S, RENEW_S, IngressLease, Members, _Trust

LEASE_S = LEASE_MS / 1000


def looks(
    trust: _Trust, from_s: float, to_s: float, *names: str, took_s: float = 0.01, every_s: float = RENEW_S
) -> Members:
    """Looks one after another, all of which find these ingresses; the last one's members."""
    members, now_s = Members(), from_s
    while now_s <= to_s:
        members = trust.judged(now_s - took_s, now_s, tuple(map(IngressLease, names)), ())
        now_s += max(every_s, took_s)
    return members


def test_quick_looks_are_trusted_after_the_time_of_a_lease_and_who_is_missing_is_dead_at_once() -> None:
    trust = _Trust()
    assert not looks(trust, 0, LEASE_S, "a", "b").trusted
    members = looks(trust, LEASE_S + 0.5, LEASE_S + 1, "a")
    assert members.trusted
    assert members.living == {"a"}


def test_a_machine_that_is_always_slow_trusts_its_looks_in_bounded_time() -> None:
    trust = _Trust()
    looks(trust, 0, 2, "a", "b", took_s=0.8)
    members = looks(trust, 3, PATIENCE_S - 1, "a", took_s=0.8, every_s=1.3)
    assert not members.trusted
    assert members.living == {"a", "b"}
    members = looks(trust, PATIENCE_S, 2 * PATIENCE_S, "a", took_s=0.8, every_s=1.3)
    assert members.trusted
    assert members.living == {"a"}


def test_who_flickers_under_a_slow_redis_lives() -> None:
    """A renewal that is answered late leaves its lease only a moment: in some looks it is there, in others not."""
    trust = _Trust()
    for begin_s in range(0, 60, 6):
        looks(trust, begin_s, begin_s + 3, "a", "b", took_s=1.5, every_s=2)
        members = looks(trust, begin_s + 4, begin_s + 5, "a", took_s=1.5, every_s=2)
        assert members.living == {"a", "b"}
    assert members.trusted


def test_after_a_redis_that_was_away_nobody_is_dead_until_all_could_renew() -> None:
    trust = _Trust()
    assert looks(trust, 0, 5, "a", "b").trusted
    trust.failed()
    for now_s in (6.0, 7.0, 8.0):
        assert not trust.judged(now_s - 0.01, now_s, (IngressLease("a"),), ()).trusted
    assert looks(trust, 8.5, 13, "a", "b").trusted


def test_looks_so_slow_that_a_renewal_as_slow_would_leave_no_lease_prove_nothing() -> None:
    trust = _Trust()
    assert not looks(trust, 0, 10 * PATIENCE_S, "a", took_s=LEASE_S).trusted


def test_who_was_stopped_itself_does_not_call_the_others_dead() -> None:
    trust = _Trust()
    assert looks(trust, 0, 5, "a", "b").trusted
    members = trust.judged(24.99, 25.0, (IngressLease("a"),), ())  # SIGCONT, after 20 s
    assert not members.trusted
    assert not looks(trust, 25.5, 27.5, "a").trusted
