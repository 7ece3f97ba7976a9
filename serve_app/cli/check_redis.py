"""The command `check-redis`: waits for Redis, or says in one sentence what is wrong with it and
where to look.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, NamedTuple
from urllib.parse import quote

import typer
from pydantic import ValidationError

from serve_app import timings
from serve_app.cli.console import CommandFailed, fail, new_app, redis_url
from serve_app.clock import SYSTEM
from serve_app.errors import SettingsError
from serve_app.redis.check import Check, Finding
from serve_app.settings import RedisSettings
from serve_app.settings.sections import IngressSettings

MAX_BODY_BYTES = IngressSettings().max_body_bytes

app = new_app()


class Found(NamedTuple):
    """What is wrong with a login, as a sentence, or else what its operator should know."""

    name: str
    problem: str = ""
    warnings: tuple[str, ...] = ()


Tell = Callable[[str], object]


def told(line: str) -> None:
    print(line, flush=True)


def _silent(_: str) -> None:
    """Print nothing."""


@app.command("check-redis")
def check_redis(
    namespace: Annotated[str, typer.Option(help="namespace of the service in Redis")] = "hermes",
    service: Annotated[
        str, typer.Option(help="its name: a namespace of another one's is not to be used")
    ] = "",
    ca_file: Annotated[
        str, typer.Option(help="for rediss://: CA certificates to trust instead of the system's")
    ] = "",
    wait_s: Annotated[float, typer.Option(help="how long to wait for what may pass")] = 60.0,
    max_body_bytes: Annotated[
        int, typer.Option(help="ingress.max_body_bytes of the service: Redis has to take so much")
    ] = MAX_BODY_BYTES,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON when it is over")] = False,
) -> None:
    """Wait until Redis can be used; if it cannot, say why in one sentence.

    Checks the service's Redis ($HERMES_REDIS_URL, otherwise that of a running `hermes-serve up`)
    and, if $HERMES_GCS_REDIS is set as for `cluster/ray-start`, the login of Ray's GCS. What may
    pass (a name that is not known yet, a Redis that starts or loads) is tried again; a wrong
    password is not.
    """
    # The first process of a container ignores every signal that it does not handle, so Kubernetes
    # would wait for the whole grace period when it ends a pod that waits here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    tell = _silent if as_json else told
    until_s = SYSTEM.monotonic_s() + wait_s
    try:
        settings = settings_of("HERMES_REDIS_URL", redis_url() or RedisSettings().url, ca_file)
        logins = {"Redis": Check(settings, namespace, max_body_bytes, service)}
        if url := _url_of_gcs():
            settings = settings_of("HERMES_GCS_REDIS", url, ca_file)
            logins["Redis, for Ray's GCS"] = Check(settings, None, max_body_bytes)
        found: list[Found] = []
        for name, check in logins.items():  # up to the first that cannot be used
            found.append(asyncio.run(_wait_for(name, check, until_s, tell)))
            if found[-1].problem:
                break
    except (SettingsError, CommandFailed) as error:
        fail(str(error))
    if as_json:
        print(json.dumps([one._asdict() for one in found], indent=2))
    if problem := found[-1].problem:
        fail(problem)


def state_of(
    name: str, url: str, namespace: str, service: str = "", ca_file: str = "", tell: Tell = _silent
) -> Found:
    """What one Redis of the service is like now; `name`: where the URL stands, for the message."""
    try:
        check = Check(settings_of(name, url, ca_file), namespace, MAX_BODY_BYTES, service)
    except SettingsError as error:
        return Found("Redis", str(error))
    return asyncio.run(_wait_for("Redis", check, SYSTEM.monotonic_s(), tell))


def _url_of_gcs() -> str:
    """The login of Ray's GCS as a URL; empty if there is none."""
    address = os.environ.get("HERMES_GCS_REDIS", "")
    scheme, slashes, host = address.rpartition("://")
    user = os.environ.get("HERMES_GCS_REDIS_USER") or "ray"
    password = os.environ.get("HERMES_GCS_REDIS_PASSWORD") or ""
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if password else ""
    return address and f"{scheme or 'redis'}{slashes or '://'}{login}{host}/0"


def settings_of(variable: str, url: str, ca_file: str) -> RedisSettings:
    try:
        return RedisSettings(url=url, ca_file=ca_file)
    except ValidationError as error:  # its own message would show the URL with the password
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{variable} {problem}") from None


async def _wait_for(name: str, check: Check, until_s: float, tell: Tell) -> Found:
    said = ""
    while isinstance(found := await check.run(), Finding):
        sentence = f"{name}: {found}."
        if not found.step.passes or SYSTEM.monotonic_s() >= until_s:
            return Found(name, sentence)
        if sentence != said:
            said = sentence
            tell(f"waiting: {sentence}")
        await asyncio.sleep(timings.REDIS_CHECK_RETRY_S)
    for warning in found:
        tell(f"{name}: warning: {warning}")
    tell(f"{name}: usable")
    return Found(name, warnings=found)
