"""API keys: who may send requests, for which tenant, and what its policy permits. Only hashes are
stored, and the keys file may change at any time (`keys_file.py` has its form).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.cluster.leases import KeyNotices
from serve_app.contract import Reason
from serve_app.errors import RequestRefused, SettingsError
from serve_app.ingress.keys_file import MAX_FILE_BYTES, KeyFacts, Policy, key_id_of, parse
from serve_app.policy.classes import CLASSES
from serve_app.policy.tenants import Role, Tenant
from serve_app.settings import DEFAULT_TENANT, AuthSettings

log = logging.getLogger("hermes.ingress")

_NOT_PERMITTED = {
    Role.INFERENCE: "This API key is not for requests: its roles are {roles}.",
    Role.METRICS: "The metrics cover all tenants and need a key of their own: ask the operator for "
    "one (hermes-serve api-key --metrics).",
}


class ApiKeys:
    """The API keys of one ingress. `SettingsError`: the file cannot be read, or has a mistake.

    Args:
        now_s: Unix seconds, by which keys expire.
        weights: of tenants, by the settings. `weights` of this object is kept up to date with those
            of the file, which go first.
        notices: where it is told which keys were revoked, and tells which were used.
    """

    def __init__(
        self,
        settings: AuthSettings,
        now_s: Callable[[], float] = SYSTEM.unix_s,
        weights: Mapping[str, float] | None = None,
        notices: KeyNotices | None = None,
    ) -> None:
        self._notices = notices or KeyNotices("")
        self._now_s = now_s
        self._settings = settings
        self._usual_weights = weights or {}
        self.weights = dict(self._usual_weights)
        self._everybody = self._granted(Tenant(DEFAULT_TENANT))
        self._keys: Mapping[bytes, KeyFacts] = {}
        self._tenants: Mapping[str, Tenant] = {}
        self._version: tuple[int, ...] = ()
        self._mistake = ""
        if settings.required and (policy := self._changed()) is not None:
            self._apply(policy)

    @property
    def valid(self) -> bool:
        """Whether the file that is there now counts, and not one that was there before."""
        return not self._mistake

    def tenant(
        self,
        authorization: str,
        role: Role | None = Role.INFERENCE,
        named: str | None = None,
    ) -> Tenant:
        """Whose key the `Authorization` header contains.

        Args:
            role: what it must be permitted for; None: whoever answers checks that.
            named: the tenant whose request it is instead, if the key is a gateway's.

        Raises:
            RequestRefused: `invalid_api_key`, `key_not_permitted`.
        """
        if not self._settings.required:
            return self._everybody
        found = self._whose(authorization)
        if named is not None and Role.GATEWAY in found.roles:
            found = self._named(named, found)
        if role is not None and role not in found.roles:
            message = _NOT_PERMITTED[role].format(roles=", ".join(found.roles))
            raise RequestRefused(Reason.KEY_NOT_PERMITTED, message)
        return found

    def known(self, tenant: str) -> Tenant | None:
        """A tenant as its policy is now, without a key; None if there is no such tenant."""
        if not self._settings.required:
            return self._everybody
        return self._tenants.get(tenant)

    def _whose(self, authorization: str) -> Tenant:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise RequestRefused(
                Reason.INVALID_API_KEY,
                "You didn't provide an API key; send it as 'Authorization: Bearer <key>' or "
                "'x-api-key: <key>'.",
            )
        # The time of a lookup tells of digests, and nobody can choose a key for a digest.
        digest = hashlib.sha256(key.strip().encode()).digest()
        facts = self._keys.get(digest)
        if facts is None:
            raise RequestRefused(Reason.INVALID_API_KEY, "Incorrect API key provided.")
        if self._notices.is_revoked(digest):
            raise RequestRefused(Reason.INVALID_API_KEY, "This API key was revoked.")
        if 0 < facts.expires_s <= self._now_s():
            raise RequestRefused(Reason.INVALID_API_KEY, "This API key has expired.")
        tenant, key_id = self._tenants[facts.tenant], key_id_of(digest)
        self._notices.used(key_id, self._now_s())
        roles = (*facts.roles, Role.ADMIN) if tenant.admin else facts.roles
        return tenant._replace(key_id=key_id, roles=roles)

    def _named(self, name: str, gateway: Tenant) -> Tenant:
        if name not in self._tenants:
            message = (
                f"The policy has no tenant '{name[:64]}' (header {self._settings.tenant_header})."
            )
            raise RequestRefused(Reason.KEY_NOT_PERMITTED, message)
        roles = (Role.INFERENCE, Role.GATEWAY)
        return self._tenants[name]._replace(key_id=gateway.key_id, roles=roles)

    def _granted(self, tenant: Tenant) -> Tenant:
        """With what the settings permit it."""
        settings = self._settings
        admin = not settings.required or tenant.id in settings.admin_tenants
        return tenant._replace(
            classes=CLASSES if tenant.id in settings.critical_tenants else tenant.classes,
            roles=(*tenant.roles, Role.ADMIN) if admin else tenant.roles,
            weight=self.weights.get(tenant.id, 1.0),
        )

    async def watch(self) -> None:
        """Read the file again whenever it has changed. A mistake in it changes nothing."""
        while True:
            await asyncio.sleep(timings.KEYS_FILE_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Look once whether the file has changed."""
        try:
            # A large policy takes seconds.
            policy = await asyncio.to_thread(self._changed)
        except SettingsError as error:
            if str(error) != self._mistake:
                log.error("cannot reload API keys, keeping the old ones: %s", error)
            self._mistake = str(error)
        else:
            if policy is not None:
                self._apply(policy)

    def _apply(self, policy: Policy) -> None:
        self.weights.clear()
        self.weights.update({**self._usual_weights, **policy.weights})
        self._keys = policy.keys
        self._tenants = {name: self._granted(one) for name, one in policy.tenants.items()}
        self._mistake = ""
        log.info("API keys read: keys=%d tenants=%d", len(self._keys), len(self._tenants))

    def _changed(self) -> Policy | None:
        """What the file says; None if it is as it was."""
        path = Path(self._settings.keys_file)
        try:
            found = path.stat()
            version = found.st_mtime_ns, found.st_size, found.st_ino
            if version == self._version:
                return None
            self._version = version
            if found.st_size > MAX_FILE_BYTES:
                raise SettingsError(
                    f"settings: auth.keys_file: '{path}' is larger than {MAX_FILE_BYTES >> 20} MiB"
                )
            return parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "It is no text"
            if isinstance(error, OSError):
                self._version = ()  # the same file counts again once it can be read
            raise SettingsError(
                f"settings: auth.keys_file (or HERMES_KEYS_FILE) '{path}' cannot be read: {why}: "
                "give it lines that hermes-serve api-key prints, on every node with an ingress"
            ) from None
