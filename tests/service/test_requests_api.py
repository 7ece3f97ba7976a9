"""`/v1/requests/{id}`: a request can be shown, read again from any ingress, and cancelled."""

from __future__ import annotations

import json
import socket
import threading
from functools import partial
from typing import Any

import httpx

from tests.service.services import HELD
from tests.service.support import (
    CHAT,
    LONG_TOKENS,
    Running,
    Stream,
    asking,
    check_whole,
    events_of,
    together,
)
from tests.waiting import until


def events(simulated: Running, url: str, request_id: str, seen: object = None) -> httpx.Response:
    """`GET /v1/requests/{id}/events`, read to its end."""
    headers = {} if seen is None else {"last-event-id": str(seen)}
    return simulated.http.get(f"{url}/v1/requests/{request_id}/events", headers=headers)


def test_a_finished_request_is_described(simulated: Running) -> None:
    answer = simulated.ask(tokens=8, headers={"x-hermes-class": "realtime"})
    found = simulated.state(answer.headers["x-request-id"])
    assert found["state"] == "completed"
    assert found["reason"] is None
    assert found["class"] == "realtime"
    assert found["model"] == simulated.model
    assert found["replica"] == answer.headers["x-hermes-replica"]
    assert found["attempts"] >= 1
    assert found["usage"]["output_tokens"] == 8
    of_worker = [found[f"{name}_at_ms"] for name in ("started", "first_output", "ended")]
    assert of_worker == sorted(of_worker)
    # The ingress and the worker estimate Redis's clock, and a busy machine makes that inaccurate.
    assert found["admitted_at_ms"] < of_worker[0] + 1_000
    assert found["ended_at_ms"] < found["deadline_at_ms"]
    assert simulated.cancel(found["id"])["state"] == "completed", "what has ended stays as it is"


def test_whoever_does_not_wait_is_told_one_id(simulated: Running) -> None:
    """Ray Serve would put one of its own behind it."""
    background = {"model": simulated.model, "input": "Hello", "max_output_tokens": 5}
    for path, body, headers in (
        (CHAT, asking(), {"prefer": "respond-async"}),
        ("/v1/responses", {**background, "background": True}, {}),
    ):
        told = simulated.http.post(f"{simulated.url}{path}", json=body, headers=headers)
        assert told.status_code in (200, 202)
        (request_id,) = told.headers.get_list("x-request-id")
        assert simulated.state(request_id)["id"] == request_id


def test_a_running_request_is_described_and_cancelled_and_has_the_same_events_at_every_ingress(
    simulated: Running,
) -> None:
    simulated.until_idle()
    with simulated.stream(f"{HELD}, until it is cancelled.", LONG_TOKENS) as response:
        stream = Stream(response)
        first = stream.next_events(3)
        running = simulated.state(stream.request_id)
        assert running["state"] == "running"
        assert running["replica"] == response.headers["x-hermes-replica"]
        assert running["ended_at_ms"] is None
        until("it is counted", lambda: simulated.metrics().total("hermes_in_flight_requests") > 0)
        cancelled = simulated.cancel(stream.request_id)
        assert (cancelled["state"], cancelled["reason"]) == ("cancelled", "cancelled")
        rest = stream.rest()
    whole = first + rest
    check_whole(whole)
    error: dict[str, Any] = json.loads(rest[-2].data)["error"]
    assert error["code"] == "cancelled"
    assert simulated.state(stream.request_id)["state"] == "cancelled"
    simulated.until_idle()
    for url in simulated.ingress_urls.values():
        for seen in (0, 2, len(whole) - 2, len(whole) - 1, len(whole)):
            answer = events(simulated, url, stream.request_id, seen)
            assert answer.status_code == (200 if seen < len(whole) else 204), answer.text
            assert events_of(answer.text) == whole[seen:]
        beyond = events(simulated, url, stream.request_id, len(whole) + 1)
        assert (beyond.status_code, beyond.headers["x-hermes-reason"]) == (410, "journal_lost")


def test_the_events_are_the_same_from_every_ingress_and_from_every_event_on(
    simulated: Running,
) -> None:
    with simulated.stream(tokens=12) as response:
        stream = Stream(response)
        whole = stream.rest()
    check_whole(whole)
    assert len(simulated.ingress_urls) == 2
    for url in (*simulated.ingress_urls.values(), simulated.url):
        assert events(simulated, url, stream.request_id).text == stream.text
        read = partial(events, simulated, url, stream.request_id)
        for seen, answer in enumerate(together([partial(read, n) for n in range(len(whole) + 1)])):
            assert answer.status_code == (200 if seen < len(whole) else 204)
            assert events_of(answer.text) == whole[seen:]


def test_the_events_of_a_running_request_can_be_followed_through_every_ingress(
    simulated: Running,
) -> None:
    with simulated.stream(tokens=120) as response:
        stream = Stream(response)
        begun = stream.next_events(10)
        readers = [
            partial(events, simulated, url, stream.request_id, seen)
            for url in simulated.ingress_urls.values()
            for seen in (None, 3, 10)
        ]
        others: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: others.extend(together(readers)))
        thread.start()
        whole = begun + stream.rest()
    thread.join(240)
    check_whole(whole)
    assert len(others) == 6
    for index, answer in enumerate(others):
        seen = (0, 3, 10)[index % 3]
        assert events_of(answer.text) == whole[seen:], f"reader {index}"
        assert answer.headers["x-request-id"] == stream.request_id


def test_an_event_beyond_the_end_of_a_running_request_ends_in_an_error_and_not_in_silence(
    simulated: Running,
) -> None:
    with simulated.stream(tokens=80) as response:
        stream = Stream(response)
        stream.next_events(3)
        answer = events(simulated, simulated.url, stream.request_id, 5000)
        stream.rest()
    if answer.status_code == 200:
        assert json.loads(events_of(answer.text)[0].data)["error"]["code"] == "journal_lost"
    else:
        assert answer.headers["x-hermes-reason"] == "journal_lost"


def test_head_and_body_of_an_answer_leave_every_ingress_in_one_write(simulated: Running) -> None:
    """Serve makes the connections, of the kind that it is told."""
    for url in map(httpx.URL, simulated.ingress_urls.values()):
        with socket.create_connection((url.host, url.port), timeout=60) as client:
            for _ in range(20):
                client.sendall(b"GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n")
                head, _, body = client.recv(1 << 16).partition(b"\r\n\r\n")
                assert body, head
