"""The answer forwards every byte of the journal, whatever arrives while it is sending; its first
message keeps its headers.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import msgspec

from serve_app.ingress.answer import Answer, ResponseStart
from serve_app.journal.entries import Entry
from serve_app.journal.facts import AttemptFacts, Head, Summary
from serve_app.journal.follower import Follower
from serve_app.journal.ids import TERMINAL_ID, EntryId
from serve_app.journal.reader import JournalReader

HEAD = msgspec.json.encode(Head(200, [("content-type", "text/event-stream")]))
OPENED = msgspec.json.encode(AttemptFacts("r1", "vllm-0", 0))
SUMMARY = msgspec.json.encode(Summary(None, None, 1, 0))


class Stays:
    """The disconnect handling for a client that stays."""

    def left(self, follower: Follower, departed: bool) -> None:
        assert not departed


def event(number: int) -> bytes:
    return b"id: %d\ndata: %d\n\n" % (number, number)


async def test_what_comes_while_bytes_are_sent_is_sent_too_the_end_included() -> None:
    reader = JournalReader(position=EntryId(0, 1))
    follower = Follower(None, "req_1", reader)  # type: ignore[arg-type]  # nothing is read from Redis here
    reader.feed(Entry(EntryId(1, 0), {b"n": b"1", b"m": OPENED}))
    reader.feed(Entry(EntryId(1, 1), {b"n": b"1", b"h": HEAD, b"b": event(1), b"e": b"1"}))
    follower.wake()
    sent = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))
        await asyncio.sleep(0)
        if sent[-1] == event(1):  # a slow client: the rest is there before this byte is away
            reader.feed(Entry(EntryId(1, 2), {b"n": b"1", b"b": event(2), b"e": b"2"}))
            fields = {b"n": b"1", b"b": event(3), b"e": b"3", b"m": SUMMARY, b"p": b"1-2"}
            reader.feed(Entry(TERMINAL_ID, fields | {b"k": b"completed", b"w": b""}))
            follower.wake()

    answer = Answer(
        follower,
        Stays(),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type] # no deadline is looked at here
        "/v1/completions",
        streamed=True,
        as_events=False,
        admitted_ms=0,
        deadline_ms=0,
        heartbeat_s=10.0,
    )
    await asyncio.wait_for(answer({}, None, send), 60)
    assert b"".join(sent) == event(1) + event(2) + event(3)


def a_start() -> ResponseStart:
    return ResponseStart(
        type="http.response.start", status=200, headers=[(b"x-request-id", b"req_1")]
    )


def test_a_middleware_cannot_replace_the_headers() -> None:
    message = a_start()
    message["headers"] = [*message["headers"], (b"X-Request-ID", b"another")]
    message["status"] = 201
    assert message["headers"] == [(b"x-request-id", b"req_1")]
    assert message["status"] == 201


def test_it_survives_the_way_through_ray_with_its_headers() -> None:
    received = pickle.loads(pickle.dumps(a_start()))
    assert type(received) is dict
    assert received == dict(a_start())
