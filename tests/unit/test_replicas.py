"""The two views of the replicas are combined: Ray Serve's set, and the workers' leases."""

from __future__ import annotations

from serve_app.cluster.replicas import Replicas
from serve_app.contract import Cause, WorkerLease


def watched() -> tuple[Replicas, list[tuple[str, str]]]:
    replicas, losses = Replicas(), list[tuple[str, str]]()
    replicas.listen(lambda request_id, cause: losses.append((request_id, cause)))
    replicas.serving(["a", "b"])
    replicas.leased(["a", "b"])
    replicas.place("on-a", "a")
    replicas.place("on-b", "b")
    return replicas, losses


def test_a_replica_that_leaves_serves_set_is_drained() -> None:
    replicas, losses = watched()
    replicas.serving(["b"])
    assert losses == [("on-a", Cause.DRAINED)]
    assert replicas.able() == {"b"}


def test_a_replica_whose_connection_broke_is_lost_until_there_is_another() -> None:
    replicas, losses = watched()
    replicas.disconnected("a")
    assert losses == [], "calls over the connection fail by themselves"
    assert (replicas.fate("a"), replicas.fate("b")) == (Cause.LOST, None)
    assert replicas.able() == {"b"}
    replicas.connected("a")
    assert replicas.fate("a") is None
    assert replicas.able() == {"a", "b"}


def test_a_replica_without_a_lease_hangs_and_gets_no_work() -> None:
    replicas, losses = watched()
    replicas.leased(["b"])
    assert losses == [("on-a", Cause.HUNG)]
    assert replicas.able() == {"b"}
    assert replicas.fate("a") == Cause.HUNG


def test_while_leases_are_unknown_no_replica_is_lost() -> None:
    replicas, losses = watched()
    replicas.leased(None)
    assert losses == []
    assert replicas.able() == {"a", "b"}
    assert replicas.fate("a") is None


def test_a_replica_missing_once_leases_are_known_again_is_lost() -> None:
    replicas, losses = watched()
    replicas.leased(None)
    replicas.leased(["b"])
    assert losses == [("on-a", Cause.REDIS_UNREACHABLE)], (
        "perhaps it could not renew its lease: nobody is to blame"
    )
    assert replicas.fate("a") == Cause.REDIS_UNREACHABLE
    replicas.leased(["a", "b"])
    replicas.place("on-a", "a")
    replicas.leased(["b"])
    assert losses[1:] == [("on-a", Cause.HUNG)], "it had one again"


def test_a_released_request_is_not_reported_as_lost() -> None:
    replicas, losses = watched()
    replicas.release("on-a")
    replicas.leased([])
    assert losses == [("on-b", Cause.HUNG)]


def test_a_new_replica_takes_work_once_it_has_a_lease() -> None:
    replicas, _ = watched()
    version = replicas.version
    replicas.serving(["a", "b", "c"])
    assert replicas.able() == {"a", "b"}
    replicas.leased(["a", "b", "c"])
    assert replicas.able() == {"a", "b", "c"}
    assert replicas.version > version


def test_a_replica_under_which_a_call_failed_is_avoided_for_a_while() -> None:
    replicas, losses = watched()
    replicas.avoid("on-a", 100.0)
    assert replicas.able() == {"b"}
    replicas.forgive(104.9)
    assert replicas.able() == {"b"}
    replicas.forgive(105.0)
    assert replicas.able() == {"a", "b"}
    assert losses == []


def test_if_calls_failed_everywhere_no_replica_is_avoided() -> None:
    replicas, _ = watched()
    replicas.avoid("on-a", 100.0)
    replicas.avoid("on-b", 100.0)
    assert replicas.able() == {"a", "b"}


def test_only_the_engines_that_serve_here_count_as_room() -> None:
    replicas, _ = watched()
    mine, other = [WorkerLease("a", 16), WorkerLease("b", 8)], WorkerLease("other", 64)
    assert replicas.mine([*mine, other]) == mine
    assert Replicas().mine([other]) == []


def test_work_goes_on_where_both_views_say_so_and_an_empty_view_says_nothing() -> None:
    replicas, _ = watched()
    assert replicas.fate("a") is None
    replicas.serving(["b"])
    assert replicas.fate("a") == Cause.DRAINED, "or killed: its lease may stand for seconds"
    fresh = Replicas()
    fresh.leased(["a"])
    assert fresh.fate("a") is None, "a router that has just started knows no replica yet"


def test_the_first_reading_blames_no_request() -> None:
    replicas = Replicas()
    replicas.serving(["a", "b"])
    replicas.leased(["b"])
    assert replicas.fate("a") == Cause.REDIS_UNREACHABLE
