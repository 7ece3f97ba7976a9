"""The two views of the replicas are combined: Ray Serve's set, and the workers' leases."""

from __future__ import annotations

from serve_app import timings
from serve_app.cluster.replicas import Placed, Replicas
from serve_app.contract import Cause, WorkerLease


def place(replicas: Replicas, on: str, losses: list[tuple[str, str]]) -> Placed:
    """A call to this replica; its loss is noted."""
    replicas.placement.choose = lambda *_: on  # type: ignore[method-assign]
    return replicas.place("key", 1, lambda cause: losses.append((f"on-{on}", cause)))


def watched() -> tuple[Replicas, list[tuple[str, str]]]:
    replicas, losses = Replicas(), list[tuple[str, str]]()
    replicas.serving(["a", "b"])
    replicas.leased(["a", "b"])
    for name in "ab":
        place(replicas, name, losses)
    return replicas, losses


def test_a_call_counts_at_its_replica_until_it_is_released() -> None:
    replicas, placed = Replicas(), list[Placed]()
    replicas.serving(["a", "b"])
    for _ in range(8):  # one session: its home takes no more than its share
        placed.append(replicas.place("a session", 1, lambda _: None))
    home = placed[0].replica
    assert 3 <= [one.replica for one in placed].count(home) <= 5
    for one in placed:
        replicas.release(one)
    assert replicas.place("a session", 1, lambda _: None).replica == home


def test_a_call_takes_as_much_of_its_replica_as_it_has_sequences() -> None:
    replicas = Replicas()
    replicas.serving(["a", "b"])
    many = replicas.place("many", 40, lambda _: None)
    others = [replicas.place(f"one-{number}", 1, lambda _: None) for number in range(20)]
    assert many.replica not in {one.replica for one in others}
    replicas.release(many)
    assert replicas.place("next", 1, lambda _: None).replica == many.replica


def test_a_replica_that_leaves_serves_set_is_drained() -> None:
    replicas, losses = watched()
    replicas.serving(["b"])
    assert losses == [("on-a", Cause.DRAINED)]
    assert replicas.able() == {"b"}


def test_a_replica_whose_connection_broke_is_lost_until_there_is_another() -> None:
    replicas, losses = watched()
    replicas.disconnected("a")
    assert losses == [], "calls over the connection fail by themselves"
    assert (replicas.loss_cause("a"), replicas.loss_cause("b")) == (Cause.LOST, None)
    assert replicas.able() == {"b"}
    replicas.connected("a")
    assert replicas.loss_cause("a") is None
    assert replicas.able() == {"a", "b"}


def test_a_replica_without_a_lease_hangs_and_gets_no_work() -> None:
    replicas, losses = watched()
    replicas.leased(["b"])
    assert losses == [("on-a", Cause.HUNG)]
    assert replicas.able() == {"b"}
    assert replicas.loss_cause("a") == Cause.HUNG


def test_while_leases_are_unknown_no_replica_is_lost() -> None:
    replicas, losses = watched()
    replicas.leased(None)
    assert losses == []
    assert replicas.able() == {"a", "b"}
    assert replicas.loss_cause("a") is None


def test_a_replica_missing_once_leases_are_known_again_is_lost() -> None:
    replicas, losses = watched()
    replicas.leased(None)
    replicas.leased(["b"])
    assert losses == [("on-a", Cause.REDIS_UNREACHABLE)], (
        "perhaps it could not renew its lease: nobody is to blame"
    )
    assert replicas.loss_cause("a") == Cause.REDIS_UNREACHABLE
    replicas.leased(["a", "b"])
    replicas.leased(["b"])
    assert losses[1:] == [("on-a", Cause.HUNG)], "it had one again"


def test_a_released_request_is_not_reported_as_lost() -> None:
    replicas, losses = watched()
    replicas.release(next(one for one in replicas._placed if one.replica == "a"))
    replicas.leased([])
    assert losses == [("on-b", Cause.HUNG)]


def test_a_new_replica_takes_work_once_it_has_a_lease() -> None:
    replicas, _ = watched()
    replicas.serving(["a", "b", "c"])
    assert replicas.able() == {"a", "b"}
    replicas.leased(["a", "b", "c"])
    assert replicas.able() == {"a", "b", "c"}


def test_a_replica_under_which_a_call_failed_is_avoided_for_a_while() -> None:
    replicas, losses = watched()
    replicas.avoid("a", 100.0)
    assert replicas.able() == {"b"}
    replicas.unban_expired(104.9)
    assert replicas.able() == {"b"}
    replicas.unban_expired(105.0)
    assert replicas.able() == {"a", "b"}
    assert losses == []


def test_if_calls_failed_everywhere_no_replica_is_avoided() -> None:
    replicas, _ = watched()
    replicas.avoid("a", 100.0)
    replicas.avoid("b", 100.0)
    assert replicas.able() == {"a", "b"}


def test_only_the_engines_that_serve_here_count_as_room() -> None:
    replicas, _ = watched()
    mine, other = [WorkerLease("a", 16), WorkerLease("b", 8)], WorkerLease("other", 64)
    assert replicas.mine([*mine, other]) == mine
    assert Replicas().mine([other]) == []


def test_work_goes_on_where_both_views_say_so_and_an_empty_view_says_nothing() -> None:
    replicas, _ = watched()
    assert replicas.loss_cause("a") is None
    replicas.serving(["b"])
    assert replicas.loss_cause("a") == Cause.DRAINED, "or killed: its lease may stand for seconds"
    fresh = Replicas()
    fresh.leased(["a"])
    assert fresh.loss_cause("a") is None, "a router that has just started knows no replica yet"


def test_the_first_reading_blames_no_request() -> None:
    replicas = Replicas()
    replicas.serving(["a", "b"])
    replicas.leased(["b"])
    assert replicas.loss_cause("a") == Cause.REDIS_UNREACHABLE


def test_a_replica_that_lives_is_used_though_its_connection_cannot_be_opened_again() -> None:
    """If its process had died, its lease would have expired by then."""
    replicas, _ = watched()
    replicas.disconnected("a")
    replicas.unban_expired(100.0)
    replicas.unban_expired(100.0 + timings.REPLICA_AVOID_S / 2)
    assert ({*replicas.able()}, replicas.loss_cause("a")) == ({"b"}, Cause.LOST)
    replicas.unban_expired(100.0 + timings.REPLICA_AVOID_S)
    assert ({*replicas.able()}, replicas.loss_cause("a")) == ({"a", "b"}, None)
