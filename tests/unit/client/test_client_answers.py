"""An answer that is not streamed is requested again with the same key; every other request passes
unchanged.
"""

from __future__ import annotations

import json

import httpx
import pytest

from serve_app.client import ReconnectingTransport
from tests.http_server import Asked, Wire, cutting, head, sending, serving, whole
from tests.tables import each
from tests.unit.client.callers import Kind, Scripted
from tests.unit.client.conftest import Clock
from tests.unit.client.service import BODY, CHAT, COMPLETION, ID, PLAIN, first, sending_all


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_json_answer_cut_at_any_byte_is_asked_for_again_with_the_same_key(
    kind: Kind, step: int
) -> None:
    sent = whole(200, json.dumps(COMPLETION, ensure_ascii=False).encode(), x_request_id=ID)
    broken: set[int] = set()

    def script(asked: Asked, wire: Wire) -> None:
        place = int(asked.path.split("/")[1])
        if place not in broken:
            broken.add(place)
            wire.send(sent[:place])
            wire.cut(reset=place % 2 == 1)
        wire.send(sent)

    places = range(0, len(sent), step)
    with serving(script) as service:
        found = kind.chat([f"{service.url}/{place}" for place in places])
    assert found == [found[0]] * len(places)
    assert found[0][0]["choices"][0]["message"]["content"] == "Grüße 👋"
    assert len(service.keys) == 2 * len(places)
    assert service.keys[::2] == service.keys[1::2]
    assert len(set(service.keys)) == len(places)


def test_a_service_that_lets_connections_wait_too_long_is_tried_again(kind: Kind) -> None:
    late = httpx.ConnectTimeout("no answer to SYN")
    inner = Scripted(late, late, list(PLAIN))
    assert kind.fetch("http://service", inner=inner).chunks == PLAIN
    assert len(inner.asked) == 3
    assert len({request.headers["idempotency-key"] for request in inner.asked}) == 1


def test_the_last_error_is_raised_when_the_service_stays_away(kind: Kind, clock: Clock) -> None:
    clock.step_s = 0.1
    with (
        serving(first(cutting(b""), cutting(b"nonsense\r\n\r\n"))) as service,
        pytest.raises(httpx.RemoteProtocolError, match="nonsense"),
    ):
        kind.fetch(service.url, give_up_after_s=0.35)
    assert len(service.asked) == 5, "at 0, 0.1, 0.2, 0.3 and 0.4 s"
    with pytest.raises(httpx.ConnectError):
        kind.fetch(service.url, give_up_after_s=0.35)
    with serving(cutting(b"")) as service, pytest.raises(httpx.RemoteProtocolError):
        kind.fetch(service.url, give_up_after_s=0.0)
    assert len(service.asked) == 1, "without time nothing is tried again"


@pytest.mark.parametrize("begun", [b"", head(200, "application/json", content_length="9") + b"{"])
def test_the_callers_own_timeout_ends_his_wait_for_an_answer(kind: Kind, begun: bytes) -> None:
    def silent(asked: Asked, wire: Wire) -> None:
        wire.send(begun)
        wire.pause()

    with serving(silent) as service, pytest.raises(httpx.ReadTimeout):
        kind.fetch(service.url, timeout=httpx.Timeout(10.0, read=0.1))
    assert (
        len(service.asked) <= 1
    )  # 0: on a slow machine the request may not even have been read by then


@each("status", [500, 502, 503, 504])
@each("headers", [{}, {"x_request_id": "0f8fad5b-d9cb-469f-a165-70867728950e"}])
def test_an_error_from_before_the_service_is_tried_again(
    kind: Kind, status: int, headers: dict[str, str]
) -> None:
    failure = whole(status, b"Service Unavailable", "text/plain", **headers)
    with serving(sending_all(failure, failure)) as service:
        assert kind.fetch(service.url).chunks == PLAIN
    assert len(service.keys) == 3
    assert len(set(service.keys)) == 1
    assert service.connections == 1  # the answers before were read and closed


@each(
    "header, statuses",
    [
        # Every answer of the service itself, errors included; and from before it all but a few.
        ({"x_hermes_reason": "internal"}, [500, 502, 503, 504]),
        ({"x_hermes_replica": "a"}, [500, 502, 503, 504]),
        ({"x_request_id": ID}, [500, 502, 503, 504]),
        ({}, [200, 202, 301, 400, 404, 408, 429, 501]),
    ],
)
def test_every_other_answer_is_handed_on(
    kind: Kind, header: dict[str, str], statuses: list[int]
) -> None:
    for status in statuses:
        with serving(sending(whole(status, b'{"error": {}}', **header))) as service:
            got = kind.fetch(service.url)
        assert (got.status, got.body) == (status, b'{"error": {}}')
        assert len(service.asked) == 1


def test_a_body_that_can_be_read_once_is_sent_again_whole(kind: Kind) -> None:
    with serving(first(cutting(b""))) as service:
        assert kind.fetch(service.url, content=kind.once(BODY[:9], BODY[9:])).chunks == PLAIN
    assert [asked.body for asked in service.asked] == [BODY, BODY]


def test_every_request_has_a_key_of_its_own_and_the_callers_is_kept() -> None:
    with (
        serving(sending(whole(200, b"{}"))) as service,
        httpx.Client(transport=ReconnectingTransport()) as http,
    ):
        request = http.build_request("POST", service.url + CHAT, content=BODY)
        for _ in range(2):
            http.send(request)
        http.post(service.url + CHAT, content=BODY, headers={"Idempotency-Key": "mine"})
    assert "idempotency-key" not in request.headers
    assert len(set(service.keys)) == 3
    assert service.keys[2] == "mine"
    assert len(service.keys[0]) == 36


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("DELETE", f"/v1/requests/{ID}"), ("POST", "/tokenize")],
)
def test_requests_without_such_a_promise_pass_untouched(kind: Kind, method: str, path: str) -> None:
    with serving(cutting(b"")) as service, pytest.raises(httpx.RemoteProtocolError):
        kind.fetch(service.url, method=method, url=service.url + path)
    (asked,) = service.asked
    assert (asked.method, asked.path, asked.body) == (method, path, BODY)
    assert "idempotency-key" not in asked.headers
    assert "gzip" in asked.headers["accept-encoding"]
