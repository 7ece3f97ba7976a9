"""What commands work on unless they are told: the service that `hermes-serve up` runs."""

from __future__ import annotations

import os

from serve_app.cli.console import CommandFailed
from serve_app.local.preflight import STATE_DIR
from serve_app.local.service import Service


def running_service() -> Service | None:
    """The service in the usual folder; None if there is none, or it does not run.

    Raises:
        CommandFailed: the folder's file is damaged.
    """
    try:
        service = Service.load(STATE_DIR)
    except RuntimeError as error:
        raise CommandFailed(str(error)) from None
    return service if service is not None and service.running else None


def service_url() -> str:
    """The URL of the running service, or "". HERMES_URL goes before it: it is an option's."""
    service = running_service()
    return service.url if service is not None else ""


def redis_url() -> str:
    """HERMES_REDIS_URL, otherwise that of the running service, otherwise the setting's default."""
    if url := os.environ.get("HERMES_REDIS_URL", ""):
        return url
    if service := running_service():
        return service.redis_url
    from serve_app.settings import RedisSettings  # takes longer than the rest

    return RedisSettings().url
