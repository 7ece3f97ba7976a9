"""A conversation returns to the replica that holds its cache, and different conversations spread
over the replicas.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.service.support import Running, together


def replica(service: Running, **more: object) -> str:
    """The replica that a short request reaches."""
    found: str = service.ask(str(more.pop("prompt", "Hello")), 2, **more).headers[
        "x-hermes-replica"
    ]
    return found


@pytest.mark.nightly  # in the gate: unit/test_routing.py and test_simulation.py
def test_a_session_stays_on_its_replica(service: Running) -> None:
    for session in ("alice", "bob", "carol"):
        headers = {"x-session-id": session}
        seen = {replica(service, prompt=f"Turn {turn}", headers=headers) for turn in range(20)}
        assert len(seen) == 1


def test_a_session_stays_on_its_replica_through_every_ingress(simulated: Running) -> None:
    for session in ("dave", "erin"):
        seen = set()
        for url in simulated.ingress_urls.values():
            for _ in range(5):
                answer = simulated.http.post(
                    f"{url}/v1/chat/completions",
                    json=simulated.body(tokens=2),
                    headers={"x-session-id": session},
                )
                seen.add(answer.headers["x-hermes-replica"])
        assert len(seen) == 1


@pytest.mark.nightly  # in the gate: unit/test_routing.py and test_simulation.py
def test_a_prompt_cache_key_is_a_session(service: Running) -> None:
    seen = {
        replica(service, prompt=f"Turn {turn}", prompt_cache_key="invoice-7") for turn in range(20)
    }
    assert len(seen) == 1
    assert seen == {replica(service, headers={"x-session-id": "invoice-7"})}


@pytest.mark.nightly  # in the gate: unit/test_routing.py and test_simulation.py
def test_a_conversation_without_a_key_returns_by_its_first_message(service: Running) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "The first question."},
    ]
    seen = set()
    for turn in range(6):
        answer = service.http.post(
            "/v1/chat/completions", json={**service.body(tokens=2), "messages": messages}
        )
        seen.add(answer.headers["x-hermes-replica"])
        messages += [
            {"role": "assistant", "content": f"Answer {turn}."},
            {"role": "user", "content": f"More {turn}?"},
        ]
    assert len(seen) == 1


@pytest.mark.nightly  # in the gate: unit/test_routing.py and test_simulation.py
def test_sessions_spread_over_the_replicas(service: Running) -> None:
    seen = Counter(replica(service, headers={"x-session-id": f"session-{n}"}) for n in range(64))
    assert len(seen) == 2
    assert min(seen.values()) >= 12


@pytest.mark.nightly  # in the gate: unit/test_routing.py and test_simulation.py
def test_one_busy_session_does_not_overload_its_replica(service: Running) -> None:
    headers = {"x-session-id": "alice"}
    seen = Counter(
        together([lambda: replica(service, headers=headers, max_tokens=64) for _ in range(48)], 24)
    )
    assert len(seen) == 2, "above its load bound a replica's work goes to the next on the ring"
