"""The same look for all commands: Typer's help and usage errors, and one red line for a failure."""

from __future__ import annotations

from typing import NoReturn

import typer


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
