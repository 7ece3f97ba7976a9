"""The commands `dead-letters list`, `show` and `redrive`, for requests that were given up."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import msgspec
import typer
from pydantic import ValidationError

from serve_app.admission.transaction import accept
from serve_app.cli import defaults
from serve_app.cli.console import CommandFailed, columns, new_app, one_sentence, printable, when
from serve_app.errors import RedisUnavailable
from serve_app.journal.store import JournalStore
from serve_app.policy.work import work_of
from serve_app.redis.link import RedisLink
from serve_app.request_queue.dead_letters import DeadLetter, DeadLetters, Unreadable
from serve_app.request_queue.queue import RequestQueue
from serve_app.settings import RedisSettings, Settings

Action = Callable[[Settings, RedisLink, DeadLetters], Awaitable[None]]
RedisUrl = Annotated[
    str,
    typer.Option(
        metavar="URL",
        show_default=False,
        help="the service's Redis (default: $HERMES_REDIS_URL, otherwise that of a running "
        "`hermes-serve up`, otherwise the default of redis.url)",
    ),
]
Namespace = Annotated[str, typer.Option(help="namespace of the service in Redis")]

app = new_app(
    "Show the requests that were given up (dead letters), and send them again.\n\n"
    "A request is given up after `queue.max_engine_deaths` engines that ran it have died. The "
    "last `queue.dead_letters` of them are kept completely. The commands need only Redis; the "
    "service need not run.\n\n"
    "Prompts are not shown, unless you ask for one with show --text."
)


@app.command("list")
def list_letters(
    redis_url: RedisUrl = "",
    namespace: Namespace = "hermes",
    as_json: Annotated[bool, typer.Option("--json", help="print a line of JSON for each")] = False,
) -> None:
    """Show a table of all of them, oldest first."""

    async def show(_settings: Settings, _link: RedisLink, dead: DeadLetters) -> None:
        letters = await dead.read()
        if as_json:
            for letter in letters:
                print(json.dumps(_described(letter, with_body=False)))
            return
        print(_table(letters))
        if unreadable := await dead.unreadable():
            print("\n" + _raw(unreadable))

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
        described = _described(letter, text)
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
    url = redis_url or defaults.redis_url()
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


_SHOWN_BYTES = 60
_HEADINGS = ("when (UTC)", "request", "reason", "attempts", "class", "tenant", "bytes")


def _table(letters: Sequence[DeadLetter]) -> str:
    """One row per letter."""
    if not letters:
        return "no dead letters"
    rows = [
        (
            _when(letter),
            letter.request_id,
            letter.reason,
            str(letter.attempts),
            letter.facts.request_class,
            letter.facts.tenant,
            str(len(letter.body)),
        )
        for letter in letters
    ]
    return columns([_HEADINGS, *rows], (_HEADINGS.index("attempts"), _HEADINGS.index("bytes")))


def _raw(letters: Sequence[Unreadable]) -> str:
    """Entries that could not be decoded: where they were found, and their fields. Long fields are
    shown by their length.
    """
    lines = [f"{len(letters)} that nobody could read:"]
    for letter in letters:
        shown = [
            f"{name.decode(errors='replace')}="
            + (
                value.decode(errors="replace")
                if len(value) <= _SHOWN_BYTES
                else f"<{len(value)} bytes>"
            )
            for name, value in letter.fields.items()
        ]
        lines.append(
            printable(f"{_when(letter)}  {letter.source}  {' '.join(shown)}").replace("\n", "?")
        )
    return "\n".join(lines)


def _described(letter: DeadLetter, with_body: bool) -> dict[str, Any]:
    """A letter as JSON; a body that is not JSON is shown as text."""
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
    """When the request was given up, by Redis's clock."""
    return when(int(letter.entry_id.partition("-")[0]) / 1000)


async def redrive(
    settings: Settings, link: RedisLink, dead: DeadLetters, letter: DeadLetter
) -> str:
    """Admit the request as a new one, then delete the letter. Dying in between leaves a letter, and
    loses nothing.

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
        idempotency="",  # the idempotency key belongs to the request that failed
        detached=True,
        retention_s=letter.facts.retention_s or settings.journal.background_retention_s,
    )
    work = work_of(letter.line.path, letter.body, msgspec.json.decode(letter.body))
    queue = RequestQueue(link, settings.namespace, facts.model, dead, consumer="")
    enqueueing = queue.enqueueing(request_id, facts, work)
    first = JournalStore(settings, link).first_entry(request_id, letter.line, letter.body, facts)
    try:
        await accept(link, enqueueing, first)
    except RedisUnavailable as error:
        raise CommandFailed(
            f"{letter.request_id} was perhaps not sent again (as {request_id}): {error}"
        ) from None
    try:
        await dead.remove(letter.request_id)
    except RedisUnavailable as error:
        raise CommandFailed(
            f"{letter.request_id} was sent again as {request_id}, but its letter is still there: "
            f"{error}"
        ) from None
    return request_id


async def _redis_ms(link: RedisLink) -> int:
    try:
        ((seconds, microseconds),) = await link.call([("TIME",)])
    except RedisUnavailable as error:
        raise CommandFailed(str(error)) from None
    return int(seconds) * 1000 + int(microseconds) // 1000
