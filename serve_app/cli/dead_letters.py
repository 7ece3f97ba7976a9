"""The commands `dead-letters list`, `show` and `redrive`, for requests that were given up."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import typer
from pydantic import ValidationError

from serve_app.cli import letters_text
from serve_app.cli.console import CommandFailed, new_app, one_sentence
from serve_app.cli.redriving import redrive
from serve_app.cli.texts import printable
from serve_app.redis.link import RedisLink
from serve_app.request_queue.dead_letters import DeadLetter, DeadLetters
from serve_app.settings import RedisSettings, Settings

Action = Callable[[Settings, RedisLink, DeadLetters], Awaitable[None]]
RedisUrl = Annotated[
    str,
    typer.Option(
        metavar="URL",
        show_default=False,
        help="the service's Redis (default: $HERMES_REDIS_URL, otherwise that of a running "
        "quickstart, otherwise the one in cluster/local_cpu.yaml)",
    ),
]
Namespace = Annotated[str, typer.Option(help="namespace of the service in Redis")]

app = new_app(
    "Show the requests that were given up (dead letters), and send them again.\n\n"
    "A request is given up after it has killed `queue.poison_after` engines that worked on it. The "
    "last `queue.dead_letters` of them are kept completely. The commands need only Redis; the "
    "service need not run.\n\n"
    "Prompts are not shown, unless you ask for them with --text."
)


@app.command("list")
def list_letters(
    redis_url: RedisUrl = "",
    namespace: Namespace = "hermes",
    text: Annotated[
        bool, typer.Option("--text", help="show the beginning of the last user message")
    ] = False,
) -> None:
    """Show a table of all of them, oldest first."""

    async def show(_settings: Settings, _link: RedisLink, dead: DeadLetters) -> None:
        print(letters_text.table(await dead.read(), text))
        if unreadable := await dead.unreadable():
            print("\n" + letters_text.raw(unreadable, text))

    _do(show, redis_url, namespace)


@app.command("show")
def show_letter(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="id of the request")],
    redis_url: RedisUrl = "",
    namespace: Namespace = "hermes",
    text: Annotated[bool, typer.Option("--text", help="show the body")] = False,
) -> None:
    """Show one of them as JSON."""

    async def show(_settings: Settings, _link: RedisLink, dead: DeadLetters) -> None:
        (letter,) = _wanted(await dead.read(), [request_id])
        described = letters_text.described(letter, text)
        print(printable(json.dumps(described, indent=2, ensure_ascii=False)))

    _do(show, redis_url, namespace)


@app.command("redrive")
def redrive_letters(
    request_ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="ids of the requests")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="send all of them again")] = False,
    redis_url: RedisUrl = "",
    namespace: Namespace = "hermes",
) -> None:
    """Send them again, as new requests.

    Admits each request again as a new one, with the same body, class and time to its deadline, and
    deletes the letter. Prints the old ID and the new one; GET /v1/requests/{id}/events with the new
    ID returns the answer. A request that killed engines may kill them again: redrive after the
    cause is fixed, and one first.
    """
    if bool(request_ids) == every:
        raise typer.BadParameter("name the requests by ID, or all of them with --all")

    async def send(settings: Settings, link: RedisLink, dead: DeadLetters) -> None:
        letters = await dead.read()
        for letter in letters if every else _wanted(letters, request_ids or []):
            new = await redrive(settings, link, dead, letter)
            print(f"{letter.request_id} → {new}", flush=True)

    _do(send, redis_url, namespace)


def _do(action: Action, redis_url: str, namespace: str) -> None:
    """Run a command on the service's Redis; print a failure as one line on standard error."""
    with one_sentence("dead-letters"):
        asyncio.run(_connected(action, _settings(redis_url, namespace)))


def _settings(redis_url: str, namespace: str) -> Settings:
    url = redis_url or os.environ.get("HERMES_REDIS_URL") or RedisSettings().url
    try:
        return Settings(namespace=namespace, redis=RedisSettings(url=url))
    except ValidationError as error:
        # Its own message would show the URL, which may hold a password.
        problem = error.errors()[0]
        name = "the namespace" if "namespace" in problem["loc"] else "the URL of Redis"
        raise CommandFailed(f"{name}: {problem['msg'].removeprefix('Value error, ')}") from None


async def _connected(action: Action, settings: Settings) -> None:
    link = RedisLink(settings.redis)
    try:
        await action(
            settings, link, DeadLetters(link, settings.namespace, settings.queue.dead_letters)
        )
    except ValueError as error:
        # redis-py's error for a malformed port; it shows only the port.
        raise CommandFailed(f"the URL of Redis: {error}") from None
    finally:
        await link.close()


def _wanted(letters: Sequence[DeadLetter], ids: Sequence[str]) -> list[DeadLetter]:
    """The letters of these requests, each once.

    Raises:
        CommandFailed: one of them does not exist; nothing should be done to the others then.
    """
    known = {letter.request_id: letter for letter in letters}
    unknown = [request_id for request_id in ids if request_id not in known]
    if unknown:
        raise CommandFailed(f"no dead letter has the id {printable(', '.join(unknown))}")
    return [known[request_id] for request_id in dict.fromkeys(ids)]
