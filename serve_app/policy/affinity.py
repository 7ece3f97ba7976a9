"""The affinity key of a request: requests with the same key should reach the replica that holds
their KV cache. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_KEY_CHARS = 256
_HEAD_CHARS = 16_384
"""Characters used of each text: enough to distinguish conversations, few enough to hash quickly."""


def session_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """`x-session-id`, else OpenAI's `prompt_cache_key`, else a hash of the conversation's head.
    The head (system prompt and first user message; for a completion, its first 1,024 characters)
    does not change over the turns of a conversation. The key is empty if there is nothing to hash.
    """
    explicit = headers.get("x-session-id") or body.get("prompt_cache_key")
    if isinstance(explicit, str) and explicit:
        return explicit[:MAX_KEY_CHARS]
    head = _stable_head(body)
    return "h:" + hashlib.blake2b(head, digest_size=12).hexdigest() if head else ""


def _stable_head(body: Mapping[str, Any]) -> bytes:
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list):
        head = []
        for message in messages:
            head.append(_shortened(message))
            if not isinstance(message, dict) or message.get("role") == "user":
                break
        return msgspec.json.encode([_shortened(body.get("instructions")), head])
    text = body.get("prompt", messages)
    if isinstance(text, list):
        text = text[0] if text and isinstance(text[0], str | list) else text
    if isinstance(text, str | list):
        return msgspec.json.encode([_shortened(body.get("instructions")), _shortened(text[:1024])])
    return b""


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_HEAD_CHARS]
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return value
