"""Four processes hold one model, behind Ray's Python proxy, and give the same text as one process
behind HAProxy.
"""

from __future__ import annotations

import pytest

from scripts.chaos_testing.parts import Parts
from scripts.chaos_testing.traffic import Told
from tests.service.disturbance import attempts, real_text, under
from tests.service.services import Services
from tests.service.support import STORY, Running, Stream, check_whole

# Four processes on two cores take minutes.
pytestmark = pytest.mark.nightly

PROMPTS = (STORY, "What is continuous batching?", "Count to ten.", "Write a poem about the sea.")
TOKENS = 48


@pytest.fixture(scope="session")
def one_process_texts(services: Services) -> list[str]:
    """The texts of the shared service, whose engines have one process each."""
    return [services.get("shared").text(prompt, TOKENS) for prompt in PROMPTS]


def test_the_texts_of_one_process_differ(service: Running, one_process_texts: list[str]) -> None:
    """It runs with the tests of the shared service, which so needs no second start."""
    assert len(set(one_process_texts)) == len(PROMPTS)


def test_four_processes_give_the_greedy_text_of_one(
    one_process_texts: list[str], tensor_parallel: Running
) -> None:
    assert [tensor_parallel.text(prompt, TOKENS) for prompt in PROMPTS] == one_process_texts


def test_the_python_proxy_streams_the_same_events(tensor_parallel: Running) -> None:
    with tensor_parallel.stream(tokens=64) as response:
        stream = Stream(response)
        found = stream.rest()
    check_whole(found)
    again = tensor_parallel.http.get(f"/v1/requests/{stream.request_id}/events")
    assert again.text == stream.text
    assert response.headers["x-request-id"].startswith("req_")


def test_a_client_that_leaves_the_python_proxy_frees_the_engine(tensor_parallel: Running) -> None:
    with tensor_parallel.long_stream() as response:
        stream = Stream(response)
        stream.next_events(3)
        state = tensor_parallel.state(stream.request_id)["state"]
        assert state == "running", "events come one by one, not in one piece"
    found = tensor_parallel.ended(stream.request_id)
    tensor_parallel.until_idle()  # only now: the metrics of another process may be some seconds old
    assert (found["state"], found["reason"]) == ("cancelled", "client_disconnected")


@pytest.mark.timeout(1800)
def test_streams_wait_for_the_engine_that_comes_after_one_of_the_four_was_killed(
    tensor_parallel: Running,
) -> None:
    """There is one replica and no spare: running streams continue once Serve has replaced it."""

    async def strike(parts: Parts, told: list[Told]) -> None:
        workers = parts.pids("engine-worker")
        assert len(workers) == 4
        parts.kill(workers[2])

    told = under(tensor_parallel, strike, real_text(tensor_parallel), 400, count=4, give_up_s=800)
    assert min(attempts(told)) >= 2
