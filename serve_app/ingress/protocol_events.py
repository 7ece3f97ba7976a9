"""What the service itself writes into a stream, in its client's protocol. Pure.

All other events are the engine's server's, as they are in the journal.
"""

from __future__ import annotations

from typing import Any

import msgspec

from serve_app.contract import ANTHROPIC, CHATS, COMPLETIONS, MESSAGE, RESPONSES, Reason, State
from serve_app.errors import anthropics_error, error_body
from serve_app.ingress.objects import unanswered_response
from serve_app.journal.entries import RequestFacts
from serve_app.journal.events import DONE, escaped

COMMENT = b": waiting\n"
"""What a sign of life begins with. It has no blank line: after an event with an id, OpenAI's SDK
(3.52) would treat that as an event and fail on its empty data.
"""


def error_events(reason: Reason, message: str, last: int, path: str) -> bytes:
    """The end of a failed stream: one error event, then whatever ends the streams of this endpoint.

    Chat and completions end in `[DONE]`, as vLLM's and OpenAI's do; Responses and Anthropic's
    messages have an `error` event and no `[DONE]`.
    """
    data: dict[str, Any] = error_body(reason, message)
    if path in ANTHROPIC:
        data = anthropics_error(reason, message)
    elif path.endswith("/responses"):
        data = {**data["error"], "type": "error", "sequence_number": last}
    written = escaped(msgspec.json.encode(data))
    if "type" in data:
        return b"id: %d\nevent: error\ndata: %b\n\n" % (last + 1, written)
    return b"id: %d\ndata: %b\n\nid: %d\n%b" % (last + 1, written, last + 2, DONE)


def body_event(body: bytes) -> bytes:
    """A response that is not a stream, as the only event of a stream."""
    lines = b"".join(b"data: %b\n" % line for line in escaped(body).splitlines() or [b""])
    return b"id: 1\nevent: response\n%b\n" % lines


def sign_of_life(
    path: str, request_id: str, facts: RequestFacts | None, last_event: int, begun: bool
) -> bytes:
    """What a stream without news sends, so that no client takes it for dead: an event of the
    client's own protocol that changes nothing, after a comment by which this project's own clients
    know it. Clients give up after minutes without an event, and comments are no events to them.

    It has no `id` and is in no journal, so it moves no reader's place, and a replay does not have
    it. A response has OpenAI's own `keepalive`, with the sequence number of the last event: whoever
    goes on after it misses nothing. Before the first event OpenAI's SDKs take `response.created`
    and nothing else, so it is that one, once; it comes again with the answer. Chats and completions
    have a chunk that adds nothing, messages Anthropic's `ping`, other endpoints the comment alone.

    Args:
        last_event: number of the last event that the client has; 0 if it has none.
        begun: whether it has an event, or a sign of life that stands for the first one.
    """
    if facts is None:
        return COMMENT
    if path == RESPONSES:
        place = max(0, last_event - 1)
        event: dict[str, Any] = {"type": "keepalive", "sequence_number": place}
        if not begun:
            response = msgspec.Raw(unanswered_response(request_id, facts, None, State.QUEUED))
            event = {"type": "response.created", "sequence_number": 0, "response": response}
        return COMMENT + b"event: %b\ndata: %b\n\n" % (
            event["type"].encode(),
            msgspec.json.encode(event),
        )
    if path == MESSAGE:
        return COMMENT + b'event: ping\ndata: {"type":"ping"}\n\n'
    made = {"created": facts.admitted_ms // 1000, "model": facts.called}
    nothing: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
    if path == CHATS:
        chunk = {"id": f"chatcmpl-{request_id}", "object": "chat.completion.chunk", **made}
        nothing["delta"] = {}
    elif path == COMPLETIONS:
        chunk = {"id": f"cmpl-{request_id}", "object": "text_completion", **made}
        nothing["text"] = ""
    else:
        return COMMENT
    return COMMENT + b"data: %b\n\n" % msgspec.json.encode({**chunk, "choices": [nothing]})
