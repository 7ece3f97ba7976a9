"""The same look for all commands: Typer's help and usage errors, and one red line for a failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from serve_app.errors import HermesError


class CommandFailed(Exception):
    """The command failed; the message is one line for the caller."""


def new_app(help_text: str = "") -> typer.Typer:
    """Create the commands, without shell completion. Tracebacks show no variables, which may hold
    passwords.
    """
    return typer.Typer(
        help=help_text or None,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode="markdown",
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
