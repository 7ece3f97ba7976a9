"""What a stream without news sends, so that no client takes it for dead: an event of the client's
own protocol that changes nothing.

Clients give up after minutes without an event, and comments are no events to them. A sign of life
has no `id` and is in no journal, so it moves no reader's place, and a replay does not have it.

A response has OpenAI's own `keepalive`, with the sequence number of the last event: whoever goes on
after it misses nothing. Before the first event OpenAI's SDKs take `response.created` and nothing
else, so it is that one, once; it comes again with the answer. Chats and completions have a chunk
that adds nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from serve_app.contract import CHATS, COMPLETIONS, RESPONSES, State
from serve_app.ingress.objects import unanswered_response
from serve_app.journal.events import COMMENT
from serve_app.journal.facts import RequestFacts


def sign_of_life(
    path: str, request_id: str, facts: RequestFacts | None, last_event: int, begun: bool
) -> bytes:
    """An event for a stream of this endpoint, after a comment by which this project's own clients
    know it; of another endpoint, the comment alone.

    Args:
        facts: of the request; None if they are not known.
        last_event: number of the last event that the client has; 0 if it has none.
        begun: whether it has an event, or a sign of life that stands for the first one.
    """
    if facts is None:
        return COMMENT
    if path == RESPONSES:
        place = max(0, last_event - 1)
        if begun:
            return COMMENT + _event({"type": "keepalive", "sequence_number": place})
        response = msgspec.Raw(unanswered_response(request_id, facts, None, State.QUEUED))
        created = {"type": "response.created", "sequence_number": 0, "response": response}
        return COMMENT + _event(created)
    made = {"created": facts.admitted_ms // 1000, "model": facts.model}
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


def _event(fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), msgspec.json.encode(fields))
