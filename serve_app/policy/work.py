"""What a request asks for, as far as it shows before it is computed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_MOST_TOKENS = 2**31 - 1
_FIRST_GUESS_TOKENS = 256
_MOST_OF_OTHERS = 1
"""What a request may write whose kind writes no tokens: the engine makes one step for it. (0 would
mean that there is no limit.)
"""
_MEDIA = ("image_url", "video_url", "audio_url", "input_audio", "source")
"""The fields of a message's part that hold one, as a `data:` URL or as base64."""
_MEDIA_TOKENS = 1_000
"""About what a model reads for a picture, however many bytes it has."""
_MEDIA_BYTES = 16 << 10
"""A shorter text there is an address or a name."""
_STREAMED_TOKEN_BYTES, _TOKEN_BYTES, _EMBEDDING_BYTES = 330, 75, 32 << 10
_WRITING = (
    *("chat/completions ", "completions ", "responses ", "responses/compact "),
    "messages ",
)
_PROMPTS = {"/v1/completions": "prompt", "/v1/embeddings": "input"}
"""Where the requests of a path may have several prompts."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Work(NamedTuple):
    """An estimate of the tokens that a request reads, and the most that each of its sequences may
    write.
    """

    prompt_tokens: int
    max_output_tokens: int = 0
    """0 if the client gave no limit."""
    kind: str = ""
    """Endpoint, whether it is streamed, and about how many turns the conversation has had: requests
    of the same kind have similar lengths.
    """
    sequences: int = 1
    """How many sequences an engine runs for it at a time."""

    @property
    def cost_tokens(self) -> int:
        """The most tokens that it reads and writes; without a limit, a guess."""
        each = self.max_output_tokens or _FIRST_GUESS_TOKENS
        return self.prompt_tokens + self.sequences * each


def output_bytes(kind: str, max_output_tokens: int, sequences: int) -> int:
    """The memory of Redis that an answer may take while it is written (docs/redis.md). Without a
    limit, its length is a guess.
    """
    if not writes_tokens(kind):
        return sequences * _EMBEDDING_BYTES
    each_bytes = _STREAMED_TOKEN_BYTES if " s" in kind else _TOKEN_BYTES
    return sequences * each_bytes * (max_output_tokens or _FIRST_GUESS_TOKENS)


def work_of(path: str, body: bytes, request: Mapping[str, Any], longest: int = 0) -> Work:
    """The work of a request: one prompt token per four bytes of the body, except for pictures and
    other media, whose bytes are no text. `longest`: what an engine's context has; 0: not known.
    """
    kind, prompt_tokens = _kind(path, request), len(body) // 4
    if len(body) > _MEDIA_BYTES:
        for size in _media_sizes(body, request.get("messages", request.get("input"))):
            prompt_tokens += _MEDIA_TOKENS - size // 4
    most_tokens = _limit(request) if writes_tokens(kind) else _MOST_OF_OTHERS
    most_tokens = min(most_tokens, longest or most_tokens)
    return Work(max(0, prompt_tokens), most_tokens, kind, sequences(path, request))


def sequences(path: str, request: Mapping[str, Any]) -> int:
    """How many answers an engine writes at a time, or how many texts it embeds."""
    count = request.get("n")
    each = max(1, count) if isinstance(count, int) else 1
    return each * prompts_in(request.get(_PROMPTS.get(path, "")))


def prompts_in(value: Any) -> int:
    """Each text or list of token ids is one prompt; a flat list of token ids is one."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return len(value)
    return 1


def _limit(request: Mapping[str, Any]) -> int:
    """The tokens that the client allows; 0 if it gave no limit."""
    for name in _LIMITS:
        limit = request.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool):
            return min(max(limit, 1), _MOST_TOKENS)
    return 0


def _media_sizes(body: bytes, messages: Any) -> Iterator[int]:
    """The bytes of each. Of a long text, `messages` have only the beginning, so its end is searched
    for in the body: base64 contains no quotation mark.
    """
    begin = end = 0
    for text in _media(messages):
        if begin >= 0:  # after one that is written with escapes, no other search of all the body
            begin = body.find(b'"' + text[:64].encode(errors="replace"), end)
            end = max(begin, body.find(b'"', begin + 1))
        yield end - begin if begin >= 0 else len(text)


def _media(messages: Any) -> Iterator[str]:
    """The pictures, recordings and files in the messages of a chat, as their long base64 texts."""
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            for name in _MEDIA if isinstance(part, dict) else ():
                value = part.get(name)
                for text in value.values() if isinstance(value, dict) else (value,):
                    if isinstance(text, str) and len(text) > _MEDIA_BYTES:
                        yield text


def _kind(path: str, request: Mapping[str, Any]) -> str:
    messages = request.get("messages", request.get("input"))
    turns = len(messages).bit_length() if isinstance(messages, list) else 0
    streamed = "s" if request.get("stream") is True else "w"
    return f"{path.removeprefix('/v1/')[:32]} {streamed}{turns}"


def writes_tokens(kind: str) -> bool:
    """Whether requests of this kind write tokens; embeddings, whose answers are large, do not."""
    return kind.startswith(_WRITING)
