"""Hides credentials in texts that others have written, such as an error of Redis. Whoever reads one
from the settings calls `hide`; every error of Redis and every log line is redacted.
"""

from __future__ import annotations

import json
import re
from urllib.parse import quote

_HIDDEN = "***"
_LONG = 8
"""A shorter secret may be a part of ordinary words, so only a whole word that equals it is hidden.
"""
_QUOTED = re.compile(r", with args beginning with:.*", re.DOTALL)
"""Redis's answer to a command that it does not know quotes what was sent: credentials (cut off
after 128 characters), or a part of a prompt.
"""
_patterns: dict[str, re.Pattern[str]] = {}


def hide(secret: str) -> None:
    """From now on, no redacted text shows this secret, be it as it is, in a URL or in JSON."""
    for form in {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]} - {""}:
        word = re.escape(form)
        _patterns[form] = re.compile(word if len(form) >= _LONG else rf"(?<!\w){word}(?!\w)")


def redacted(answer: str) -> str:
    """An error of Redis without credentials and without the arguments that it quotes."""
    return without_secrets(_QUOTED.sub("", answer))


def without_secrets(text: str) -> str:
    """A text without any credential that this process knows."""
    for form in sorted(_patterns, key=len, reverse=True):
        text = _patterns[form].sub(_HIDDEN, text)
    return text
