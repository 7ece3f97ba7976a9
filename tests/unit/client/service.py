"""Scripts that act as the service, for the scripted HTTP server."""

from __future__ import annotations

from pathlib import Path

import httpx

from serve_app.journal.events import DONE, EventNumberer, after_event
from tests.http_server import END, Asked, Script, Wire, chunk, event, head

ID = "req_0123456789abcdef"
CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "stream": true, "messages": []}'
ROOT = Path(__file__).parents[3]
LOST = (
    httpx.ReadError,
    httpx.RemoteProtocolError,
)  # which of the two depends on when the system notices


def streaming(**headers: str) -> bytes:
    """The head of a stream of the service."""
    return head(x_request_id=ID, transfer_encoding="chunked", **headers)


def chat_chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    data = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return event(data)


def numbered(*events: bytes) -> list[bytes]:
    """Events as in the journal."""
    numberer = EventNumberer()
    return [numberer.number(event) for event in events]


TEXTS = ("Grüße", " 👋", "")
EVENTS = numbered(*(chat_chunk(text) for text in TEXTS), DONE)
STREAM = b"".join(EVENTS)
PLAIN = numbered(b"data: a\n\n", b"data: b\n\n", b"data: c\n\n", DONE)
COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Grüße 👋"},
        }
    ],
}


def answer(asked: Asked, events: list[bytes] = PLAIN) -> bytes:
    """A healthy service's answer: the stream, or its rest."""
    if asked.method == "GET":
        assert asked.path.endswith(f"/v1/requests/{ID}/events")
    rest = after_event(b"".join(events), 1, asked.seen if asked.method == "GET" else 0)
    return streaming() + (chunk(rest) if rest else b"") + END


def first(script: Script, then: Script | None = None) -> Script:
    """Plays `script` for the first request and `then`, by default a healthy service, for all
    others.
    """
    requests = iter([script])

    def play(asked: Asked, wire: Wire) -> None:
        next(requests, then or healthy)(asked, wire)

    return play


def sending_all(*answers: bytes) -> Script:
    """Send these one after another, and then act as a healthy service."""
    rest = iter(answers)
    return lambda asked, wire: wire.send(next(rest, b"") or answer(asked))


def healthy(asked: Asked, wire: Wire) -> None:
    wire.send(answer(asked))
