"""A conversation returns to the replica that holds its cache, and different conversations spread
over the replicas.
"""

from __future__ import annotations

from tests.service.support import Metrics, Running


def test_a_session_stays_on_its_replica_through_every_ingress(simulated: Running) -> None:
    before = at_home(simulated.settled())
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
    after = before + 2 * 5 * len(simulated.ingress_urls)
    assert at_home(simulated.settled()) == after


def at_home(page: Metrics) -> float:
    return page.total("hermes_calls_total", placed="home")
