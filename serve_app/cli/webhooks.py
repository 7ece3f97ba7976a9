"""The commands `webhooks list`, `redrive` and `drop`, for events that no receiver took, over the
service's HTTP API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
)
from serve_app.cli.service_api import ServiceApi, chosen, path_of

PATH = "/v1/organization/webhooks/dead"
_HEADINGS = ("when (UTC)", "id", "reason", "event", "of", "receiver", "tenant")
_SHOWN = ("when", "id", "reason", "event", "subject", "receiver", "tenant")
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="ids of dead events")]
All = Annotated[bool, typer.Option("--all", help="all of them")]
_each = partial(chosen, "webhooks", PATH, "dead event", "events")

app = new_app(
    "Show the events (webhooks) that no receiver took, send them again, or delete them.\n\n"
    "An event is dead once it was tried for `webhooks.give_up_after_s`, if its receiver has "
    "answered 410, or if too many wait. The last `webhooks.dead` are kept. A service with API keys "
    f"wants one of a tenant in `auth.admin_tenants`. {KEY_HELP}"
)


@app.command("list")
def list_dead(
    url: Url = "",
    as_json: Annotated[bool, typer.Option("--json", help="print a line of JSON for each")] = False,
) -> None:
    """Show a table of all of them, oldest first."""
    with one_sentence("webhooks"), ServiceApi(url) as api:
        found = api.ask("GET", PATH)["data"]
        if as_json:
            for dead in found:
                print(json.dumps(dead))
        else:
            print(_table(found))


@app.command("redrive")
def redrive_dead(ids: Ids = None, every: All = False, url: Url = "") -> None:
    """Send them again, with the same ids of events, as if they had just happened."""
    with _each(ids, every, url) as (api, names):
        for name in names:
            api.ask("POST", f"{path_of(name, PATH)}/redrive")
            print(f"{name} is sent again", flush=True)


@app.command("drop")
def drop_dead(ids: Ids = None, every: All = False, url: Url = "") -> None:
    """Delete them."""
    with _each(ids, every, url) as (api, names):
        for name in names:
            api.ask("DELETE", path_of(name, PATH))
            print(f"{name} deleted", flush=True)


def _table(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return "no dead events"
    rows = [_HEADINGS, *(tuple(in_one_line(str(one[name])) for name in _SHOWN) for one in found)]
    return columns(rows)
