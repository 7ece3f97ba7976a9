"""The commands `dead-letters` and `webhooks`, over the service's HTTP API: requests that were given
up, and events that no receiver took. Both are listed, sent again and deleted in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import typer

from serve_app.cli.console import (
    KEY_HELP,
    CommandFailed,
    Url,
    columns,
    in_one_line,
    new_app,
    one_sentence,
    printable,
)
from serve_app.cli.service_api import ServiceApi, path_of

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="their ids")]
All = Annotated[bool, typer.Option("--all", help="all of them")]
AsJson = Annotated[bool, typer.Option("--json", help="print a line of JSON for each")]


class Kind(NamedTuple):
    """What is dead."""

    command: str
    path: str
    name: str
    """Of one of them."""
    by: str
    """Whose ids they have."""
    headings: Sequence[str]
    fields: Sequence[str]
    """The columns of the table."""


LETTERS = Kind(
    "dead-letters",
    "/v1/organization/dead_letters",
    "dead letter",
    "requests",
    ("when (UTC)", "request", "reason", "attempts", "class", "tenant", "bytes"),
    ("when", "id", "reason", "attempts", "request_class", "tenant", "bytes"),
)
EVENTS = Kind(
    "webhooks",
    "/v1/organization/webhooks/dead",
    "dead event",
    "events",
    ("when (UTC)", "id", "reason", "event", "of", "receiver", "tenant"),
    ("when", "id", "reason", "event", "subject", "receiver", "tenant"),
)
_NUMBERS = ("attempts", "bytes")


def _commands(kind: Kind, about: str, redrives: str) -> typer.Typer:
    """`list`, `redrive` and `drop` for one kind, with these help texts."""
    app = new_app(about)

    @app.command("list")
    def show_all(url: Url = "", as_json: AsJson = False) -> None:
        """Show a table of all of them, oldest first."""
        with one_sentence(kind.command), ServiceApi(url) as api:
            found = api.ask("GET", kind.path)
            if as_json:
                for one in found["data"]:
                    print(json.dumps(one))
            else:
                unreadable = _unreadable(found.get("unreadable", ()))
                print(_table(kind, found["data"]), *unreadable, sep="\n")

    @app.command("redrive", help=redrives)
    def redrive(ids: Ids = None, every: All = False, url: Url = "") -> None:
        with _chosen(kind, ids, every, url) as (api, names):
            for name in names:
                new = api.ask("POST", f"{path_of(name, kind.path)}/redrive")
                to = f"→ {new['request_id']}" if "request_id" in new else "is sent again"
                print(name, to, flush=True)

    @app.command("drop")
    def drop(ids: Ids = None, every: All = False, url: Url = "") -> None:
        """Delete them."""
        with _chosen(kind, ids, every, url) as (api, names):
            for name in names:
                api.ask("DELETE", path_of(name, kind.path))
                print(f"{name} deleted", flush=True)

    return app


@contextmanager
def _chosen(
    kind: Kind, ids: Sequence[str] | None, every: bool, url: str
) -> Iterator[tuple[ServiceApi, Sequence[str]]]:
    """The service, and the ids that are meant. If one does not exist, nothing is done."""
    if bool(ids) == every:
        raise typer.BadParameter(f"name the {kind.by} by ID, or all of them with --all")
    with one_sentence(kind.command), ServiceApi(url) as api:
        known = [one["id"] for one in api.ask("GET", kind.path)["data"]]
        if unknown := [name for name in ids or () if name not in known]:
            raise CommandFailed(f"no {kind.name} has the id {in_one_line(', '.join(unknown))}")
        yield api, list(dict.fromkeys(ids or known))


def _table(kind: Kind, found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return f"no {kind.name}s"
    rows = [kind.headings]
    for one in found:
        its = {**one, **one.get("facts", {})}
        rows.append([in_one_line(str(its[name])) for name in kind.fields])
    return columns(rows, [kind.fields.index(name) for name in _NUMBERS if name in kind.fields])


def _unreadable(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Entries that nobody could decode: where they were found, and their fields."""
    if entries:
        yield f"\n{len(entries)} that nobody could read:"
    for one in entries:
        fields = " ".join(f"{name}={value}" for name, value in one["fields"].items())
        yield in_one_line(f"{one['when']}  {one['source']}  {fields}")


letters = _commands(
    LETTERS,
    "Show the requests that were given up (dead letters), send them again, or delete them.\n\n"
    "A request is given up after `queue.max_engine_deaths` engines that ran it have died. The "
    "last `queue.dead_letters` of them are kept completely. A service with API keys wants one of "
    f"a tenant in `auth.admin_tenants`. {KEY_HELP}\n\n"
    "Prompts are not shown, unless you ask for one with show --text.",
    "Send them again, as new requests.\n\n"
    "Admits each request again as a new one, with the same body, class and time to its deadline, "
    "and deletes the letter. Prints the old ID and the new one; GET /v1/requests/{id}/events with "
    "the new ID returns the answer. A request that killed engines may kill them again: redrive "
    "after the cause is fixed, and one first.",
)
events = _commands(
    EVENTS,
    "Show the events (webhooks) that no receiver took, send them again, or delete them.\n\n"
    "An event is dead once it was tried for `webhooks.give_up_after_s`, if its receiver has "
    "answered 410, or if too many wait. The last `webhooks.dead` are kept. A service with API keys "
    f"wants one of a tenant in `auth.admin_tenants`. {KEY_HELP}",
    "Send them again, with the same ids of events, as if they had just happened.",
)


@letters.command("show")
def show_letter(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="id of the request")],
    url: Url = "",
    text: Annotated[bool, typer.Option("--text", help="show the body")] = False,
) -> None:
    """Show one of them as JSON."""
    with one_sentence(LETTERS.command), ServiceApi(url) as api:
        found = api.ask("GET", path_of(request_id, LETTERS.path), text=text)
        print(printable(json.dumps(found, indent=2, ensure_ascii=False)))
