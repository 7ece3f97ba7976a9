"""When every engine is busy: waiting clients get heartbeats, and excess requests are refused. What
occupies the engines stays until it is cancelled, so nothing here races with an engine.
"""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from tests.running_time import RunningTime
from tests.service.busy import busy, waiting
from tests.service.services import MAX_WAITING_BATCH
from tests.service.support import Running, Stream
from tests.waiting import until


def oldest_s(service: Running, request_class: str) -> float:
    return service.metrics().total("hermes_queue_oldest_age_seconds", **{"class": request_class})


def one_waits(service: Running, request_class: str) -> bool:
    return waiting(service, request_class) == 1


def test_a_stream_that_waits_shows_signs_of_life_and_is_then_answered(
    simulated: Running,
) -> None:
    with busy(simulated) as held, simulated.stream("Wait for it.", 8) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = Stream(response)
        stream.signs_of_life(4)
        assert simulated.state(stream.request_id)["state"] == "queued"
        assert simulated.state(stream.request_id)["replica"] is None
        until("the queue shows it", lambda: one_waits(simulated, "standard"))
        until("its age is told", lambda: oldest_s(simulated, "standard") > 0.5)
        held.free_one()
        rest = stream.rest()
        assert [event.id for event in rest] == list(range(1, len(rest) + 1))
        assert rest[-1].data == "[DONE]"
        state = simulated.state(stream.request_id)
        assert state["started_at_ms"] > state["admitted_at_ms"]


@pytest.mark.clock
def test_a_sign_of_life_comes_once_a_heartbeat_and_no_more(simulated: Running) -> None:
    with busy(simulated), simulated.stream("Wait for it.", 8) as response:
        stream = Stream(response)
        with RunningTime() as running:
            began_s = time.monotonic()
            signs = 0
            while signs < 4 or time.monotonic() < began_s + 3:
                signs += len(stream.signs_of_life(1))
            assert running.now_s() < 15, "one each second in this service"
            assert signs <= time.monotonic() - began_s + 2
        simulated.cancel(stream.request_id)


def test_a_line_that_is_full_refuses_with_a_time_to_come_back(simulated: Running) -> None:
    with busy(simulated) as held:
        for number in range(MAX_WAITING_BATCH):
            held.waits(f"I wait as number {number}", "batch")
        until("the line is full", lambda: waiting(simulated, "batch") == MAX_WAITING_BATCH)
        error = until("one more is refused", lambda: _refusal(simulated))
        assert error.response.headers["x-hermes-reason"] == "queue_full"
        assert int(error.response.headers["retry-after"]) >= 1
        held.waits("Another class still has room", "realtime")
        until("it waits", lambda: one_waits(simulated, "realtime"))


def _refusal(service: Running) -> openai.RateLimitError | None:
    """How the queue refuses a request; None if it accepted it, and then the request is
    cancelled.
    """
    messages: Any = [{"role": "user", "content": "Hi"}]
    try:
        answer = service.sdk.chat.completions.with_raw_response.create(
            model=service.model, messages=messages, max_tokens=2, stream=True, service_tier="flex"
        )
    except openai.RateLimitError as error:
        return error
    service.cancel(answer.headers["x-request-id"])
    answer.http_response.close()
    return None
