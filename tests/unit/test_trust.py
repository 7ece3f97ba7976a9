"""When a missing lease means a death: never after an outage of Redis, always after a bounded
time.
"""

from __future__ import annotations

from serve_app import timings
from serve_app.cluster.members import Members, Trust
from serve_app.contract import IngressLease

LEASE_S = timings.LEASE_MS / 1000


def looks(
    trust: Trust,
    from_s: float,
    to_s: float,
    *names: str,
    took_s: float = 0.01,
    every_s: float = timings.LEASE_RENEW_S,
) -> Members:
    """Looks one after another, all of which find these ingresses; the last one's members."""
    members, now_s = Members(), from_s
    while now_s <= to_s:
        members = trust.judged(now_s - took_s, now_s, tuple(map(IngressLease, names)), ())
        now_s += max(every_s, took_s)
    return members


def test_after_quick_reads_for_a_lease_a_missing_process_is_dead_at_once() -> None:
    trust = Trust()
    assert not looks(trust, 0, LEASE_S, "a", "b").trusted
    members = looks(trust, LEASE_S + 0.5, LEASE_S + 1, "a")
    assert members.trusted
    assert members.living == {"a"}


def test_a_machine_that_is_always_slow_trusts_its_looks_in_bounded_time() -> None:
    trust = Trust()
    looks(trust, 0, 2, "a", "b", took_s=0.8)
    members = looks(trust, 3, timings.LEASE_PATIENCE_S - 1, "a", took_s=0.8, every_s=1.3)
    assert not members.trusted
    assert members.living == {"a", "b"}
    members = looks(
        trust, timings.LEASE_PATIENCE_S, 2 * timings.LEASE_PATIENCE_S, "a", took_s=0.8, every_s=1.3
    )
    assert members.trusted
    assert members.living == {"a"}


def test_a_lease_that_flickers_under_a_slow_redis_is_alive() -> None:
    """A renewal that is answered late leaves its lease only a moment: in some looks it is there, in
    others not.
    """
    trust = Trust()
    for begin_s in range(0, 60, 6):
        looks(trust, begin_s, begin_s + 3, "a", "b", took_s=1.5, every_s=2)
        members = looks(trust, begin_s + 4, begin_s + 5, "a", took_s=1.5, every_s=2)
        assert members.living == {"a", "b"}
    assert members.trusted


def test_after_an_outage_nobody_is_dead_until_all_could_renew() -> None:
    trust = Trust()
    assert looks(trust, 0, 5, "a", "b").trusted
    trust.failed()
    for now_s in (6.0, 7.0, 8.0):
        assert not trust.judged(now_s - 0.01, now_s, (IngressLease("a"),), ()).trusted
    assert looks(trust, 8.5, 13, "a", "b").trusted


def test_looks_so_slow_that_a_renewal_as_slow_would_leave_no_lease_prove_nothing() -> None:
    trust = Trust()
    assert not looks(trust, 0, 10 * timings.LEASE_PATIENCE_S, "a", took_s=LEASE_S).trusted


def test_a_process_that_was_paused_does_not_call_others_dead() -> None:
    trust = Trust()
    assert looks(trust, 0, 5, "a", "b").trusted
    members = trust.judged(24.99, 25.0, (IngressLease("a"),), ())  # SIGCONT, after 20 s
    assert not members.trusted
    assert not looks(trust, 25.5, 27.5, "a").trusted
