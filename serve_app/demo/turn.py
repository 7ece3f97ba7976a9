"""The turn of the demo: a strict call of a tool with sixty arguments, read as it streams."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from openai import OpenAI, OpenAIError

_PARTS = (
    "trigger impact service network database rollback customer security capacity follow_up"
).split()
_TEXTS = ("summary", "evidence", "owner", "command")
TEXTS, FIELDS = len(_PARTS) * len(_TEXTS), len(_PARTS) * (len(_TEXTS) + 2)
TOOL = "file_incident_report"
TINY = "hermes-tiny"


def request(model: str, letters: int) -> dict[str, Any]:
    """The body of the turn.

    The tiny model's tokens are bytes, and it would write blanks between them for ever where JSON
    allows it. So its texts are plain letters, and what divides them is forced.

    Args:
        letters: the length of each of the forty texts.
    """
    text: dict[str, Any] = {"type": "string", "pattern": f"^[a-z ]{{{letters}}}$"}
    if model != TINY:
        text = {"type": "string", "minLength": letters // 2, "maxLength": letters}
    fields: dict[str, Any] = dict.fromkeys(_TEXTS, text)
    fields["severity"] = {"enum": ["low", "medium", "high"]}
    fields["minutes"] = {"type": "integer", "minimum": 0, "maximum": 999}
    part = _object(fields)
    parameters = _object({name: {"$ref": "#/$defs/part"} for name in _PARTS})
    function = {
        "name": TOOL,
        "strict": True,
        "parameters": {**parameters, "$defs": {"part": part}},
    }
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "messages": [{"role": "user", "content": "File the report of last night's outage."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": TOOL}},
    }
    if model == TINY:
        body["logit_bias"] = {str(ord(character)): 100 for character in '{":,}'}
    return body


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class Ended(Exception):
    """The answer ended before as many pieces came as were waited for."""


class Turn:
    """One streamed answer, read by one thread and watched by others."""

    def __init__(self, client: OpenAI, body: dict[str, Any]) -> None:
        self._client, self._body = client, body
        self.arguments, self.request_id, self.failure = "", "", ""
        self.tokens, self.pieces = 0, 0
        self.first_s, self._last_s, self._silence_s = 0.0, 0.0, 0.0
        self.has_ended, self._came = False, threading.Condition()

    def read(self, show: Callable[[str], None] = lambda _: None) -> None:
        """Read it to its end. `failure` then says why it broke off, if it did.

        Args:
            show: is given each piece of the arguments.
        """
        try:
            for piece in self._arguments():
                show(piece)
                with self._came:
                    self._note(piece)
                    self._came.notify_all()
        except (OpenAIError, httpx.HTTPError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            with self._came:
                self.has_ended = True
                self._came.notify_all()

    def _arguments(self) -> Iterator[str]:
        stream = self._client.chat.completions.create(
            **self._body, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            self.request_id = chunk.id.removeprefix("chatcmpl-")
            if chunk.usage:
                self.tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or ():
                    if call.function and call.function.arguments:
                        yield call.function.arguments

    def _note(self, piece: str) -> None:
        now_s = time.monotonic()
        self.first_s = self.first_s or now_s
        self._silence_s = max(self._silence_s, now_s - (self._last_s or now_s))
        self._last_s = now_s
        self.arguments += piece
        self.pieces += 1

    def wait_for_more(self, pieces: int) -> float:
        """Wait until so many more pieces have come. Returns the longest silence before any of them.

        Raises:
            Ended: the answer has ended before.
        """
        with self._came:
            wanted, self._silence_s = self.pieces + pieces, 0.0
            self._came.wait_for(lambda: self.pieces >= wanted or self.has_ended)
            if self.pieces < wanted:
                raise Ended
            return self._silence_s

    def since_first_s(self) -> float:
        """How long ago its first piece came."""
        return time.monotonic() - self.first_s

    @property
    def lasted_s(self) -> float:
        """From its first piece to its last."""
        return self._last_s - self.first_s

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are JSON with every field."""
        try:
            parts = json.loads(self.arguments).values()
            return sum(map(len, parts)) == FIELDS
        except (ValueError, AttributeError, TypeError):
            return False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.arguments.encode()).hexdigest()
