"""The text of an answer, from its events in any of OpenAI's formats. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


class AnswerText:
    """Gives the text of the first choice as it comes, and that of the others at the end, because
    the events of several choices alternate.
    """

    def __init__(self) -> None:
        self.failure = ""
        """Why the answer failed, in the service's words."""
        self.empty = True
        """Whether there was no text so far."""
        self._others: defaultdict[int, list[str]] = defaultdict(list)

    def feed(self, name: str, data: str) -> str:
        """The new text of an event of this name."""
        try:
            found = json.loads(data)
        except ValueError:
            return ""  # a comment, or [DONE]
        error = found if name == "error" else _get(found, "error")
        if isinstance(error, dict):
            self.failure = str(error.get("message") or "the answer failed")
            return ""
        texts = list(_whole(found) if name == "response" else _delta(found))
        if name == "response" and not texts:  # embeddings, tokens, …
            texts = [(0, json.dumps(found, indent=2))]
        self.empty = self.empty and not any(text for _, text in texts)
        for index, text in texts:
            if index:
                self._others[index].append(text)
        return "".join(text for index, text in texts if not index)

    def rest(self) -> str:
        """The texts of the other choices, each behind its number."""
        return "".join(
            f"\n\n[{index}] {''.join(parts)}" for index, parts in sorted(self._others.items())
        )


def _delta(found: Any) -> Iterator[tuple[int, str]]:
    if _get(found, "type") == "response.output_text.delta":
        yield 0, str(_get(found, "delta"))
    for choice in _list(found, "choices"):
        yield _index(choice), _text(_get(choice, "delta")) or _text(choice)


def _whole(found: Any) -> Iterator[tuple[int, str]]:
    for choice in _list(found, "choices"):
        yield _index(choice), _text(_get(choice, "message")) or _text(choice)
    for item in _list(found, "output"):
        for part in _list(item, "content"):
            yield 0, _text(part)


def _text(part: Any) -> str:
    found = _get(part, "content") or _get(part, "text")
    return found if isinstance(found, str) else ""


def _index(choice: Any) -> int:
    found = _get(choice, "index")
    return found if isinstance(found, int) else 0


def _list(value: Any, name: str) -> list[Any]:
    found = _get(value, name)
    return found if isinstance(found, list) else []


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
