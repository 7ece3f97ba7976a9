"""A request that kills every engine that works on it is given up; the other requests on those
replicas finish.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tests.service.disturbance import simulated_text, whole_again
from tests.service.support import CHAT, Running, together

# In the gate: journal/test_attempts.py and test_dead_letters.py count the engines.
pytestmark = [pytest.mark.nightly, pytest.mark.outage, pytest.mark.disturbs]


def test_a_poison_request_takes_three_engines_down_and_no_fourth(simulated: Running) -> None:
    whole_again(simulated, 3)
    innocent: list[str] = []

    def others() -> None:
        asked = [partial(simulated.text, f"Innocent {n}.", 240) for n in range(9)]
        innocent.extend(together(asked, 9))

    beside = threading.Thread(target=others)
    beside.start()
    poison = simulated.body("POISON, says the label.", 40)
    answer = simulated.http.post(CHAT, json=poison, timeout=400)
    assert answer.status_code == 500
    assert answer.headers["x-hermes-reason"] == "poison"
    assert answer.headers["x-should-retry"] == "false"
    # Ray's Python proxy, to which HAProxy falls back while an ingress is replaced, puts an id of
    # its own behind ours.
    request_id = answer.headers["x-request-id"].partition(",")[0]
    state = simulated.state(request_id)
    assert (state["state"], state["reason"], state["attempts"]) == ("failed", "poison", 3)
    beside.join(400)
    assert innocent == [simulated_text(f"Innocent {n}.", 240) for n in range(9)]
    whole_again(simulated, 3)
