"""What all commands share: Typer, the service that they mean unless they are told, one red line for
a failure, and text for a terminal: tables, times and what others have written, without control
characters.
"""

from __future__ import annotations

import datetime
import os
import sys
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.core import TyperGroup

from serve_app.errors import HermesError
from serve_app.local.preflight import STATE_DIR

if TYPE_CHECKING:
    from serve_app.local.service import Service

USUAL = "http://127.0.0.1:8000"
DASHBOARD = "http://127.0.0.1:8265"
KEY_HELP = "The API key is read from $HERMES_API_KEY, or $OPENAI_API_KEY."
Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="HERMES_URL",
        metavar="URL",
        show_default=False,
        help="address of the service (default: that of a running `hermes-serve up`, otherwise "
        f"{USUAL})",
    ),
]


class CommandFailed(Exception):
    """The command failed; the message is one line for the caller."""


def new_app(
    help_text: str = "", cls: type[TyperGroup] = TyperGroup, add_completion: bool = False
) -> typer.Typer:
    """Create the commands. Tracebacks show no variables, which may hold passwords."""
    return typer.Typer(
        cls=cls,
        help=help_text or None,
        add_completion=add_completion,
        no_args_is_help=True,
        rich_markup_mode=None,  # rich's Markdown takes 0.1 s to import
        pretty_exceptions_enable=False,
    )


def fail(message: str) -> NoReturn:
    """End the command with one message on standard error and exit status 1."""
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(1)


@contextmanager
def one_sentence(command: str) -> Iterator[None]:
    """End the command with one line if it fails, and silently if nobody reads its output."""
    try:
        yield
    except (CommandFailed, HermesError) as error:
        fail(f"{command}: {error}")
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def running_service() -> Service | None:
    """The service in the usual folder; None if there is none, or it does not run."""
    if not STATE_DIR.exists():
        return None
    from serve_app.local.service import Service  # takes longer than the rest

    try:
        service = Service.load(STATE_DIR)
    except RuntimeError as error:
        raise CommandFailed(str(error)) from None
    return service if service is not None and service.running else None


def redis_url() -> str:
    """HERMES_REDIS_URL, otherwise that of the running service; empty if there is none."""
    service = None if os.environ.get("HERMES_REDIS_URL") else running_service()
    return service.redis_url if service else os.environ.get("HERMES_REDIS_URL", "")


_KEPT = "\n\t\u200c\u200d"
"""Lines, tabs, and what joins letters and emoji."""


def printable(text: str) -> str:
    """Replace everything that would control a terminal, because the text comes from a client."""
    return "".join(
        one if one.isprintable() or one in _KEPT or unicodedata.category(one) == "Zs" else "?"
        for one in text
    )


def in_one_line(text: str) -> str:
    return " ".join(printable(text).split())


def columns(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Rows of the same length as a table; the columns in `numbers` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in numbers else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def when(unix_s: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A time in UTC."""
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime(form)


def age(seconds: float) -> str:
    """A duration in its largest unit, such as `5m`; a negative one, of another clock, is `0s`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"
