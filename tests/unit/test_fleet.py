"""Two views of the replicas meet: Ray Serve's set, and the workers' leases."""

from __future__ import annotations

from serve_app.routing.fleet import AWAY, DRAINED, HUNG, Fleet


def watched() -> tuple[Fleet, list[tuple[str, str]]]:
    fleet, losses = Fleet(), list[tuple[str, str]]()
    fleet.on_loss = lambda request_id, cause: losses.append((request_id, cause))
    fleet.serving(["a", "b"])
    fleet.leased(["a", "b"])
    fleet.place("on-a", "a")
    fleet.place("on-b", "b")
    return fleet, losses


def test_a_replica_that_leaves_serves_set_is_drained() -> None:
    fleet, losses = watched()
    fleet.serving(["b"])
    assert losses == [("on-a", DRAINED)]
    assert fleet.able() == {"b"}


def test_a_replica_without_a_lease_hangs_and_gets_no_work() -> None:
    fleet, losses = watched()
    fleet.leased(["b"])
    assert losses == [("on-a", HUNG)]
    assert fleet.able() == {"b"}
    assert fleet.fate("a") == HUNG


def test_while_leases_are_unknown_nobody_is_lost() -> None:
    fleet, losses = watched()
    fleet.leased(None)
    assert losses == []
    assert fleet.able() == {"a", "b"}
    assert fleet.fate("a") == ""


def test_who_is_missing_once_leases_are_known_again_is_lost() -> None:
    fleet, losses = watched()
    fleet.leased(None)
    fleet.leased(["b"])
    assert losses == [("on-a", AWAY)], "perhaps it could not renew its lease: nobody is to blame"
    assert fleet.fate("a") == AWAY
    fleet.leased(["a", "b"])
    fleet.place("on-a", "a")
    fleet.leased(["b"])
    assert losses[1:] == [("on-a", HUNG)], "it had one again"


def test_a_request_that_was_released_is_nobodys_loss() -> None:
    fleet, losses = watched()
    fleet.release("on-a")
    fleet.leased([])
    assert losses == [("on-b", HUNG)]


def test_a_new_replica_takes_work_once_it_has_a_lease() -> None:
    fleet, _ = watched()
    version = fleet.version
    fleet.serving(["a", "b", "c"])
    assert fleet.able() == {"a", "b"}
    fleet.leased(["a", "b", "c"])
    assert fleet.able() == {"a", "b", "c"}
    assert fleet.version > version


def test_a_replica_under_which_a_call_failed_is_avoided_for_a_while() -> None:
    fleet, losses = watched()
    fleet.avoid("on-a", 100.0)
    assert fleet.able() == {"b"}
    fleet.forgive(104.9)
    assert fleet.able() == {"b"}
    fleet.forgive(105.0)
    assert fleet.able() == {"a", "b"}
    assert losses == []


def test_where_calls_failed_everywhere_nobody_is_avoided() -> None:
    fleet, _ = watched()
    fleet.avoid("on-a", 100.0)
    fleet.avoid("on-b", 100.0)
    assert fleet.able() == {"a", "b"}


def test_only_the_engines_that_serve_here_count_as_room() -> None:
    fleet, _ = watched()
    assert fleet.mine([("a", 16), ("b", 8), ("of another cluster", 64)]) == {"a": 16, "b": 8}
    assert Fleet().mine([("of another cluster", 64)]) == {}


def test_work_goes_on_where_both_views_say_so_and_an_empty_view_says_nothing() -> None:
    fleet, _ = watched()
    assert fleet.fate("a") == ""
    fleet.serving(["b"])
    assert fleet.fate("a") == DRAINED, "or killed: its lease may stand for seconds"
    fresh = Fleet()
    fresh.leased(["a"])
    assert fresh.fate("a") == "", "a router that has just started knows no replica yet"


def test_who_looks_for_the_first_time_blames_nobody() -> None:
    fleet = Fleet()
    fleet.serving(["a", "b"])
    fleet.leased(["b"])
    assert fleet.fate("a") == AWAY
