"""The affinity key, the ring and the load bound."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.routing.key import MAX_KEY_CHARS, session_key
from serve_app.routing.ring import HashRing, choose, load_bound

NODES = [f"replica-{i}" for i in range(8)]
KEYS = [f"session-{i}" for i in range(2_000)]


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


def test_a_lost_node_gives_its_keys_to_several_others() -> None:
    before, after = HashRing(NODES), HashRing(NODES[1:])
    moved = [key for key in KEYS if owner(before, key) != owner(after, key)]
    assert {owner(before, key) for key in moved} == {NODES[0]}
    assert len({owner(after, key) for key in moved}) >= 4


def test_keys_are_spread_evenly() -> None:
    ring = HashRing(NODES)
    counts = Counter(owner(ring, key) for key in KEYS)
    assert len(counts) == len(NODES)
    assert max(counts.values()) < 1.5 * len(KEYS) / len(NODES)
    assert min(counts.values()) > 0.5 * len(KEYS) / len(NODES)


@given(
    st.integers(1, 9), st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=80), st.sampled_from([1.01, 1.25, 2.0])
)
def test_no_node_ever_holds_more_than_its_bound(nodes: int, sessions: list[str], factor: float) -> None:
    ring = HashRing([f"n{i}" for i in range(nodes)], virtual_nodes=8)
    loads: Counter[str] = Counter()
    for sent, session in enumerate(sessions, 1):
        node = choose(ring, session, loads, factor)
        loads[node] += 1
        assert loads[node] <= math.ceil(factor * sent / nodes)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.floats(1.0001, 4))
def test_someone_always_has_room_however_the_loads_lie(loads: list[int], factor: float) -> None:
    ring = HashRing([f"n{i}" for i in range(len(loads))], virtual_nodes=4)
    held = {f"n{i}": load for i, load in enumerate(loads)}
    assert held[choose(ring, "key", held, factor)] < load_bound(sum(loads), len(loads), factor)


def test_overflow_goes_to_the_next_on_the_ring_and_comes_back() -> None:
    ring = HashRing(NODES)
    first, second, *_ = ring.walk("session")
    assert choose(ring, "session", {}, 1.25) == first
    assert choose(ring, "session", {first: 1}, 1.25) == second
    assert choose(ring, "session", dict.fromkeys(NODES, 3) | {first: 4}, 1.25) == first


def test_loads_of_replicas_that_have_left_do_not_count() -> None:
    ring = HashRing(["a", "b"])
    first = owner(ring, "k")
    assert choose(ring, "k", {"gone": 1_000, first: 3}, 1.25) != first


def test_an_empty_ring_has_no_answer() -> None:
    with pytest.raises(LookupError):
        choose(HashRing([]), "key", {}, 1.25)


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


def test_responses_and_completions_have_a_head_too() -> None:
    assert session_key({}, {"input": "hello"}) == session_key({}, {"input": "hello"}) != ""
    assert session_key({}, {"input": [FIRST]}) == session_key({}, {"input": [FIRST, *TURN]})
    assert session_key({}, {"input": "hello", "instructions": "a"}) != session_key({}, {"input": "hello"})
    assert session_key({}, {"prompt": "x" * 1_024 + "a"}) == session_key({}, {"prompt": "x" * 1_024 + "b"})
    assert session_key({}, {"prompt": ["once", "twice"]}) == session_key({}, {"prompt": "once"})
    assert session_key({}, {"prompt": [1, 2, 3]}) != session_key({}, {"prompt": [1, 2, 4]})


@pytest.mark.parametrize("body", [{}, {"messages": None}, {"prompt": 5}, {"prompt_cache_key": 5}])
def test_where_there_is_nothing_to_hash_the_key_is_empty(body: dict[str, Any]) -> None:
    assert session_key({}, body) == ""


def test_a_key_is_never_long() -> None:
    assert len(session_key({"x-session-id": "x" * 10_000}, {})) == MAX_KEY_CHARS


def test_no_node_gets_more_than_it_can_work_on_while_another_has_room() -> None:
    ring = HashRing(["a", "b"])
    first, second = ring.walk("session")
    assert choose(ring, "session", {first: 16, second: 10}, 1.25) == first, "the load bound alone would allow it"
    assert choose(ring, "session", {first: 16, second: 10}, 1.25, room=16) == second
    assert choose(ring, "session", {first: 15, second: 10}, 1.25, room=16) == first


def test_where_every_node_is_full_the_load_bound_decides() -> None:
    ring = HashRing(["a", "b"])
    first, second = ring.walk("session")
    assert choose(ring, "session", {first: 16, second: 16}, 1.25, room=16) == first
    assert choose(ring, "session", {first: 30, second: 16}, 1.25, room=16) == second
