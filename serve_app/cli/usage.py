"""The command `usage`: what requests have used, as a table, CSV or lines of JSON."""

from __future__ import annotations

import csv
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from serve_app.cli.console import KEY_HELP, Url, columns, in_one_line, new_app, one_sentence, when
from serve_app.cli.service_api import ServiceApi
from serve_app.contract import FINAL, State

GROUPS = {
    "model": "model",
    "class": "class",
    "api_key": "api_key_id",
    "tenant": "project_id",
    "batch": "batch",
}
"""What usage can be grouped by, and the API's name for it."""
_COUNTS = {
    "requests": "num_model_requests",
    "input_tokens": "input_tokens",
    "cached_tokens": "input_cached_tokens",
    "output_tokens": "output_tokens",
    "reasoning_tokens": "output_reasoning_tokens",
    "recomputed_tokens": "recomputed_tokens",
    "attempts": "attempts",
    "queued_ms": "queued_ms",
    "running_ms": "running_ms",
}
_SHOWN = (*(name for name in _COUNTS if not name.endswith("_ms")), State.FAILED)
"""Columns of the table, which must fit a terminal."""


class By(StrEnum):
    HOUR = "hour"
    DAY = "day"


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


_WIDTHS = {By.HOUR: ("1h", 168, "%Y-%m-%d %H:%M"), By.DAY: ("1d", 31, "%Y-%m-%d")}
"""The API's name of a period, the most of them on a page, and how its beginning is shown."""

app = new_app()


def moment(text: str) -> int | None:
    """Unix seconds of an ISO date or time, which is in UTC unless it says otherwise, or of digits;
    None for an empty text.
    """
    if not text:
        return None
    try:
        if text.isascii() and text.isdecimal() and len(text) != len("YYYYMMDD"):
            return int(text)
        found = datetime.datetime.fromisoformat(text)
        return int(found.replace(tzinfo=found.tzinfo or datetime.UTC).timestamp())
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"'{in_one_line(text)}' is neither an ISO date, such as 2026-01-31, nor Unix seconds"
        ) from None


def groups(text: str) -> list[str]:
    """The names in a list with commas."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in set(names) - GROUPS.keys():
        said = f"'{in_one_line(name)}' is none of {', '.join(GROUPS)}"
        raise typer.BadParameter(said, param_hint="--group-by")
    return names


@app.command("usage", help=f"Show what requests have used, by day or hour (UTC).\n\n{KEY_HELP}")
def usage(
    url: Url = "",
    begin: Annotated[
        str,
        typer.Option("--from", metavar="WHEN", help="ISO date or Unix seconds (usual: a day ago)"),
    ] = "",
    end: Annotated[
        str, typer.Option("--to", metavar="WHEN", help="the same; up to then, and not including it")
    ] = "",
    by: Annotated[By, typer.Option(help="length of a period")] = By.DAY,
    group_by: Annotated[
        str, typer.Option(metavar="NAMES", help=f"with commas between: {', '.join(GROUPS)}")
    ] = "",
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="of all tenants, for those in auth.admin_tenants")
    ] = False,
    form: Annotated[Format, typer.Option("--format", help="how to print")] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="the same as --format jsonl")] = False,
) -> None:
    """Show what requests have used."""
    form = Format.JSONL if as_json else form
    start_s, end_s, names = moment(begin), moment(end), groups(group_by)
    if start_s is not None and end_s is not None and start_s >= end_s:
        raise typer.BadParameter("--from must be before --to")
    path = "/v1/organization/usage/completions" if all_tenants else "/v1/usage"
    width, most, _ = _WIDTHS[by]
    asked = {"start_time": start_s, "end_time": end_s, "bucket_width": width, "limit": most}
    with one_sentence("usage"), ServiceApi(url) as api:
        write(records(api, path, asked, names), names, by, form)


def records(
    api: ServiceApi, path: str, asked: dict[str, Any], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A flat record for each group of each period, page after page."""
    asked = {**asked, "group_by": [GROUPS[name] for name in names]}
    page: str | None = ""
    while page is not None:
        found = api.ask("GET", path, **asked, page=page)
        for period in found.get("data", []):
            for result in period.get("results", []):
                yield record(period, result, names)
        page = found.get("next_page")


def record(period: dict[str, Any], result: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Times are Unix seconds, durations milliseconds; states count requests."""
    states = result.get("states") or {}
    return {
        "start_time": period.get("start_time", 0),
        "end_time": period.get("end_time", 0),
        **{name: result.get(GROUPS[name]) for name in names},
        **{name: result.get(theirs, 0) for name, theirs in _COUNTS.items()},
        **{state: states.get(state, 0) for state in FINAL},
    }


def write(found: Iterator[dict[str, Any]], names: Sequence[str], by: By, form: Format) -> None:
    """Print records; CSV and lines of JSON as they come."""
    if form is Format.TABLE:
        print(table(list(found), names, by))
    elif form is Format.JSONL:
        for one in found:
            print(json.dumps(one), flush=True)
    else:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(record({}, {}, names))
        for one in found:
            writer.writerow("" if cell is None else in_one_line(str(cell)) for cell in one.values())


def table(found: Sequence[dict[str, Any]], names: Sequence[str], by: By) -> str:
    """A row for each record, and their sums."""
    if not found:
        return "no usage"
    headings = ("from (UTC)", *names, *(name.removesuffix("_tokens") for name in _SHOWN))
    rows = [headings]
    for one in found:
        whose = ("-" if one[name] is None else in_one_line(str(one[name])) for name in names)
        begins = when(one["start_time"], _WIDTHS[by][2])
        rows.append((begins, *whose, *(f"{one[name]:,}" for name in _SHOWN)))
    sums = (f"{sum(one[name] for one in found):,}" for name in _SHOWN)
    rows.append(("total", *("" for _ in names), *sums))
    return columns(rows, range(1 + len(names), len(headings)))
