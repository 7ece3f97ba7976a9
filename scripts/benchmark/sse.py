"""Counts tokens in a server-sent event stream, parsing JSON only where an event can decide
something.
"""

import json
from typing import Any, Literal

Endpoint = Literal["chat/completions", "completions", "responses"]

_DELTAS = (b"response.output_text.delta", b"response.reasoning_text.delta")
_TERMINALS = (b"response.completed", b"response.incomplete")
# Which field carries the first tokens of a reasoning model differs between servers.
_TEXT_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls")
_FAILURES = (b'"response.failed"', b'"type":"error"')


class EventCounter:
    """Fed the body of one streamed response in pieces of any size; says how many tokens' events
    each held.

    After the first token an event is only counted, not parsed: the generator shares its cores with
    the server it measures. The true number of tokens comes from the ``usage`` event at the end.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.done = False
        self.error: str | None = None
        self.usage: dict[str, Any] | None = None
        self._rest = b""
        self._seen_token = False
        self._counts = self._counts_response if endpoint == "responses" else self._counts_completion

    def feed(self, piece: bytes) -> int:
        """Take the next bytes of the body; return the number of token events completed by them."""
        if self._rest:
            piece = self._rest + piece
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n")
        end = piece.rfind(b"\n\n")
        if end < 0:
            self._rest = piece
            return 0
        self._rest = piece[end + 2 :]
        tokens = 0
        for event in piece[:end].split(b"\n\n"):
            data = _data_of(event)
            if data and self._counts(data):
                tokens += 1
        return tokens

    def _counts_completion(self, data: bytes) -> bool:
        if data == b"[DONE]":
            self.done = True
            return False
        if data.startswith(b'{"error"'):
            self.error = f"error event: {_message_of(json.loads(data))}"
            return False
        # A quoted "usage" inside generated text is escaped, so this finds only the field itself.
        if self._seen_token and b'"usage"' not in data:
            return True
        event = json.loads(data)
        self.usage = event.get("usage") or self.usage
        self._seen_token = self._seen_token or _made_by_token(event)
        return self._seen_token and bool(event.get("choices"))

    def _counts_response(self, data: bytes) -> bool:
        if any(kind in data for kind in _TERMINALS):
            self.usage = json.loads(data)["response"].get("usage")
            self.done = True
        elif any(kind in data for kind in _FAILURES):
            self.error = f"error event: {_message_of(json.loads(data))}"
        return any(kind in data for kind in _DELTAS)


def _data_of(event: bytes) -> bytes:
    """The payload of an event's ``data:`` line; empty for comments and events without one."""
    start = 0 if event.startswith(b"data:") else event.find(b"\ndata:") + 1
    if not event.startswith(b"data:", start):
        return b""
    end = event.find(b"\n", start)
    return (event[start + 5 :] if end < 0 else event[start + 5 : end]).strip()


def _made_by_token(event: dict[str, Any]) -> bool:
    """Whether a token caused this event: all do but the one that opens a chat with the role alone.

    An empty text counts: the bytes of one character can be spread over several tokens.
    """
    for choice in event.get("choices") or []:
        delta = choice.get("delta")
        if delta is None or "role" not in delta or any(delta.get(field) for field in _TEXT_FIELDS):
            return True
    return False


def _message_of(event: dict[str, Any]) -> str:
    error = event.get("error") or (event.get("response") or {}).get("error") or event
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
