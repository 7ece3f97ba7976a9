"""When every engine is busy: waiting clients get heartbeats, urgent requests run first, and excess
requests are refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from serve_app.contract import IngressLease
from tests.running_time import RunningTime
from tests.service.services import MAX_RUNNING, MAX_WAITING_BATCH
from tests.service.support import LONG_TOKENS, Running, Stream, until

# In the gate: journal/test_order_of_work.py, journal/test_door.py and unit/test_order.py.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.outage,
]

CAPACITY = 2 * MAX_RUNNING


class Busy:
    """All capacity of all engines is in use."""

    def __init__(self, service: Running, request_ids: list[str]) -> None:
        self._service = service
        self.request_ids = request_ids

    def free_one(self) -> None:
        """Cancel one of the requests that use it."""
        self._service.cancel(self.request_ids.pop())


@contextmanager
def busy(service: Running) -> Iterator[Busy]:
    """Occupy all engines with long requests; free them at the end."""
    service.until_idle()
    body = service.body("Hold a place.", 3900, stream=True)
    headers = {"x-hermes-class": "realtime"}
    with httpx.Client(
        base_url=service.url, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as client:

        def hold(response_ids: list[str]) -> None:
            with (
                suppress(httpx.HTTPError),
                client.stream(
                    "POST", "/v1/chat/completions", json=body, headers=headers
                ) as response,
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
                settled(service)
                yield Busy(service, request_ids)
            finally:
                for request_id in request_ids:
                    service.cancel(request_id)
    service.until_idle()


def settled(service: Running) -> None:
    """Wait until all of them run, and every ingress has read so in the leases. Before that, one may
    start a request that the engines have no place for.
    """

    def leases() -> dict[IngressLease, float]:
        found: Any = service.redis.zrange("hermes:ingresses", 0, -1, withscores=True)
        return {IngressLease.decode(member): end_ms for member, end_ms in found}

    def told() -> float | None:
        found = leases()
        use = [(lease.running, lease.waiting) for lease in found]
        all_run = len(use) == 2 and sum(running for running, _ in use) == CAPACITY
        return max(found.values()) if all_run and not any(waits for _, waits in use) else None

    told_ms = until("all of them run", told)
    until("every ingress knows", lambda: all(end_ms > told_ms for end_ms in leases().values()))


def waiting(service: Running, request_class: str) -> float:
    return service.metrics().total("hermes_queue_depth", **{"class": request_class})


def oldest_s(service: Running, request_class: str) -> float:
    return service.metrics().total("hermes_queue_oldest_age_seconds", **{"class": request_class})


def one_waits(service: Running, request_class: str) -> bool:
    return waiting(service, request_class) == 1


@pytest.mark.clock
def test_a_stream_that_waits_is_kept_awake_by_comments_and_then_answered(service: Running) -> None:
    with (
        busy(service) as held,
        nullcontext(time.monotonic()) as asked_s,
        service.stream("Wait for it.", 8) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = Stream(response)
        with RunningTime() as running:
            began_s = time.monotonic()
            comments = 0
            while comments < 4 or time.monotonic() < began_s + 3:
                comments += len(stream.comments(1))
            assert running.now_s() < 15, "one each second in this service"
            assert comments <= time.monotonic() - asked_s + 2, "and no more"
        assert service.state(stream.request_id)["state"] == "queued"
        assert service.state(stream.request_id)["replica"] is None
        until("the queue shows it", lambda: one_waits(service, "standard"))
        until("its age is told", lambda: oldest_s(service, "standard") > 0.5)
        held.free_one()
        rest = stream.rest()
        assert [event.id for event in rest] == list(range(1, len(rest) + 1))
        assert rest[-1].data == "[DONE]"
        assert (
            service.state(stream.request_id)["started_at_ms"]
            - service.state(stream.request_id)["admitted_at_ms"]
            > 500
        )


def test_urgent_classes_go_first(service: Running) -> None:
    with busy(service) as held, ThreadPoolExecutor(3) as pool:
        asked = {}
        for name in ("batch", "standard", "realtime"):
            asked[name] = pool.submit(
                service.ask, f"I am {name}.", 48, headers={"x-hermes-class": name}
            )
            until(f"{name} waits", partial(one_waits, service, name))
        held.free_one()  # one place, which the three have one after another
        ids = {name: future.result(240).headers["x-request-id"] for name, future in asked.items()}
        states = {name: service.state(request_id) for name, request_id in ids.items()}
    assert {state["class"] for state in states.values()} == set(states)
    first = states["realtime"]
    for second in ("standard", "batch"):  # these two share
        # Two workers estimate Redis's clock. One that had not waited would be earlier by all that
        # the first took.
        gap_ms = states[second]["started_at_ms"] - first["ended_at_ms"]
        assert gap_ms >= -(first["ended_at_ms"] - first["started_at_ms"]) / 2, (second, states)


def test_a_line_that_is_full_refuses_with_a_time_to_come_back(service: Running) -> None:
    body: Any = {**service.body("Hi", 2), "service_tier": "flex"}
    urgent = {**body, "service_tier": "priority"}
    with ThreadPoolExecutor(MAX_WAITING_BATCH + 1) as pool:
        with busy(service):
            asked = [
                pool.submit(service.http.post, "/v1/chat/completions", json=body)
                for _ in range(MAX_WAITING_BATCH)
            ]
            until("the line is full", lambda: waiting(service, "batch") == MAX_WAITING_BATCH)
            error = until("one more is refused", lambda: _refusal(service, body))
            assert error.response.headers["x-hermes-reason"] == "queue_full"
            assert int(error.response.headers["retry-after"]) >= 1
            asked.append(pool.submit(service.http.post, "/v1/chat/completions", json=urgent))
            until("another class still has room", lambda: waiting(service, "realtime") == 1)
        assert {future.result(240).status_code for future in asked} <= {200}


def _refusal(service: Running, body: dict[str, Any]) -> openai.RateLimitError | None:
    """How the queue refuses a request; None if it accepted it, and then the request is
    cancelled.
    """
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
    with service.freed(), service.long_stream() as response:
        stream = Stream(response)
        stream.next_events(2)
        assert service.state(stream.request_id)["state"] == "running"
        service.cancel(stream.request_id)
        assert len(stream.rest()) < 2 * LONG_TOKENS
