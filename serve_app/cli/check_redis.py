"""The command `check-redis`: waits for Redis, or says in one sentence what is wrong with it and
where to look.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote

from pydantic import ValidationError

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.errors import SettingsError
from serve_app.redis.check import Check, Finding
from serve_app.settings import RedisSettings
from serve_app.settings.ingress import IngressSettings

HELP = (
    "Wait until Redis can be used; if it cannot, say why in one sentence.\n\n"
    "Checks the service's Redis ($HERMES_REDIS_URL) and, if $HERMES_GCS_REDIS is set as for "
    "`cluster/ray-start`, the login of Ray's GCS. What may pass (a name that is not known yet, a "
    "Redis that starts or loads) is tried again; a wrong password is not."
)


MAX_BODY_BYTES = IngressSettings().max_body_bytes


class Login(NamedTuple):
    """One login to check. `name` begins the sentence; `namespace` is None for Ray's GCS; `service`
    may be empty.
    """

    name: str
    settings: RedisSettings
    namespace: str | None
    service: str = ""
    max_body_bytes: int = MAX_BODY_BYTES


def wait_for_redis(
    namespace: str, service: str, ca_file: str, wait_s: float, max_body_bytes: int
) -> str:
    """Check every login, one after another, and print what is being waited for.

    Args:
        max_body_bytes: of a request, which Redis has to take.

    Returns:
        The sentence that says what is wrong; empty if nothing is.
    """
    # The first process of a container ignores every signal that it does not handle, so Kubernetes
    # would wait for the whole grace period when it ends a pod that waits here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        logins = _logins(namespace, service, ca_file, max_body_bytes)
    except SettingsError as error:
        return str(error)
    return asyncio.run(_wait_for_all(logins, SYSTEM.monotonic_s() + wait_s))


def problem_with(name: str, url: str, namespace: str, service: str, ca_file: str) -> str:
    """Check one Redis of the service, and wait for nothing.

    Args:
        name: where the URL stands, for the message.

    Returns:
        The sentence that says what is wrong; empty if nothing is.
    """
    try:
        login = Login("Redis", _settings(name, url, ca_file), namespace, service)
    except SettingsError as error:
        return str(error)
    return asyncio.run(_wait_for(login, SYSTEM.monotonic_s()))


def _logins(namespace: str, service: str, ca_file: str, max_body_bytes: int) -> list[Login]:
    url = os.environ.get("HERMES_REDIS_URL") or RedisSettings().url
    settings = _settings("HERMES_REDIS_URL", url, ca_file)
    found = [Login("Redis", settings, namespace, service, max_body_bytes)]
    if address := os.environ.get("HERMES_GCS_REDIS"):
        scheme, slashes, host = address.rpartition("://")
        user = os.environ.get("HERMES_GCS_REDIS_USER") or "ray"
        password = os.environ.get("HERMES_GCS_REDIS_PASSWORD") or ""
        login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if password else ""
        url = f"{scheme or 'redis'}{slashes or '://'}{login}{host}/0"
        settings = _settings("HERMES_GCS_REDIS", url, ca_file)
        found.append(Login("Redis, for Ray's GCS", settings, None))
    return found


def _settings(variable: str, url: str, ca_file: str) -> RedisSettings:
    try:
        return RedisSettings(url=url, ca_file=ca_file)
    except ValidationError as error:  # its own message would show the URL with the password
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{variable} {problem}") from None


async def _wait_for_all(logins: Sequence[Login], until_s: float) -> str:
    for login in logins:
        if sentence := await _wait_for(login, until_s):
            return sentence
    return ""


async def _wait_for(login: Login, until_s: float) -> str:
    said = ""
    check = Check(login.settings, login.namespace, login.max_body_bytes, login.service)
    while isinstance(found := await check.run(), Finding):
        sentence = f"{login.name}: {found}."
        if not found.step.passes or SYSTEM.monotonic_s() >= until_s:
            return sentence
        if sentence != said:
            said = sentence
            print(f"waiting: {sentence}", flush=True)
        await asyncio.sleep(timings.REDIS_CHECK_RETRY_S)
    check.close()
    for warning in found:
        print(f"{login.name}: warning: {warning}", flush=True)
    print(f"{login.name}: usable", flush=True)
    return ""
