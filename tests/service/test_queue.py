"""When every engine is busy: who waits is kept awake, the urgent go first, too many are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai

from tests.service.services import MAX_RUNNING, MAX_WAITING_BATCH
from tests.service.support import Running, Stream, until

CAPACITY = 2 * MAX_RUNNING


class Busy:
    """Every place in every engine is taken."""

    def __init__(self, service: Running, request_ids: list[str]) -> None:
        self._service = service
        self.request_ids = request_ids

    def free_one(self) -> None:
        """Cancel one of those that hold a place."""
        self._service.cancel(self.request_ids.pop())


@contextmanager
def busy(service: Running) -> Iterator[Busy]:
    """Fill every place with a long request; free them all at the end."""
    service.until_idle()
    body = service.body("Hold a place.", 3900, stream=True)
    headers = {"x-hermes-class": "realtime"}
    with httpx.Client(base_url=service.url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:

        def hold(response_ids: list[str]) -> None:
            with (
                suppress(httpx.HTTPError),
                client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response,
            ):
                response_ids.append(response.headers["x-request-id"])
                for _ in response.iter_raw():
                    pass

        request_ids: list[str] = []
        with ThreadPoolExecutor(CAPACITY) as pool:
            for _ in range(CAPACITY):
                pool.submit(hold, request_ids)
            try:
                until("every place is taken", lambda: len(request_ids) == CAPACITY)
                until("all of them run", lambda: claimed(service) == CAPACITY)
                yield Busy(service, request_ids)
            finally:
                for request_id in request_ids:
                    service.cancel(request_id)
    service.until_idle()


def claimed(service: Running) -> float:
    return service.metrics().total("hermes_queue_claimed")


def waiting(service: Running, request_class: str) -> float:
    return service.metrics().total("hermes_queue_depth", **{"class": request_class})


def test_a_stream_that_waits_is_kept_awake_by_comments_and_then_answered(service: Running) -> None:
    with busy(service) as held, service.stream("Wait for it.", 8) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = Stream(response)
        arrivals = [at for at, _ in stream.comments(4)]
        assert 1.5 < arrivals[3] - arrivals[0] < 15, "one each second in this service"
        assert service.state(stream.request_id)["state"] == "queued"
        assert service.state(stream.request_id)["replica"] is None
        assert waiting(service, "standard") == 1
        assert service.metrics().total("hermes_queue_oldest_age_seconds", **{"class": "standard"}) > 0.5
        held.free_one()
        rest = stream.rest()
        assert [event.id for event in rest] == list(range(1, len(rest) + 1))
        assert rest[-1].data == "[DONE]"
        assert (
            service.state(stream.request_id)["started_at_ms"] - service.state(stream.request_id)["admitted_at_ms"] > 500
        )


def test_urgent_classes_go_first(service: Running) -> None:
    with busy(service) as held, ThreadPoolExecutor(3) as pool:
        asked = {}
        for name in ("batch", "standard", "realtime"):
            asked[name] = pool.submit(service.ask, f"I am {name}.", 3, headers={"x-hermes-class": name})
            until(f"{name} waits", lambda name=name: waiting(service, name) == 1)
        held.free_one()  # one place, which the three have one after another
        ids = {name: future.result(60).headers["x-request-id"] for name, future in asked.items()}
        states = {name: service.state(request_id) for name, request_id in ids.items()}
    assert {state["class"] for state in states.values()} == set(states)
    assert states["realtime"]["ended_at_ms"] <= states["standard"]["started_at_ms"]
    assert states["standard"]["ended_at_ms"] <= states["batch"]["started_at_ms"]


def test_a_line_that_is_full_refuses_with_a_time_to_come_back(service: Running) -> None:
    body: Any = {**service.body("Hi", 2), "service_tier": "flex"}
    urgent = {**body, "service_tier": "priority"}
    with ThreadPoolExecutor(MAX_WAITING_BATCH + 1) as pool:
        with busy(service):
            asked = [
                pool.submit(service.http.post, "/v1/chat/completions", json=body) for _ in range(MAX_WAITING_BATCH)
            ]
            until("the line is full", lambda: waiting(service, "batch") == MAX_WAITING_BATCH)
            error = until("one more is refused", lambda: _refusal(service, body))
            assert error.response.headers["x-hermes-reason"] == "queue_full"
            assert int(error.response.headers["retry-after"]) >= 1
            asked.append(pool.submit(service.http.post, "/v1/chat/completions", json=urgent))
            until("another class still has room", lambda: waiting(service, "realtime") == 1)
        assert {future.result(60).status_code for future in asked} <= {200}


def _refusal(service: Running, body: dict[str, Any]) -> openai.RateLimitError | None:
    """How the line refuses; None if it took the request, which is then taken back."""
    try:
        request = {**body, "extra_body": {"ignore_eos": body["ignore_eos"]}}
        request.pop("ignore_eos")
        service.sdk.with_options(timeout=1).chat.completions.create(**request)
    except openai.RateLimitError as error:
        return error
    except openai.APITimeoutError:
        return None
    return None


def test_a_request_that_waits_can_be_cancelled(service: Running) -> None:
    with busy(service), service.stream("Never mind.", 8) as response:
        stream = Stream(response)
        next(stream.blocks())
        assert service.cancel(stream.request_id)["state"] == "cancelled"
        error, done = stream.rest()
    assert json.loads(error.data)["error"]["code"] == "cancelled"
    assert (error.id, done.id, done.data) == (1, 2, "[DONE]")


def test_the_first_token_does_not_wait_for_others(service: Running) -> None:
    service.until_idle()
    began = time.monotonic()
    with service.stream(tokens=600) as response:
        stream = Stream(response)
        stream.next_events(2)
        first_s = time.monotonic() - began
        stream.rest()
    assert first_s < (time.monotonic() - began) / 3
