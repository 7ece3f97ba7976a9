"""`hermes-serve`: the commands for operators. A command's module is imported when it is called, so
that none waits for the libraries of another.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from serve_app import __version__
from serve_app.cli.console import new_app
from serve_app.demo.arguments import arguments
from serve_app.local import environment

COMMANDS = {
    "status": ("status", "Show whether the service is ready, and its queues."),
    "doctor": ("doctor", "Find what keeps a service from starting or working well."),
    "requests": ("requests", "List requests, show one, read its answer, or cancel it."),
    "attach": ("attach", "Serve a service on this machine, so that no agent loses a stream."),
    "batch": ("batch", "Run a file of requests as a batch; list, show or cancel batches."),
    "usage": ("usage", "Show what requests have used, by day or hour."),
    "deploy": ("deploy_code", "Deploy a Serve config file to a Ray cluster, with the code."),
    "dead-letters": ("dead:letters", "Show the requests that were given up; send them again."),
    "webhooks": ("dead:events", "Show the events that no receiver took; send them again."),
    "api-key": ("api_keys", "Create, list and revoke API keys."),
    "check-redis": ("check_redis", "Wait until Redis can be used, or say why it cannot."),
}
"""The module of each command below `serve_app.cli` (and the name of its `app`, if that is another),
and its line in the list of commands.
"""


class _Lazy(TyperGroup):
    """Has a command of each name for lists and completion, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            module, _, its = COMMANDS[name][0].partition(":")
            loaded = import_module(f"serve_app.cli.{module}")
            command = typer.main.get_command(getattr(loaded, its or "app"))
        return name, command, rest


sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
"""httpx does without its own command line, and so without rich and pygments, which take 0.04 s."""

app = new_app("Operate hermes-serve, an OpenAI-compatible LLM service.", _Lazy, True)
_PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hermes-serve {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """What every command has."""


@app.command("up", context_settings=_PASSED_ON)
def up(context: typer.Context) -> None:
    """Start a service on this machine."""
    environment.go_on_as(sys.executable, "serve_app.local", context.args)


@app.command("down", context_settings=_PASSED_ON)
def down(context: typer.Context) -> None:
    """End what `up` has started."""
    environment.go_on_as(sys.executable, "serve_app.local", ["--down", *context.args])


@app.command("demo", context_settings=_PASSED_ON)
def demo(context: typer.Context) -> None:
    """Show what the service does when its processes die."""
    options = arguments(context.args)  # before anything is installed
    environment.make_any_ready(options.device)
    environment.go_on_as(str(environment.PYTHON), "serve_app.demo", context.args)


for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)


def main() -> None:
    app(prog_name="hermes-serve")


if __name__ == "__main__":
    main()
