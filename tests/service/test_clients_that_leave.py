"""A client that disconnects frees the engine; one that comes back in time does not lose its request."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tests.service.services import GRACE_S
from tests.service.support import Running, Stream, until


def leave(service: Running) -> tuple[str, list[object]]:
    """Start a stream, read a little of it, hang up. Returns the request's id and what was read."""
    with httpx.Client(base_url=service.url, timeout=60) as client:
        body = service.long_body(stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            stream = Stream(response)
            begun: list[object] = list(stream.next_events(5))
        return stream.request_id, begun


def test_a_client_that_leaves_its_stream_frees_the_engine_within_the_grace_period(service: Running) -> None:
    with service.freed():
        request_id, _ = leave(service)
        left = time.monotonic()
        assert service.state(request_id)["state"] == "running"
        ended = until("the request ends", lambda: _ended(service, request_id), GRACE_S + 30)
        assert time.monotonic() - left > GRACE_S * 0.8, "it was given time to come back"
    assert (ended["state"], ended["reason"]) == ("cancelled", "client_disconnected")


def test_a_client_that_leaves_before_its_whole_answer_frees_the_engine_too(service: Running) -> None:
    def cancelled() -> float:
        return service.metrics().total("hermes_requests_ended_total", reason="client_disconnected")

    body = service.long_body("I will not wait.")
    with service.freed(), httpx.Client(base_url=service.url, timeout=httpx.Timeout(10, read=1.0)) as hasty:
        before = cancelled()
        with pytest.raises(httpx.ReadTimeout):
            hasty.post("/v1/chat/completions", json=body)
        hasty.close()
        until("it is cancelled", lambda: cancelled() == before + 1)


def test_a_client_that_comes_back_through_another_ingress_keeps_its_request(service: Running) -> None:
    urls = list(service.ingress_urls.values())  # found out before: it may take longer than the grace period
    request_id, begun = leave(service)
    for url in urls:  # one of them is not where it began
        headers = {"last-event-id": str(len(begun))}
        with httpx.stream("GET", f"{url}/v1/requests/{request_id}/events", headers=headers, timeout=60) as response:
            stream = Stream(response)
            until("past the grace period", _passed(GRACE_S + 0.7, stream))
            assert service.state(request_id)["state"] == "running"
            assert int(stream.text.split("\n")[0].removeprefix("id: ")) == len(begun) + 1
    ended = until("nobody reads it any more", lambda: _ended(service, request_id), GRACE_S + 30)
    assert ended["reason"] in ("client_disconnected", None)
    service.until_idle()


def test_a_request_that_was_read_to_its_end_is_not_cancelled(service: Running) -> None:
    with service.stream(tokens=8) as response:
        stream = Stream(response)
        stream.rest()
    threading.Event().wait(GRACE_S + 1)
    assert service.state(stream.request_id)["state"] == "completed"


def _ended(service: Running, request_id: str) -> dict[str, object] | None:
    found = service.state(request_id)
    return found if found["ended_at_ms"] is not None else None


def _passed(seconds: float, stream: Stream) -> object:
    began = time.monotonic()
    blocks = stream.blocks()

    def look() -> bool:
        next(blocks)
        return time.monotonic() - began > seconds

    return look
