"""Streams that end, are refused or never come, and what their caller is told."""

from __future__ import annotations

import threading

import httpx
import pytest

from serve_app.ingress.protocol_events import COMMENT
from serve_app.journal.events import DONE
from tests.http_server import (
    END,
    Asked,
    Cut,
    Script,
    Wire,
    chunk,
    cutting,
    head,
    sending,
    serving,
    whole,
)
from tests.tables import each
from tests.unit.client.callers import Kind, Scripted
from tests.unit.client.conftest import Clock
from tests.unit.client.service import (
    ID,
    LOST,
    PLAIN,
    answer,
    first,
    healthy,
    numbered,
    sending_all,
    streaming,
)

FINAL = [
    b"data: [DONE]\n\n",
    b"event: response.completed\ndata: {}\n\n",
    b"event: response.incomplete\ndata: {}\n\n",
    b"event: response.failed\ndata: {}\n\n",
    b"event: error\ndata: {}\n\n",
]
BROKEN = streaming() + chunk(PLAIN[0])
OPENAIS = b'{"error": {"message": "Gone."}}'


@each("final", FINAL)
def test_a_connection_that_breaks_behind_the_final_event_breaks_nothing(
    kind: Kind, final: bytes
) -> None:
    events = numbered(b"data: a\n\n", final)
    with serving(cutting(streaming() + chunk(b"".join(events)), reset=False)) as service:
        assert kind.fetch(service.url).chunks == events
    assert len(service.asked) == 1


@each(
    "begin, rest, events, requests",
    [
        # What ends properly is complete, whatever its last event, also the rest.
        (sending(streaming() + chunk(b"".join(PLAIN[:2])) + END), healthy, 2, 1),
        (cutting(BROKEN), sending(streaming() + END), 1, 2),
        # It is not if it ends inside an event, or before its first one.
        (sending(BROKEN + chunk(PLAIN[1][:-3]) + END), healthy, 4, 2),
        (cutting(streaming()), healthy, 4, 2),
        # A body of unknown length ends with its final event.
        (cutting(head(x_request_id=ID) + PLAIN[0]), healthy, 4, 2),
        (cutting(head(x_request_id=ID) + b"".join(PLAIN)), healthy, 4, 1),
        # Events that were handed on already are dropped.
        (
            cutting(BROKEN + chunk(PLAIN[1])),
            sending(streaming() + chunk(b"".join(PLAIN)) + END),
            4,
            2,
        ),
    ],
)
def test_a_stream_is_read_until_it_is_complete(
    kind: Kind, begin: Script, rest: Script, events: int, requests: int
) -> None:
    with serving(first(begin, rest)) as service:
        assert kind.fetch(service.url).chunks == PLAIN[:events]
    assert [asked.method for asked in service.asked] == ["POST", "GET"][:requests]


@each(
    "status, body, words",
    [
        (400, OPENAIS, r"Gone\."),
        (410, OPENAIS, r"Gone\."),
        # In another shape it is quoted as it is.
        *((410, body, "Gone.*") for body in (b"<h1>Gone</h1>", b'{"error": "Gone"}', b'["Gone"]')),
    ],
)
def test_a_refusal_of_the_rest_is_an_error_with_the_services_own_words(
    kind: Kind, status: int, body: bytes, words: str
) -> None:
    script = first(cutting(BROKEN), sending(whole(status, body)))
    expected = rf"{words} \(HTTP {status}\)"
    with serving(script) as service, pytest.raises(httpx.RemoteProtocolError, match=expected):
        kind.fetch(service.url)
    assert len(service.asked) == 2


def test_a_service_that_cannot_send_the_rest_yet_is_asked_again(kind: Kind) -> None:
    answers = sending_all(
        whole(503, b"{}", x_hermes_reason="journal_unavailable"),
        whole(500, b"Internal Server Error", "text/plain"),
        whole(429, b"{}"),
        whole(200, b"<h1>Maintenance</h1>", "text/html"),
    )
    with serving(first(cutting(BROKEN), answers)) as service:
        assert kind.fetch(service.url).chunks == PLAIN
    assert [asked.seen for asked in service.asked[1:]] == [1] * 5
    assert service.connections == 2  # each of these answers was read to its end


def test_the_first_error_is_raised_when_the_service_stays_away_for_too_long(
    kind: Kind, clock: Clock
) -> None:
    clock.step_s = 0.1
    later = sending(whole(503, b"{}"))
    with (
        serving(first(cutting(BROKEN), later)) as service,
        pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"),
    ):
        kind.fetch(service.url, give_up_after_s=0.15)
    assert len(service.asked) == 3, "at 0, 0.1 and 0.2 s"
    silence: list[bytes | Exception] = [httpx.ReadTimeout("nothing came")]
    inner = Scripted([PLAIN[0], httpx.RemoteProtocolError("broken")], *[silence] * 9)
    with pytest.raises(httpx.RemoteProtocolError, match="broken"):
        kind.fetch("http://service", give_up_after_s=0.15, inner=inner)
    assert len(inner.asked) == 3, "the same if it is there and sends nothing more"


@pytest.mark.parametrize("sign", ["event", "comment"])
def test_every_sign_of_life_gives_the_service_its_whole_time_again(
    kind: Kind, clock: Clock, sign: str
) -> None:
    clock.step_s = 1.0
    events = numbered(*[b"data: a\n\n"] * 5, DONE)

    def script(asked: Asked, wire: Wire) -> None:
        tries = len(service.asked)
        if tries == 6:
            wire.send(answer(asked, events))
            return
        wire.send(streaming() + chunk(events[tries - 1] if sign == "event" else COMMENT))
        wire.cut()

    with serving(script) as service:
        got = kind.fetch(service.url, give_up_after_s=0.5)
    assert clock.now_s == 5, "five failures, one second apart"
    assert [part for part in got.chunks if part != b": waiting\n"] == events


def test_a_stream_that_is_not_the_services_is_handed_on_untouched(kind: Kind) -> None:
    body = b"data: a\r\n\r\nid: 7\ndata: b\n\ndata: c"
    with serving(sending(head(transfer_encoding="chunked") + chunk(body) + END)) as service:
        assert kind.fetch(service.url).body == body
    with (
        serving(cutting(head(transfer_encoding="chunked") + chunk(body))) as service,
        pytest.raises(LOST),
    ):
        kind.fetch(service.url)
    assert len(service.asked) == 1


def test_closing_an_answer_closes_the_connection_that_it_has_come_to(kind: Kind) -> None:
    left = threading.Event()

    def rest(asked: Asked, wire: Wire) -> None:
        wire.send(streaming() + chunk(PLAIN[1]))
        try:
            wire.pause()
        except Cut:
            left.set()

    with serving(first(cutting(BROKEN), rest)) as service:
        assert kind.fetch(service.url, most=2).chunks == PLAIN[:2]
        assert left.wait(60)
