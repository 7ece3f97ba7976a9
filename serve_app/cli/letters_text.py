"""Dead letters as text: a table, JSON, and entries that could not be decoded. Without prompts
unless requested.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from serve_app.cli import texts
from serve_app.cli.texts import columns, printable
from serve_app.request_queue.dead_letters import DeadLetter, Unreadable

_TEXT_CHARACTERS = 60
_HEADINGS = ("when (UTC)", "request", "reason", "attempts", "class", "tenant", "bytes")


def table(letters: Sequence[DeadLetter], with_text: bool) -> str:
    """One row per letter; with `text`, also the beginning of the last user message."""
    if not letters:
        return "no dead letters"
    rows = [(*_HEADINGS, "text") if with_text else _HEADINGS]
    for letter in letters:
        row = (
            when(letter),
            letter.request_id,
            letter.reason,
            str(letter.attempts),
            letter.facts.request_class,
            letter.facts.tenant,
            str(len(letter.body)),
        )
        rows.append((*row, last_user_text(letter.body)[:_TEXT_CHARACTERS]) if with_text else row)
    return columns(rows, (_HEADINGS.index("attempts"), _HEADINGS.index("bytes")))


def raw(letters: Sequence[Unreadable], with_text: bool) -> str:
    """Entries that could not be decoded: where they were found, and their fields. Long fields are
    shown by their length, unless with text.
    """
    lines = [f"{len(letters)} that nobody could read:"]
    for letter in letters:
        shown = [
            f"{name.decode(errors='replace')}="
            + (
                value.decode(errors="replace")
                if with_text or len(value) <= _TEXT_CHARACTERS
                else f"<{len(value)} bytes>"
            )
            for name, value in letter.fields.items()
        ]
        lines.append(
            printable(f"{when(letter)}  {letter.source}  {' '.join(shown)}").replace("\n", "?")
        )
    return "\n".join(lines)


def described(letter: DeadLetter, with_body: bool) -> dict[str, Any]:
    """A letter as JSON; a body that is not JSON is shown as text."""
    shown = {
        "id": letter.request_id,
        "when": when(letter),
        "reason": letter.reason,
        "attempts": letter.attempts,
        "line": msgspec.to_builtins(letter.line),
        "facts": msgspec.to_builtins(letter.facts),
        "bytes": len(letter.body),
    }
    if with_body:
        try:
            shown["body"] = json.loads(letter.body)
        except ValueError:
            shown["body"] = letter.body.decode(errors="replace")
    return shown


def when(letter: DeadLetter | Unreadable) -> str:
    """When the request was given up, by Redis's clock."""
    return texts.when(int(letter.entry_id.partition("-")[0]) / 1000)


def last_user_text(body: bytes) -> str:
    """The user's last message, in a request of any of OpenAI's formats, on one line; empty if there
    is none.
    """
    try:
        request = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(request, dict):
        return ""
    said = request.get("messages") or request.get("input") or request.get("prompt") or ""
    if isinstance(said, list):
        of_users = [
            item
            for item in said
            if not isinstance(item, dict) or item.get("role", "user") == "user"
        ]
        said = of_users[-1] if of_users else ""
    if isinstance(said, dict):
        said = said.get("content") or ""
    if isinstance(said, list):
        said = " ".join(
            str(part["text"]) for part in said if isinstance(part, dict) and "text" in part
        )
    return printable(" ".join(str(said).split()))
