"""API keys: who may send requests, and for which tenant. Only hashes are stored, and the file may
change at any time.

A line of the file is `<tenant> sha256:<64 hex digits>`; empty lines and anything after `#` are
ignored. A key is 256 random bits (`hermes-serve api-key`), so a plain hash is enough: no dictionary
attack is possible. `@metrics` instead of a tenant marks a key that opens `/metrics` and nothing
else; a tenant's key does not open `/metrics`.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from serve_app import timings
from serve_app.clock import SYSTEM, Clock
from serve_app.contract import Reason
from serve_app.errors import RequestRefused, SettingsError
from serve_app.policy.classes import CLASSES, PUBLIC_CLASSES
from serve_app.policy.tenants import Role, Tenant
from serve_app.settings import DEFAULT_TENANT, AuthSettings

log = logging.getLogger("hermes.ingress")

SCRAPER = "@metrics"
"""Stands for the reader of metrics; the names of tenants contain no `@`."""

_LINE = re.compile(r"(?P<tenant>@metrics|[A-Za-z0-9_.-]{1,64})\s+sha256:(?P<digest>[0-9a-f]{64})")


class ApiKeys:
    """The API keys of one ingress. `SettingsError`: the file cannot be read, or a line of it is
    malformed.
    """

    def __init__(self, settings: AuthSettings, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._settings = settings
        self._tenants: Mapping[bytes, str] = {}
        self._version: tuple[int, ...] = ()
        self._looked_s = self._clock.monotonic_s()
        if settings.required:
            self._read()

    def tenant(self, authorization: str) -> Tenant:
        """Whose key the `Authorization` header contains.

        Raises:
            RequestRefused: `invalid_api_key`, `key_not_permitted`.
        """
        if not self._settings.required:
            return self._tenant(DEFAULT_TENANT)
        found = self._whose(authorization)
        if found.id == SCRAPER:
            raise RequestRefused(Reason.KEY_NOT_PERMITTED, "This API key is for /metrics only.")
        return found

    def check_scraper(self, authorization: str) -> None:
        """As `tenant`, for a key that opens `/metrics`."""
        if self._settings.required and self._whose(authorization).id != SCRAPER:
            raise RequestRefused(
                Reason.KEY_NOT_PERMITTED,
                "The metrics cover all tenants and need a key of their own: ask the operator for "
                "one (hermes-serve api-key --metrics).",
            )

    def _whose(self, authorization: str) -> Tenant:
        self._look()
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise RequestRefused(
                Reason.INVALID_API_KEY,
                "You didn't provide an API key; send it as 'Authorization: Bearer <key>' or "
                "'x-api-key: <key>'.",
            )
        # The time of a lookup tells of digests, and nobody can choose a key for a digest.
        digest = hashlib.sha256(key.strip().encode()).digest()
        tenant = self._tenants.get(digest)
        if tenant is None:
            raise RequestRefused(Reason.INVALID_API_KEY, "Incorrect API key provided.")
        return self._tenant(tenant, f"key_{digest.hex()[:12]}")

    def _tenant(self, name: str, key_id: str = "") -> Tenant:
        settings = self._settings
        classes = CLASSES if name in settings.critical_tenants else PUBLIC_CLASSES
        admin = not settings.required or name in settings.admin_tenants
        roles = (Role.INFERENCE, Role.ADMIN) if admin else (Role.INFERENCE,)
        return Tenant(name, key_id, classes, roles)

    def _look(self) -> None:
        """Read the file again if it has changed; a malformed file changes nothing."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s < timings.KEYS_FILE_LOOK_S:
            return
        self._looked_s = now_s
        try:
            self._read()
        except SettingsError as error:
            log.error("cannot reload API keys, keeping the old ones: %s", error)

    def _read(self) -> None:
        path = Path(self._settings.keys_file)
        try:
            found = path.stat()
            version = found.st_mtime_ns, found.st_size, found.st_ino
            if version != self._version:
                self._version = version
                self._tenants = parse(path.read_text(encoding="utf-8"))
                log.info("API keys read: %d", len(self._tenants))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "It is no text"
            raise SettingsError(
                f"settings: auth.keys_file (or HERMES_KEYS_FILE) '{path}' cannot be read: {why}: "
                "give it lines that hermes-serve api-key prints, on every node with an ingress"
            ) from None


def parse(text: str) -> dict[bytes, str]:
    """The tenant of each key, by the key's SHA-256. `SettingsError`: a line is malformed; the
    message has its number, never its content.
    """
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        # The default tenant is that of all requests if no key is required.
        if match is not None and match["tenant"] != DEFAULT_TENANT:
            tenants[bytes.fromhex(match["digest"])] = match["tenant"]
        elif line:
            raise SettingsError(
                f"settings: auth.keys_file: line {number} is not '<tenant> sha256:<64 hex digits>' "
                "(a tenant is named "
                f"with letters, digits, '_', '.' and '-', and not '{DEFAULT_TENANT}')"
            )
    return tenants
