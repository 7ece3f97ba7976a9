"""Numbering server-sent events, and finding the position after one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.contract import Reason
from serve_app.ingress.protocol_events import body_event, error_events
from serve_app.journal.events import DONE, EventNumberer, after_event, escaped
from tests.tables import each

lines = st.text(alphabet="ab:{} é", min_size=1, max_size=8).map(
    lambda text: f"data: {text}\n".encode()
)
events = st.lists(lines, min_size=1, max_size=3).map(lambda parts: b"".join(parts) + b"\n")
comments = st.sampled_from([b": waiting\n\n", b":\n\n"])


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place for place in places if place <= len(whole)), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(events | comments, max_size=8), st.lists(st.integers(0, 300)))
def test_numbers_do_not_depend_on_where_the_chunks_end(
    stream: list[bytes], places: list[int]
) -> None:
    number = itertools.count(1)
    expected = b"".join(
        item if item.startswith(b":") else b"id: %d\n%b" % (next(number), item) for item in stream
    )
    numberer = EventNumberer()
    chunks = [chunk for chunk in cut(b"".join(stream), places) if chunk]
    assert b"".join(numberer.number(chunk) for chunk in chunks) == expected
    assert numberer.last == next(number) - 1


@given(st.lists(events, min_size=1, max_size=8), st.lists(st.integers(0, 300)))
def test_only_whole_events_are_ever_given_out(stream: list[bytes], places: list[int]) -> None:
    numberer = EventNumberer()
    for chunk in cut(b"".join(stream), places):
        if chunk:
            out = numberer.number(chunk)
            assert out == b"" or out.endswith(b"\n\n")


ENDS_OF_LINES = "a\u2028b\u2029\u0085\\c é"


def numbered(data: bytes) -> bytes:
    """An event in chunks of a byte."""
    numberer = EventNumberer()
    return b"".join(numberer.number(bytes([byte])) for byte in b"data: %b\n\n" % data)


@each(
    "made",
    [
        lambda data: EventNumberer().number(b"data: %b\n\n" % data),
        numbered,
        body_event,
        lambda data: error_events(Reason.INTERNAL, json.loads(data)["message"], 0, "/v1/responses"),
        lambda data: error_events(Reason.INTERNAL, json.loads(data)["message"], 0, "/v1/chat"),
    ],
)
def test_nothing_but_a_line_feed_ends_a_line_of_an_event(made: Callable[[bytes], bytes]) -> None:
    """Many clients split a stream as `str.splitlines` does."""
    data = json.dumps({"message": ENDS_OF_LINES}, ensure_ascii=False).encode()
    event = made(data).decode()
    assert event.splitlines() == event.removesuffix("\n").split("\n")
    told = next(line for line in event.splitlines() if line.startswith("data: "))
    found = json.loads(told.removeprefix("data: "))
    assert found.get("error", found)["message"] == ENDS_OF_LINES
    assert escaped(made(data)) == made(data)


@given(st.lists(events, max_size=8), st.integers(0, 5), st.integers(0, 20))
def test_after_event_gives_exactly_what_comes_after_it(
    stream: list[bytes], before: int, seen: int
) -> None:
    numberer = EventNumberer()
    numberer.last = before
    numbered = [numberer.number(event) for event in stream]
    expected = b"".join(item for n, item in enumerate(numbered, before + 1) if n > seen)
    assert after_event(b"".join(numbered), before + 1, seen) == expected


def test_a_comment_is_not_counted_as_an_event() -> None:
    body = b": a\n\nid: 1\ndata: x\n\n: b\n\nid: 2\ndata: y\n\n: c\n\n"
    assert after_event(body, 1, 0) == body
    assert after_event(body, 1, 1) == b": b\n\nid: 2\ndata: y\n\n: c\n\n"
    assert after_event(body, 1, 2) == b": c\n\n"


@each(
    "path, begin, done",
    [
        ("/v1/chat/completions", b"", b"id: 9\n" + DONE),
        ("/v1/completions", b"", b"id: 9\n" + DONE),
        ("/v1/responses", b"event: error\n", b""),
    ],
)
def test_a_stream_that_failed_ends_in_one_numbered_error(
    path: str, begin: bytes, done: bytes
) -> None:
    error, end, rest = error_events(Reason.ATTEMPT_LOST, "It died.", 7, path).partition(b"\n\n")
    assert (end, rest) == (b"\n\n", done)
    head, _, data = error.partition(b"data: ")
    assert head == b"id: 8\n" + begin
    told = json.loads(data)
    if done:
        assert told["error"]["code"] == "attempt_lost"
    else:
        its = {"sequence_number": 7, "message": "It died.", "param": None, "code": "attempt_lost"}
        assert told == {"type": "error", **its}


@pytest.mark.parametrize("body", [b"", b'{"a": 1}', b'{\n "a": 1\n}', b"a\n\nb"])
def test_a_whole_body_is_one_event(body: bytes) -> None:
    event = body_event(body)
    assert event.startswith(b"id: 1\nevent: response\ndata: ")
    assert event.count(b"\n\n") == 1
    assert event.endswith(b"\n\n")
    data = [
        line.removeprefix(b"data: ") for line in event.splitlines() if line.startswith(b"data: ")
    ]
    assert b"\n".join(data) == body
