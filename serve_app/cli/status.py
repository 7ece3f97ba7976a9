"""The command `status`: whether the service is ready, its replicas and its queues."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from serve_app.cli.console import KEY_HELP, Url, age, columns, in_one_line, new_app, one_sentence
from serve_app.cli.service_api import ServiceApi

_SAMPLE = re.compile(r'^hermes_queue_(\w+)\{class="([^"]+)"\} (\S+)$', re.MULTILINE)
_SHOWN = {"depth": "waiting", "oldest_age_seconds": "oldest_s"}
"""Gauges of `/metrics` that have another name here."""
_REPLICAS = ("workers", "ingresses")
_HELP = (
    "Show whether the service is ready, its replicas and its queues.\n\n"
    f"The exit status is 1 if it is not ready. {KEY_HELP} The queues are those of /metrics, for "
    "which a service with API keys wants a key of its own (`hermes-serve api-key --metrics`)."
)

app = new_app()


@app.command("status", help=_HELP)
def status(
    url: Url = "",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show whether the service is ready, its replicas and its queues."""
    with one_sentence("status"), ServiceApi(url) as api:
        found = {"url": api.url, **api.readiness(), "queues": queues(api.metrics())}
        print(json.dumps(found, indent=2) if as_json else described(found))
        if not found["ready"]:
            raise typer.Exit(1)


def queues(page: str | None) -> dict[str, dict[str, float]] | None:
    """The queue of each class, in requests and seconds; None without a page of metrics."""
    if page is None:
        return None
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for gauge, request_class, value in _SAMPLE.findall(page):
        found[request_class][_SHOWN.get(gauge, gauge)] = float(value)
    return found


def described(found: Mapping[str, Any]) -> str:
    """Lines of a name and a value, and a table of the queues."""
    rows = [
        ("service", found["url"]),
        ("state", "ready" if found["ready"] else f"not ready: {found.get('problem')}"),
        *(("warning", warning) for warning in found.get("warnings") or ()),
        *((name, f"{found.get(name)} of {found.get(f'{name}_wanted')}") for name in _REPLICAS),
    ]
    if found["queues"] is None:
        rows.append(("queues", "unknown: this API key does not open /metrics"))
    shown = columns([(name, in_one_line(str(value))) for name, value in rows])
    if not found["queues"]:
        return shown
    table = [("class", "waiting", "limit", "claimed", "oldest waits")]
    for name, queue in found["queues"].items():
        waiting, limit, claimed = (f"{queue.get(one, 0):,.0f}" for one in table[0][1:4])
        table.append((in_one_line(name), waiting, limit, claimed, age(queue.get("oldest_s", 0))))
    return f"{shown}\n\n{columns(table, range(1, 5))}"
