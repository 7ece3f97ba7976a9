"""The commands `dead-letters list`, `show`, `redrive` and `drop`, for requests that were given up,
over the service's HTTP API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from serve_app.cli.console import (
    KEY_HELP,
    Url,
    columns,
    in_one_line,
    new_app,
    one_sentence,
    printable,
)
from serve_app.cli.service_api import ServiceApi, chosen, path_of

PATH = "/v1/organization/dead_letters"
_HEADINGS = ("when (UTC)", "request", "reason", "attempts", "class", "tenant", "bytes")
_SHOWN = ("when", "id", "reason", "attempts", "request_class", "tenant", "bytes")
RequestIds = Annotated[list[str] | None, typer.Argument(metavar="ID", help="ids of the requests")]
All = Annotated[bool, typer.Option("--all", help="all of them")]
_each = partial(chosen, "dead-letters", PATH, "dead letter", "requests")

app = new_app(
    "Show the requests that were given up (dead letters), send them again, or delete them.\n\n"
    "A request is given up after `queue.max_engine_deaths` engines that ran it have died. The "
    "last `queue.dead_letters` of them are kept completely. A service with API keys wants one of "
    f"a tenant in `auth.admin_tenants`. {KEY_HELP}\n\n"
    "Prompts are not shown, unless you ask for one with show --text."
)


@app.command("list")
def list_letters(
    url: Url = "",
    as_json: Annotated[bool, typer.Option("--json", help="print a line of JSON for each")] = False,
) -> None:
    """Show a table of all of them, oldest first."""
    with one_sentence("dead-letters"), ServiceApi(url) as api:
        found = api.ask("GET", PATH)
        if as_json:
            for letter in found["data"]:
                print(json.dumps(letter))
        else:
            print(_table(found["data"]), *_unreadable(found["unreadable"]), sep="\n")


@app.command("show")
def show_letter(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="id of the request")],
    url: Url = "",
    text: Annotated[bool, typer.Option("--text", help="show the body")] = False,
) -> None:
    """Show one of them as JSON."""
    with one_sentence("dead-letters"), ServiceApi(url) as api:
        found = api.ask("GET", path_of(request_id, PATH), text=text)
        print(printable(json.dumps(found, indent=2, ensure_ascii=False)))


@app.command("redrive")
def redrive_letters(request_ids: RequestIds = None, every: All = False, url: Url = "") -> None:
    """Send them again, as new requests.

    Admits each request again as a new one, with the same body, class and time to its deadline, and
    deletes the letter. Prints the old ID and the new one; GET /v1/requests/{id}/events with the new
    ID returns the answer. A request that killed engines may kill them again: redrive after the
    cause is fixed, and one first.
    """
    with _each(request_ids, every, url) as (api, ids):
        for name in ids:
            new = api.ask("POST", f"{path_of(name, PATH)}/redrive")
            print(f"{name} → {new['request_id']}", flush=True)


@app.command("drop")
def drop_letters(request_ids: RequestIds = None, every: All = False, url: Url = "") -> None:
    """Delete them, with their bodies."""
    with _each(request_ids, every, url) as (api, ids):
        for name in ids:
            api.ask("DELETE", path_of(name, PATH))
            print(f"{name} deleted", flush=True)


def _table(letters: Sequence[Mapping[str, Any]]) -> str:
    if not letters:
        return "no dead letters"
    rows = [_HEADINGS]
    for letter in letters:
        its = {**letter, **letter["facts"]}
        rows.append(tuple(in_one_line(str(its[name])) for name in _SHOWN))  # type: ignore[arg-type]
    return columns(rows, (_HEADINGS.index("attempts"), _HEADINGS.index("bytes")))


def _unreadable(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Entries that nobody could decode: where they were found, and their fields."""
    if entries:
        yield f"\n{len(entries)} that nobody could read:"
    for one in entries:
        fields = " ".join(f"{name}={value}" for name, value in one["fields"].items())
        yield in_one_line(f"{one['when']}  {one['source']}  {fields}")
