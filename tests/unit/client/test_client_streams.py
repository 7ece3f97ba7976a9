"""A broken stream is put together again: no event is lost or duplicated, wherever it was cut."""

from __future__ import annotations

import gzip
from typing import Any

import httpx
import pytest

from serve_app.contract import Reason
from serve_app.ingress.protocol_events import COMMENT, error_events
from tests.http_server import END, Asked, Wire, chunk, cutting, sending, serving
from tests.tables import each
from tests.unit.client.callers import Kind, Scripted
from tests.unit.client.service import (
    CHAT,
    EVENTS,
    ID,
    PLAIN,
    STREAM,
    TEXTS,
    answer,
    first,
    healthy,
    streaming,
)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_stream_cut_at_any_byte_of_its_answer_reads_as_if_it_had_not_been(
    kind: Kind, step: int
) -> None:
    life = chunk(COMMENT + b'data: {"choices": []}\n\n')
    parts = [life, chunk(EVENTS[0]), chunk(COMMENT), life, *map(chunk, EVENTS[1:]), END]
    sent = streaming() + b"".join(parts)
    broken: set[int] = set()

    def script(asked: Asked, wire: Wire) -> None:
        place = int(asked.path.split("/")[1])
        if place not in broken:
            broken.add(place)
            wire.send(sent[:place])
            wire.cut(reset=place % 2 == 1)
        wire.send(answer(asked, EVENTS))

    with serving(sending(streaming() + chunk(STREAM) + END)) as service:
        (unbroken,) = kind.chat([service.url], stream=True)
    assert [part["choices"][0]["delta"]["content"] for part in unbroken] == list(TEXTS)
    places = range(0, len(sent) + 1, step)
    with serving(script) as service:
        found = kind.chat([f"{service.url}/{place}" for place in places], stream=True)
    news = [[part for part in result if part["choices"]] for result in found]  # no signs of life
    assert [place for place, result in zip(places, news, strict=True) if result != unbroken] == []
    for place in places:
        posts = [a for a in service.asked if a.method == "POST" and a.path.startswith(f"/{place}/")]
        # With the head the id is known, and the rest can be asked for.
        assert len(posts) == (2 if place < len(streaming()) else 1)
        assert len({post.headers["idempotency-key"] for post in posts}) == 1
    assert len(set(service.keys)) == len(places)


@each("size", [1, 7, 10_000])
@each("heartbeat", [b": waiting\n\n", b": waiting\n"])
def test_only_whole_events_and_lines_of_comments_are_handed_on(
    kind: Kind, size: int, heartbeat: bytes
) -> None:
    life = [b": waiting\n", b"event: keepalive\ndata: {}\n\n"]
    blocks = [*life, EVENTS[0], b": waiting\n", EVENTS[1], *life, b"retry: 100\n\n", *EVENTS[2:]]
    body = b"".join(blocks).replace(b": waiting\nid", heartbeat + b"id")
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    with serving(sending(streaming() + b"".join(map(chunk, pieces)) + END)) as service:
        got = kind.fetch(service.url)
    assert got.chunks == blocks
    assert got.headers["x-request-id"] == ID


def test_a_comment_is_handed_on_while_the_next_event_is_still_to_come(kind: Kind) -> None:
    def script(asked: Asked, wire: Wire) -> None:
        wire.send(streaming() + chunk(PLAIN[0] + COMMENT))
        wire.pause()

    with serving(script) as service:
        assert kind.fetch(service.url, most=2).chunks == [PLAIN[0], b": waiting\n"]


@each(
    "events, message",
    [
        ([PLAIN[2]], "Event 3 of the stream followed event 1"),
        ([b"data: c\n\n"], "Event without a number of the stream followed event 1"),
    ],
)
@each("resumed", [False, True])
def test_a_hole_in_a_stream_is_an_error(
    kind: Kind, events: list[bytes], message: str, resumed: bool
) -> None:
    if resumed:
        script = first(
            cutting(streaming() + chunk(PLAIN[0])),
            sending(streaming() + chunk(b"".join(events)) + END),
        )
    else:
        script = sending(streaming() + chunk(PLAIN[0] + b"".join(events)) + END)
    with serving(script) as service, pytest.raises(httpx.ProtocolError, match=message):
        kind.fetch(service.url)
    assert len(service.asked) == 1 + resumed


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_journal_that_ends_before_what_was_received_is_an_error_and_no_end(
    kind: Kind, path: str
) -> None:
    lost = COMMENT + error_events(Reason.JOURNAL_LOST, "Lost.", 1, path)
    broken = cutting(streaming() + chunk(b"".join(PLAIN[:3])))
    script = first(broken, sending(streaming() + chunk(lost) + END))
    with (
        serving(script) as service,
        pytest.raises(httpx.ProtocolError, match="ends before event 3"),
    ):
        kind.fetch(service.url, url=service.url + path)


def test_the_rest_is_asked_for_with_the_headers_of_the_caller_but_those_of_the_body(
    kind: Kind,
) -> None:
    theirs = {
        "authorization": "Bearer s3cret",
        "openai-organization": "o",
        "x-session-id": "s",
        "x-hermes-class": "batch",
        "api-key": "k",
        "host": "hermes.example",
    }
    only_post = {
        "content-type": "application/json",
        "prefer": "wait=3",
        "idempotency-key": "mine",
        "content-length": "46",
        "x-request-timeout-seconds": "20",
    }
    with serving(first(cutting(streaming() + chunk(b"".join(PLAIN[:2]))))) as service:
        assert (
            kind.fetch(service.url, headers=theirs | only_post, params={"trace": "1"}).chunks
            == PLAIN
        )
    post, get = service.asked
    assert post.path == f"{CHAT}?trace=1"
    assert theirs.items() | only_post.items() <= post.headers.items()
    assert (get.method, get.path, get.body) == ("GET", f"/v1/requests/{ID}/events", b"")
    assert (
        theirs.items() | {("last-event-id", "2"), ("accept", "text/event-stream")}
        <= get.headers.items()
    )
    assert not only_post.keys() & get.headers.keys()


@pytest.mark.parametrize("seen", [0, 1])
def test_the_events_of_a_request_are_read_on_as_those_of_a_post_are(kind: Kind, seen: int) -> None:
    theirs = {"authorization": "Bearer s3cret"} | ({"last-event-id": str(seen)} if seen else {})
    cut = httpx.ReadError("cut")
    inner = Scripted(cut, [b"".join(PLAIN[seen:2]), cut], [b"".join(PLAIN[2:])])
    path = f"http://service/v1/requests/{ID}/events"
    request: dict[str, Any] = {"method": "GET", "url": path, "content": None, "headers": theirs}
    assert kind.fetch("http://service", inner=inner, **request).chunks == PLAIN[seen:]
    before = [str(seen)] if seen else []
    found = [asked.headers.get_list("last-event-id") for asked in inner.asked]
    assert found == [before, before, ["2"]], "after one event and no other"
    assert {asked.headers["authorization"] for asked in inner.asked} == {"Bearer s3cret"}
    assert not any("idempotency-key" in asked.headers for asked in inner.asked)


def test_silence_in_a_stream_is_a_broken_connection(kind: Kind) -> None:
    silence = httpx.ReadTimeout("nothing came")
    inner = Scripted([PLAIN[0], silence], [PLAIN[1], silence], [silence], [b"".join(PLAIN[2:])])
    got = kind.fetch("http://service", timeout=httpx.Timeout(10.0, read=7.0), inner=inner)
    assert got.chunks == PLAIN
    assert [request.headers["last-event-id"] for request in inner.asked[1:]] == ["1", "2", "2"]
    assert {request.extensions["timeout"]["read"] for request in inner.asked} == {7.0}


def test_streams_are_asked_for_uncompressed_since_halves_of_them_do_not_fit(kind: Kind) -> None:
    def script(asked: Asked, wire: Wire) -> None:
        if "gzip" in asked.headers["accept-encoding"]:
            wire.send(
                streaming(content_encoding="gzip") + chunk(gzip.compress(b"".join(PLAIN))) + END
            )
        elif asked.method == "POST":
            cutting(streaming() + chunk(PLAIN[0]))(asked, wire)
        else:
            healthy(asked, wire)

    with serving(script) as service:
        assert kind.fetch(service.url).chunks == PLAIN
