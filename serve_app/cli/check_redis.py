"""The command `check-redis`: waits for Redis, or says in one sentence what is wrong with it and
where to look.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote

from pydantic import ValidationError

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.errors import SettingsError
from serve_app.redis.check import check_gcs, check_service
from serve_app.redis.finding import Finding, Trouble
from serve_app.settings import RedisSettings

HELP = (
    "Wait until Redis can be used; if it cannot, say why in one sentence.\n\n"
    "Checks the service's Redis ($HERMES_REDIS_URL) and, if $HERMES_GCS_REDIS is set as for "
    "`cluster/ray-start`, the login of Ray's GCS. What may pass (a name that is not known yet, a "
    "Redis that starts or loads) is tried again; a wrong password is not."
)


class Where(StrEnum):
    """Who configures the address: it decides which values the sentence names."""

    ENVIRONMENT = "environment"
    CHART = "chart"
    """The chart with its own Redis."""
    CHART_HA = "chart-ha"
    """The chart with three Redis and Sentinel."""
    CHART_EXTERNAL = "chart-external"
    """The chart with a Redis of the operator's."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One login to check. `name` begins the sentence."""

    name: str
    settings: RedisSettings
    of_gcs: bool = False


_ENVIRONMENT = {
    Trouble.NAME: "check the host in HERMES_REDIS_URL or redis.url",
    Trouble.DNS: "check the resolver of this machine",
    Trouble.SILENT: "check host and port in HERMES_REDIS_URL or redis.url, and the firewall",
    Trouble.REFUSED: "check the port in HERMES_REDIS_URL or redis.url, and whether Redis runs and "
    "which addresses it binds",
    Trouble.SENTINEL: "check the name of the primary in HERMES_REDIS_URL or redis.url",
    Trouble.TLS: "check redis:// or rediss:// in HERMES_REDIS_URL or redis.url, and redis.ca_file",
    Trouble.LOGIN: "check user and password in HERMES_REDIS_URL and in Redis's ACL",
    Trouble.PERMISSION: "give it the permissions in cluster/redis.acl",
    Trouble.BUSY: "see Redis's own log",
}
_DNS_POLICY = (
    "the network policy lets pods ask only DNS servers in networkPolicy.dnsNamespaces and in "
    "networkPolicy.dnsCidrs, on networkPolicy.dnsPorts: add the address or the port there if DNS "
    "runs elsewhere"
)
_CHART = _ENVIRONMENT | {
    Trouble.NAME: "its Service is missing, or DNS serves another cluster domain: see "
    "`kubectl get service` and redis.internal.enabled",
    Trouble.DNS: _DNS_POLICY,
    Trouble.SILENT: "see `kubectl get pods` for Redis's pod, and networkPolicy.enabled",
    Trouble.REFUSED: "Redis's pod is not running: see it with `kubectl get pods` and `kubectl "
    "describe pod` (redis.internal.persistence if it is Pending)",
    Trouble.LOGIN: "Redis was started with other passwords than the entries "
    "redis.internal.passwordKey and redis.internal.rayPasswordKey now have in the Secret "
    "redis.internal.existingSecret: restart Redis's pod after a change",
    Trouble.PERMISSION: "settings.namespace differs from that with which Redis was started",
    Trouble.BUSY: "see the log of Redis's pod",
}
_HA_RELEASE = "the release redis.ha.name (the chart redis-ha with helm/redis-ha.yaml)"
_CHART_HA = _ENVIRONMENT | {
    Trouble.NAME: f"install {_HA_RELEASE}, or check that name and redis.ha.replicas",
    Trouble.DNS: _DNS_POLICY,
    Trouble.SILENT: f"see `kubectl get pods` for {_HA_RELEASE}, and its networkPolicy",
    Trouble.REFUSED: f"see `kubectl get pods` for {_HA_RELEASE}",
    Trouble.SENTINEL: "check redis.ha.primary against redis.masterGroupName in helm/redis-ha.yaml, "
    "and redis.ha.sentinelPasswordKey",
    Trouble.LOGIN: "Redis was started with other passwords than the entries redis.ha.passwordKey "
    "and redis.ha.rayPasswordKey now have in the Secret redis.ha.existingSecret: restart its pods "
    "after a change",
    Trouble.PERMISSION: "settings.namespace differs from HERMES_NAMESPACE in helm/redis-ha.yaml",
}
_CHART_EXTERNAL = _ENVIRONMENT | {
    Trouble.NAME: "check the host in the Secret redis.external.existingSecret, entry "
    "redis.external.urlKey, and redis.external.gcsAddress",
    Trouble.DNS: _DNS_POLICY,
    Trouble.SILENT: "the network policy allows only redis.external.cidrs and redis.external.ports: "
    "check both, and the firewall of Redis",
    Trouble.REFUSED: "check the port in the Secret redis.external.existingSecret and in "
    "redis.external.gcsAddress",
    Trouble.SENTINEL: "check the name of the primary in the Secret redis.external.existingSecret",
    Trouble.TLS: "check redis:// or rediss:// in the Secret redis.external.existingSecret and in "
    "redis.external.gcsAddress, and redis.external.caKey",
    Trouble.LOGIN: "check user and password in the Secret redis.external.existingSecret "
    "(redis.external.urlKey, redis.external.gcsUsernameKey, redis.external.gcsPasswordKey)",
}
_HINTS = {
    Where.ENVIRONMENT: _ENVIRONMENT,
    Where.CHART: _CHART,
    Where.CHART_HA: _CHART_HA,
    Where.CHART_EXTERNAL: _CHART_EXTERNAL,
}


def check(namespace: str, ca_file: str, wait_s: float, where: Where) -> str:
    """Check every login, one after another, and print what is being waited for.

    Returns:
        The sentence that says what is wrong; empty if nothing is.
    """
    # The first process of a container ignores every signal that it does not handle, so Kubernetes
    # would wait for the whole grace period when it ends a pod that waits here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        logins = _logins(ca_file)
    except SettingsError as error:
        return str(error)
    return asyncio.run(_check_all(logins, namespace, SYSTEM.monotonic_s() + wait_s, _HINTS[where]))


def _logins(ca_file: str) -> list[Checked]:
    url = os.environ.get("HERMES_REDIS_URL") or RedisSettings().url
    found = [Checked("Redis", _settings("HERMES_REDIS_URL", url, ca_file))]
    if address := os.environ.get("HERMES_GCS_REDIS"):
        scheme, slashes, host = address.rpartition("://")
        user = os.environ.get("HERMES_GCS_REDIS_USER") or "ray"
        password = os.environ.get("HERMES_GCS_REDIS_PASSWORD") or ""
        login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if password else ""
        url = f"{scheme or 'redis'}{slashes or '://'}{login}{host}/0"
        found.append(
            Checked("Redis, for Ray's GCS", _settings("HERMES_GCS_REDIS", url, ca_file), True)
        )
    return found


def _settings(variable: str, url: str, ca_file: str) -> RedisSettings:
    try:
        return RedisSettings(url=url, ca_file=ca_file)
    except ValidationError as error:  # its own message would show the URL with the password
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{variable} {problem}") from None


async def _check_all(
    logins: Sequence[Checked], namespace: str, until_s: float, hints: dict[Trouble, str]
) -> str:
    for login in logins:
        if sentence := await _check_one(login, namespace, until_s, hints):
            return sentence
    return ""


async def _check_one(
    login: Checked, namespace: str, until_s: float, hints: dict[Trouble, str]
) -> str:
    said = ""
    while True:
        found = await (
            check_gcs(login.settings) if login.of_gcs else check_service(login.settings, namespace)
        )
        if not isinstance(found, Finding):
            for warning in found.warnings:
                print(f"{login.name}: warning: {warning}", flush=True)
            print(f"{login.name}: usable", flush=True)
            return ""
        sentence = f"{login.name}: {found.what}; {hints[found.trouble]}."
        if not found.trouble.passes or SYSTEM.monotonic_s() >= until_s:
            return sentence
        if sentence != said:
            said = sentence
            print(f"waiting: {sentence}", flush=True)
        await asyncio.sleep(timings.REDIS_CHECK_RETRY_S)
