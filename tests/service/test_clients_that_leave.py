"""A client that disconnects frees the engine; a client that reconnects in time keeps its
request.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

from tests.service.services import GRACE_S
from tests.service.support import CHAT, Running, Stream
from tests.waiting import until

# In the gate: journal/test_disconnects.py.
pytestmark = [pytest.mark.nightly, pytest.mark.outage]


def leave(service: Running) -> tuple[str, list[object], float]:
    """Start a stream, read a little, disconnect. Returns the request's id, what was read, and the
    time before it left.
    """
    with httpx.Client(base_url=service.url, timeout=60) as client:
        with client.stream("POST", CHAT, json=service.long_body(stream=True)) as response:
            stream = Stream(response)
            begun: list[object] = list(stream.next_events(5))
            left_s = time.monotonic()
        return stream.request_id, begun, left_s


@pytest.mark.clock
def test_a_client_that_leaves_its_stream_frees_the_engine_within_the_grace_period(
    service: Running,
) -> None:
    with service.freed():
        request_id, _, left_s = leave(service)
        ended = service.ended(request_id)
        assert time.monotonic() - left_s > GRACE_S * 0.8, "it was given time to come back"
    assert (ended["state"], ended["reason"]) == ("cancelled", "client_disconnected")


def test_a_client_that_leaves_before_its_whole_answer_frees_the_engine_too(
    service: Running,
) -> None:
    user = secrets.token_hex(8)
    body = json.dumps(service.long_body("I will not wait.", user=user)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    port = urlsplit(service.url).port or 0
    with service.freed():
        with socket.create_connection(("127.0.0.1", port)) as hasty:
            hasty.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            request_id = until("it runs", lambda: service.begun(user))
        ended = service.ended(request_id)
    assert (ended["state"], ended["reason"]) == ("cancelled", "client_disconnected")


def test_a_client_that_comes_back_through_another_ingress_keeps_its_request(
    service: Running,
) -> None:
    # Found out before: it may take longer than the grace period.
    urls = list(service.ingress_urls.values())
    request_id, begun, _ = leave(service)
    for url in urls:  # one of them is not where it began
        headers = {"last-event-id": str(len(begun))}
        with httpx.stream(
            "GET", f"{url}/v1/requests/{request_id}/events", headers=headers, timeout=60
        ) as response:
            stream = Stream(response)
            until("past the grace period", _passed(GRACE_S + 0.7, stream))
            assert service.state(request_id)["state"] == "running"
            assert int(stream.text.split("\n")[0].removeprefix("id: ")) == len(begun) + 1
    ended = service.ended(request_id)
    assert ended["reason"] in ("client_disconnected", None)
    service.until_idle()


def _passed(seconds: float, stream: Stream) -> Callable[[], bool]:
    began = time.monotonic()
    blocks = stream.blocks()

    def look() -> bool:
        next(blocks)
        return time.monotonic() - began > seconds

    return look
