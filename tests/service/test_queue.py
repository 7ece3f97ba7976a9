"""When every engine is busy: waiting clients get heartbeats, and excess requests are refused. What
occupies the engines stays until it is cancelled, so nothing here races with an engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import openai
import pytest

from serve_app.contract import IngressLease
from tests.running_time import RunningTime
from tests.service.services import HELD, MAX_WAITING_BATCH, PLACES, WORKERS
from tests.service.support import LONG_TOKENS, Running, Stream
from tests.waiting import until

CAPACITY = WORKERS * PLACES


class Busy:
    """All capacity of all engines is in use, by requests that stay until they are cancelled."""

    def __init__(self, service: Running) -> None:
        self._service = service
        self._streams = ExitStack()
        self._ids: list[str] = []

    def waits(self, prompt: str, request_class: str) -> None:
        """One more request, which is cancelled at the end."""
        headers = {"x-hermes-class": request_class}
        response = self._streams.enter_context(
            self._service.stream(prompt, LONG_TOKENS, headers=headers)
        )
        self._ids.append(response.headers["x-request-id"])

    def free_one(self) -> None:
        """Cancel one of the requests that use it."""
        self._service.cancel(self._ids.pop(0))

    def end(self) -> None:
        """Cancel all."""
        for request_id in self._ids:
            self._service.cancel(request_id)
        self._streams.close()


@contextmanager
def busy(service: Running) -> Iterator[Busy]:
    """Occupy all engines; free them at the end."""
    service.until_idle()
    held = Busy(service)
    try:
        for number in range(CAPACITY):
            held.waits(f"{HELD} {number}", "realtime")
        settled(service)
        yield held
    finally:
        held.end()
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


def test_a_stream_that_waits_is_kept_awake_by_comments_and_then_answered(
    simulated: Running,
) -> None:
    with busy(simulated) as held, simulated.stream("Wait for it.", 8) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = Stream(response)
        stream.comments(4)
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
def test_comments_come_once_a_heartbeat_and_no_more(simulated: Running) -> None:
    with busy(simulated), simulated.stream("Wait for it.", 8) as response:
        stream = Stream(response)
        with RunningTime() as running:
            began_s = time.monotonic()
            comments = 0
            while comments < 4 or time.monotonic() < began_s + 3:
                comments += len(stream.comments(1))
            assert running.now_s() < 15, "one each second in this service"
            assert comments <= time.monotonic() - began_s + 2
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
