"""Requests for streamed chats, and what comes back, token by token."""

import asyncio
import random
from array import array
from dataclasses import dataclass, field
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from .batchers import Job

_WORDS = (
    "the river carries a letter from every harbour while seven clocks argue about rain and "
    "bread copper lanterns remember quiet engines under green mountains where nobody counts"
).split()
# Which field carries the first tokens of a reasoning model differs between servers.
_TEXT_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls")
_FETCH_TIMEOUT_S = 5.0


class SystemFailed(RuntimeError):
    """A system cannot be measured: it did not start or does not answer; the message says why. It is
    the one error that a user is told without a traceback.
    """


def fetch(url: str, api_key: str = "") -> str:
    """What a GET answers now; empty if that is not a 200."""
    request = Request(url, headers={"authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        # No proxy: what is measured is on this machine, or named by its own address.
        with build_opener(ProxyHandler({})).open(request, timeout=_FETCH_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@dataclass(frozen=True)
class Shape:
    """What every request of a run looks like, but for its words."""

    model: str
    max_tokens: int
    prompt_chars: int


class RequestMaker:
    """Makes one request after another for one server, equal for equal seeds."""

    def __init__(self, url: str, api_key: str, shape: Shape, seed: int) -> None:
        self.url = f"{url.rstrip('/')}/chat/completions"
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
        self.shape = shape
        self._rng = random.Random(seed)

    def next(self, max_tokens: int = 0) -> bytes:
        """The next request's body; ``max_tokens`` for this one only."""
        return msgspec.json.encode(
            {
                "model": self.shape.model,
                "temperature": 0,
                "messages": [{"role": "user", "content": self._words()}],
                "max_tokens": max_tokens or self.shape.max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                # vLLM's own extension: every request then has one length, on every system.
                "ignore_eos": True,
            }
        )

    def _words(self) -> str:
        chars = max(1, self.shape.prompt_chars)
        return " ".join(self._rng.choices(_WORDS, k=chars // 3 + 1))[:chars]


@dataclass
class Exchange:
    """One job and what came of it. Times are those of the endpoint's clock. It is fed the body of
    the response in pieces of any size, and takes the number of tokens from the ``usage`` event at
    the end.
    """

    job: Job
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has its whole answer, or an error."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    events: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    done: bool = False
    error: str | None = None
    _rest: bytes = b""

    def feed(self, piece: bytes, now_s: float) -> None:
        """The next bytes of the body have come."""
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = (line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data := b"".join(lines):
                self._take(data, now_s)

    def _take(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = msgspec.json.decode(data)
        if error := event.get("error"):
            said = error.get("message", error) if isinstance(error, dict) else error
            self.error = f"error event: {str(said)[:200]}"
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        choices = event.get("choices") or ()
        if not choices or (not self.events and not any(map(_is_made_by_token, choices))):
            return
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s
        self.events += 1

    def end(self) -> None:
        self.tokens = self.tokens or self.events
        if not self.done:
            self.error = self.error or "stream ended without its last event"


def _is_made_by_token(choice: dict[str, Any]) -> bool:
    """Whether a token caused this event: all do but the one that opens a chat with the role alone.

    An empty text counts: the bytes of one character can be spread over several tokens.
    """
    delta = choice.get("delta")
    return delta is None or "role" not in delta or any(delta.get(name) for name in _TEXT_FIELDS)
