"""The requests of a run as bytes ready for the socket, equal for equal seeds."""

import json
import random
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from .sse import Endpoint

_WORDS = (
    "the river carries a letter from every harbour while seven clocks argue about rain and "
    "bread copper lanterns remember quiet engines under green mountains where nobody counts"
)
_WORD_LIST = _WORDS.split()


@dataclass(frozen=True)
class Shape:
    """What every request of a run looks like, but for its words."""

    endpoint: Endpoint
    model: str
    max_tokens: int
    prompt_chars: int
    stream: bool = True
    ignore_eos: bool = True
    sessions: int = 0


class RequestMaker:
    """Makes one HTTP/1.1 request after another for one server."""

    def __init__(self, url: str, api_key: str, shape: Shape, seed: int) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self.shape = shape
        self._seed = seed
        self._rng = random.Random(seed)
        self._head = (
            f"POST {parts.path.rstrip('/')}/{shape.endpoint} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"content-type: application/json\r\nauthorization: Bearer {api_key}\r\n"
        ).encode()

    def next(self, max_tokens: int = 0) -> bytes:
        """The bytes of the next request: header and body; ``max_tokens`` for this one only."""
        session = self._rng.randrange(self.shape.sessions) if self.shape.sessions else None
        shape = replace(self.shape, max_tokens=max_tokens) if max_tokens else self.shape
        body = json.dumps(_body(shape, self._prompt(session)), separators=(",", ":")).encode()
        session_line = (
            f"x-session-id: bench-{self._seed}-{session}\r\n" if session is not None else ""
        )
        return self._head + f"{session_line}content-length: {len(body)}\r\n\r\n".encode() + body

    def _prompt(self, session: int | None) -> str:
        """Words of the wanted length; a session's turns share their first half, as conversations
        do.
        """
        length = self.shape.prompt_chars
        if session is None:
            return words(self._rng, length)
        shared = words(random.Random(f"{self._seed}/{session}"), length // 2)
        return shared + words(self._rng, length - len(shared))


def words(rng: random.Random, length_chars: int) -> str:
    """Exactly ``length_chars`` characters of words (at least one)."""
    text = " ".join(rng.choices(_WORD_LIST, k=length_chars // 3 + 1))
    return text[: max(1, length_chars)]


def _body(shape: Shape, prompt: str) -> dict[str, object]:
    body: dict[str, object] = {"model": shape.model, "temperature": 0, "stream": shape.stream}
    if shape.endpoint == "responses":
        return body | {"input": prompt, "max_output_tokens": shape.max_tokens, "store": False}
    if shape.endpoint == "completions":
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    body["max_tokens"] = shape.max_tokens
    if shape.stream:
        body["stream_options"] = {"include_usage": True}
    if shape.ignore_eos:
        # vLLM's own extension: every request then has one length, on every system.
        body["ignore_eos"] = True
    return body
