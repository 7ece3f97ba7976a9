"""What commands work on unless they are told: the service that `hermes-serve up` runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from serve_app.cli.console import CommandFailed
from serve_app.local.preflight import STATE_DIR

if TYPE_CHECKING:
    from serve_app.local.service import Service

USUAL = "http://127.0.0.1:8000"
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


def running_service() -> Service | None:
    """The service in the usual folder; None if there is none, or it does not run.

    Raises:
        CommandFailed: the folder's file is damaged.
    """
    if not STATE_DIR.exists():
        return None
    from serve_app.local.service import Service  # takes longer than the rest

    try:
        service = Service.load(STATE_DIR)
    except RuntimeError as error:
        raise CommandFailed(str(error)) from None
    return service if service is not None and service.running else None


def service_url() -> str:
    """The URL of the running service, otherwise the usual one. HERMES_URL, which goes before, is
    the option's.
    """
    service = running_service()
    return service.url if service is not None else USUAL


def redis_url() -> str:
    """HERMES_REDIS_URL, otherwise that of the running service, otherwise the setting's default."""
    if url := os.environ.get("HERMES_REDIS_URL", ""):
        return url
    if service := running_service():
        return service.redis_url
    from serve_app.settings import RedisSettings  # the same

    return RedisSettings().url
