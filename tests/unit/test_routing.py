"""The affinity key, the ring, and which replica gets a call."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.contract import IngressLease
from serve_app.policy.order import allowance, peers_saturated, share
from serve_app.policy.placement import MAX_KEY_CHARS, HashRing, Placement, session_key
from tests.tables import each

NODES = [f"replica-{i}" for i in range(8)]
KEYS = [f"session-{i}" for i in range(2_000)]


def placement(loads: dict[str, int], factor: float = 1.25, capacity: int = 1_000_000) -> Placement:
    """Over the replicas of `loads`, which have so many calls in flight."""
    made = Placement(factor, 128)
    made.rebuild(loads)
    made.slots = dict.fromkeys(loads, capacity)
    for replica, calls in loads.items():
        made.count(replica, calls)
    return made


def owner(ring: HashRing, key: str) -> str:
    return next(ring.walk(key))


def test_the_same_key_has_the_same_node_whatever_the_order_of_the_nodes() -> None:
    forwards, backwards = HashRing(NODES), HashRing(reversed(NODES))
    assert [owner(forwards, key) for key in KEYS] == [owner(backwards, key) for key in KEYS]


def test_a_walk_meets_every_node_once() -> None:
    ring = HashRing(NODES)
    for key in KEYS[:50]:
        assert sorted(ring.walk(key)) == NODES


def test_a_new_node_takes_about_its_share_and_nothing_moves_between_the_old_ones() -> None:
    before, after = HashRing(NODES[:-1]), HashRing(NODES)
    moved = [key for key in KEYS if owner(before, key) != owner(after, key)]
    assert {owner(after, key) for key in moved} == {NODES[-1]}
    assert 0.5 / len(NODES) < len(moved) / len(KEYS) < 1.6 / len(NODES)


def test_keys_are_spread_evenly() -> None:
    ring = HashRing(NODES)
    counts = Counter(owner(ring, key) for key in KEYS)
    assert len(counts) == len(NODES)
    assert max(counts.values()) < 1.5 * len(KEYS) / len(NODES)
    assert min(counts.values()) > 0.5 * len(KEYS) / len(NODES)


@given(
    st.integers(1, 9),
    st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=80),
    st.sampled_from([1.01, 1.25, 2.0]),
)
def test_no_node_ever_holds_more_than_its_bound(
    nodes: int, sessions: list[str], factor: float
) -> None:
    made = Placement(factor, 8)
    made.rebuild(f"n{i}" for i in range(nodes))
    loads: Counter[str] = Counter()
    for sent, session in enumerate(sessions, 1):
        node = made.choose(session)
        made.count(node, 1)
        loads[node] += 1
        assert loads[node] <= math.ceil(factor * sent / nodes)


def test_overflow_goes_to_the_next_on_the_ring_and_comes_back() -> None:
    first, second, *_ = HashRing(NODES).walk("session")
    none = dict.fromkeys(NODES, 0)
    assert placement(none).choose("session") == first
    assert placement(none | {first: 1}).choose("session") == second
    assert placement(none | {first: 1}).home("session") == first
    assert placement(dict.fromkeys(NODES, 3) | {first: 4}).choose("session") == first


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("began"), st.integers(0, 9), st.sampled_from(NODES)),
            st.tuples(st.just("ended"), st.integers(0, 9), st.just("")),
            st.tuples(st.just("rebuild"), st.integers(0, 8), st.just("")),
        ),
        max_size=60,
    )
)
def test_the_running_sum_is_the_sum_of_the_loads_on_the_ring(
    steps: list[tuple[str, int, str]],
) -> None:
    """Whatever order calls begin and end in, and replicas come and go under them."""
    made = Placement(1.25, 4)
    sent: dict[str, str] = {}
    on_ring: list[str] = []
    for what, number, replica in steps:
        call = f"call-{number}"
        if what == "rebuild":
            on_ring = NODES[:number]
            made.rebuild(on_ring)
            continue
        if (before := sent.pop(call, None)) is not None:
            made.count(before, -1)
        if what == "began":
            made.count(replica, 1)
            sent[call] = replica
    assert made._loads == Counter(sent.values())
    assert made._in_flight == sum(replica in on_ring for replica in sent.values())


def test_without_replicas_there_is_no_answer() -> None:
    with pytest.raises(LookupError):
        placement({}).choose("key")


def test_each_replica_gets_what_its_own_engine_can_take() -> None:
    """An engine whose cache is full has a smaller window than the others."""
    first, second = HashRing(["a", "b"]).walk("session")
    made = placement({first: 45, second: 98})
    made.slots = {first: 45, second: 112}
    assert made.choose("session") == second, "beyond the load bound, but it has slots"
    made.slots = {first: 46, second: 112}
    assert made.choose("session") == first
    made.slots = {first: 45, second: 98}
    assert made.choose("session") == first, "both are full"


def test_where_every_replica_is_full_the_load_bound_decides() -> None:
    first, second = HashRing(["a", "b"]).walk("session")
    assert placement({first: 16, second: 16}, capacity=16).choose("session") == first
    assert placement({first: 30, second: 16}, capacity=16).choose("session") == second


def test_a_call_counts_as_many_as_it_has_sequences() -> None:
    first, second = HashRing(["a", "b"]).walk("session")
    made = placement({first: 0, second: 0}, capacity=16)
    assert made.choose("session", 14) == first
    made.count(first, 14)
    assert {made.choose("session") for _ in range(3)} == {second}
    made.count(second, 9)
    assert made.choose("session", 9) == second, "neither has room for nine"
    made.count(first, -14)
    assert made.choose("session", 9) == first
    assert made.choose("session", 100) == first, "more than any replica runs: one that is idle"


@given(st.integers(0, 300), st.integers(0, 9))
def test_the_shares_of_all_ingresses_cover_the_capacity_and_little_more(
    capacity: int, ingresses: int
) -> None:
    given_out = share(capacity, ingresses) * max(1, ingresses)
    assert capacity <= given_out < capacity + max(1, ingresses)


OTHERS = st.lists(
    st.builds(
        IngressLease, st.just("other"), running=st.integers(0, 99), waiting=st.integers(0, 2)
    ),
    max_size=6,
)


@given(st.integers(1, 300), OTHERS, st.booleans())
def test_no_place_is_given_out_twice_and_no_share_withheld(
    capacity: int, others: list[IngressLease], waiting: bool
) -> None:
    used = sum(one.running for one in others)
    found = allowance(capacity, others, waiting)
    assert found + used <= max(capacity, used + waiting)
    assert found >= min(share(capacity, len(others) + 1), max(0, capacity - used))
    if waiting and not any(one.waiting for one in others):
        assert found == max(1, capacity - used), "nothing is idle while requests wait"


USES_TWO, WAITS = IngressLease("i", running=2, waiting=0), IngressLease("w", waiting=1)
HAS_BORROWED = IngressLease("w", running=9, waiting=1)
FULL = [IngressLease(str(name), running=2, waiting=1) for name in range(4)]


@each(
    "capacity, others, waiting, allowed",
    [
        # Ingresses in which requests wait divide what the others leave.
        (12, [USES_TWO, WAITS], False, 4),
        (12, [USES_TWO, WAITS], True, 5),
        (12, [USES_TWO, HAS_BORROWED], True, 1),  # until what it has borrowed ends
        # What an ingress has claimed starts although four others use all of the capacity.
        (8, FULL, True, 1),
        (8, FULL, False, 0),  # what is in Redis, the others can claim
        (0, FULL, True, 0),  # there is no engine
    ],
)
def test_an_ingress_may_use_what_the_others_leave(
    capacity: int, others: list[IngressLease], waiting: bool, allowed: int
) -> None:
    assert allowance(capacity, others, waiting) == allowed


def test_requests_wait_in_an_ingress_only_while_the_others_are_busy() -> None:
    assert peers_saturated(24, [], 24), "there is no other"
    for running, busy in ((0, False), (8, False), (9, True), (12, True)):
        other = IngressLease("other", running=running, waiting=0)
        assert peers_saturated(24, [other], 12) is busy


SYSTEM = {"role": "system", "content": "be kind"}
FIRST = {"role": "user", "content": "hello"}
TURN = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]


def test_the_header_comes_before_the_body_and_both_before_the_conversation() -> None:
    body: dict[str, Any] = {"messages": [FIRST], "prompt_cache_key": "cache"}
    assert session_key({"x-session-id": "mine"}, body) == "mine"
    assert session_key({"x-session-id": ""}, body) == "cache"
    assert session_key({}, body) == "cache"
    assert session_key({}, {"messages": [FIRST]}).startswith("h:")


def test_a_conversation_keeps_its_key_over_its_turns() -> None:
    key = session_key({}, {"messages": [SYSTEM, FIRST]})
    assert session_key({}, {"messages": [SYSTEM, FIRST, *TURN], "temperature": 0}) == key
    assert session_key({}, {"messages": [SYSTEM, {**FIRST, "content": "other"}]}) != key
    assert session_key({}, {"messages": [FIRST]}) != key


@each(
    "one, other, same",
    [
        ({"input": [FIRST]}, {"input": [FIRST, *TURN]}, True),
        ({"input": "hello", "instructions": "a"}, {"input": "hello"}, False),
        ({"prompt": "x" * 1_024 + "a"}, {"prompt": "x" * 1_024 + "b"}, True),
        ({"prompt": ["once", "twice"]}, {"prompt": "once"}, True),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 4]}, False),
    ],
)
def test_responses_and_completions_have_a_head_too(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    keys = session_key({}, one), session_key({}, other)
    assert all(keys)
    assert (keys[0] == keys[1]) == same


@each("body", [{}, {"messages": None}, {"prompt": 5}, {"prompt_cache_key": 5}])
def test_where_there_is_nothing_to_hash_the_key_is_empty(body: dict[str, Any]) -> None:
    assert session_key({}, body) == ""


def test_a_key_is_never_long() -> None:
    assert len(session_key({"x-session-id": "x" * 10_000}, {})) == MAX_KEY_CHARS
