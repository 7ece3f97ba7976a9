"""Look at the requests that were given up (dead letters), and send them again.

A request is given up when it has ended `queue.poison_after` engines that worked on it. It is kept whole, the last
`queue.dead_letters` of them. This works on Redis alone; the service need not run.

Prompts are not shown, unless you ask for them with --text.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from scripts.local.service import Service
from serve_app.errors import HermesError, JournalUnavailable
from serve_app.journal.client import connect_redis
from serve_app.journal.connection import RedisLink
from serve_app.journal.store import JournalStore
from serve_app.request_queue.dead_letters import DeadLetter, DeadLetters, Unreadable
from serve_app.request_queue.queue import RequestQueue
from serve_app.settings import RedisSettings, Settings

ROOT = Path(__file__).resolve().parents[1]
_QUICKSTART = ROOT / ".hermes" / "quickstart"
_TEXT_CHARACTERS = 60
_HEADINGS = ("when (UTC)", "request", "reason", "attempts", "class", "tenant", "bytes")


class CommandFailed(Exception):
    """The command cannot be done; the message is one line for the caller."""


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--redis-url", metavar="URL",
        help="the service's Redis (default: $HERMES_REDIS_URL, else the running quickstart's, else the one of "
        "cluster/local_cpu.yaml)",
    )  # fmt: skip
    common.add_argument("--namespace", default="hermes", help="of the service (default: %(default)s)")
    parser = argparse.ArgumentParser(
        prog="scripts/dead-letters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|show|redrive")
    listing = commands.add_parser("list", parents=[common], help="a table of all of them, oldest first")
    listing.add_argument("--text", action="store_true", help="with the beginning of the last user message")
    showing = commands.add_parser("show", parents=[common], help="one of them as JSON")
    showing.add_argument("id", metavar="ID", help="of the request")
    showing.add_argument("--text", action="store_true", help="with its body")
    sending = commands.add_parser(
        "redrive", parents=[common], help="send them again, as new requests",
        description="Admits each request again as a new one, with the same body, class and time to its deadline, and "
        "removes the letter. Prints the old id and the new one, under which GET /v1/requests/{id}/events has the "
        "answer. What ended engines before may end them again: redrive when the cause is gone, one first.",
    )  # fmt: skip
    which = sending.add_mutually_exclusive_group(required=True)
    which.add_argument("ids", nargs="*", default=[], metavar="ID", help="of the request")
    which.add_argument("--all", action="store_true", help="all of them")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    """The command; returns its exit status: 0, or 1 with one line on standard error."""
    options = arguments(given)
    try:
        asyncio.run(_run(options, _settings(options)))
    except (CommandFailed, HermesError) as error:
        print(f"dead-letters: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    try:
        redis = RedisSettings(url=options.redis_url or _default_url())
        return Settings(namespace=options.namespace, redis=redis)
    except ValidationError as error:  # its own message would show the URL, which may hold a password
        problem = error.errors()[0]
        name = "the namespace" if "namespace" in problem["loc"] else "the URL of Redis"
        raise CommandFailed(f"{name}: {problem['msg'].removeprefix('Value error, ')}") from None


def _default_url() -> str:
    running = Service.load(_QUICKSTART)
    of_quickstart = running.redis_url if running is not None and running.running else ""
    return os.environ.get("HERMES_REDIS_URL") or of_quickstart or RedisSettings().url


async def _run(options: argparse.Namespace, settings: Settings) -> None:
    link = RedisLink(settings.redis)
    dead = DeadLetters(link, settings.namespace, settings.queue.dead_letters)
    try:
        letters = await dead.read()
        if options.command == "list":
            print(_table(letters, options.text))
            if unreadable := await dead.unreadable():
                print("\n" + _raw(unreadable, options.text))
        elif options.command == "show":
            (letter,) = _wanted(letters, [options.id])
            print(_printable(json.dumps(_described(letter, options.text), indent=2, ensure_ascii=False)))
        else:
            for letter in letters if options.all else _wanted(letters, options.ids):
                print(f"{letter.request_id} → {await _redrive(settings, link, dead, letter)}", flush=True)
    except ValueError as error:  # redis-py's, of a port that is no number; it shows nothing but the port
        raise CommandFailed(f"the URL of Redis: {error}") from None
    finally:
        await link.close()


def _wanted(letters: Sequence[DeadLetter], ids: Sequence[str]) -> list[DeadLetter]:
    """The letters of these requests, each once.

    Raises:
        CommandFailed: one of them is not there; then nothing should be done to the others either.
    """
    known = {letter.request_id: letter for letter in letters}
    unknown = [request_id for request_id in ids if request_id not in known]
    if unknown:
        raise CommandFailed(f"no dead letter has the id {_printable(', '.join(unknown))}")
    return [known[request_id] for request_id in dict.fromkeys(ids)]


async def _redrive(settings: Settings, link: RedisLink, dead: DeadLetters, letter: DeadLetter) -> str:
    """Admit the request as a new one, then forget the letter: dying in between leaves a letter, not a loss.

    Returns:
        The new request's id.

    Raises:
        CommandFailed: Redis failed; the message says what is known of the request.
    """
    request_id = f"req_{secrets.token_hex(16)}"
    now_ms = await _redis_ms(link)
    facts = msgspec.structs.replace(
        letter.facts,
        admitted_ms=now_ms,
        deadline_ms=now_ms + letter.facts.deadline_ms - letter.facts.admitted_ms,
        wake="",  # no ingress holds a connection for it
        idempotency="",  # the key stands for the request that failed
    )
    cost = len(letter.body) // 4 + 256  # an estimate, as at the door
    fields = RequestQueue.fields(request_id, facts.tenant, facts.session, facts.deadline_ms, cost)
    async with connect_redis(settings.redis) as redis:  # without a command it does not connect
        queue = RequestQueue(redis, link, settings.namespace, facts.model, consumer="")
        enqueue = (queue.stream(facts.request_class), fields)
    try:
        await JournalStore(settings, link).admit(request_id, letter.line, letter.body, facts, enqueue)
    except JournalUnavailable as error:
        raise CommandFailed(f"{letter.request_id} was perhaps not sent again (as {request_id}): {error}") from None
    try:
        await dead.remove(letter.request_id)
    except JournalUnavailable as error:
        raise CommandFailed(
            f"{letter.request_id} was sent again as {request_id}, but its letter is still there: {error}"
        ) from None
    return request_id


async def _redis_ms(link: RedisLink) -> int:
    """The time by which deadlines are kept."""
    try:
        ((seconds, microseconds),) = await link.call([("TIME",)])
    except JournalUnavailable as error:
        raise CommandFailed(str(error)) from None
    return int(seconds) * 1000 + int(microseconds) // 1000


def _table(letters: Sequence[DeadLetter], with_text: bool) -> str:
    if not letters:
        return "no dead letters"
    rows = [(*_HEADINGS, "text") if with_text else _HEADINGS]
    for letter in letters:
        row = (
            _when(letter), letter.request_id, letter.reason, str(letter.attempts), letter.facts.request_class,
            letter.facts.tenant, str(len(letter.body)),
        )  # fmt: skip
        rows.append((*row, last_user_text(letter.body)[:_TEXT_CHARACTERS]) if with_text else row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = (_HEADINGS.index("attempts"), _HEADINGS.index("bytes"))
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in numbers else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _raw(letters: Sequence[Unreadable], with_text: bool) -> str:
    """What nobody could read: where it stood, and its fields; long ones by their length, unless with text."""
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
        lines.append(_printable(f"{_when(letter)}  {letter.source}  {' '.join(shown)}").replace("\n", "?"))
    return "\n".join(lines)


def _described(letter: DeadLetter, with_body: bool) -> dict[str, Any]:
    """A letter as JSON; a body that is none is shown as text."""
    shown = {
        "id": letter.request_id,
        "when": _when(letter),
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


def _when(letter: DeadLetter | Unreadable) -> str:
    """When it was given up, by Redis's clock."""
    seconds = int(letter.entry_id.partition("-")[0]) / 1000
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"


def last_user_text(body: bytes) -> str:
    """The last thing that a user says in a request of any of OpenAI's shapes, on one line; empty if there is none."""
    try:
        request = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(request, dict):
        return ""
    said = request.get("messages") or request.get("input") or request.get("prompt") or ""
    if isinstance(said, list):
        of_users = [item for item in said if not isinstance(item, dict) or item.get("role", "user") == "user"]
        said = of_users[-1] if of_users else ""
    if isinstance(said, dict):
        said = said.get("content") or ""
    if isinstance(said, list):
        said = " ".join(str(part["text"]) for part in said if isinstance(part, dict) and "text" in part)
    return _printable(" ".join(str(said).split()))


def _printable(text: str) -> str:
    """Without what would steer a terminal: the text is a stranger's."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
