"""API keys: who may send requests, for which tenant, and what its policy permits. Only hashes are
stored: a key is 256 random bits (`hermes-serve api-key`), so no dictionary attack is possible.

The keys file may change at any time. It is either lines `<tenant> sha256:<64 hex digits>`, where
empty lines and what follows a `#` are ignored, and `@metrics` in place of a tenant marks a key that
opens `/metrics` and nothing else; or a policy in YAML:

    tenants:
      acme:
        keys:
          - {hash: "sha256:<64 hex digits>", name: ci, expires: 2027-01-31T00:00:00Z}
        highest_class: standard
        requests_per_minute: 600

A message names the place of a mistake, never what stands there, which may be a key.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import AwareDatetime, BeforeValidator, Field, ValidationError

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.cluster.key_notices import KeyNotices
from serve_app.contract import Reason
from serve_app.errors import RequestRefused, SettingsError
from serve_app.policy.classes import CLASSES, URGENCY
from serve_app.policy.tenant_limits import Limits
from serve_app.policy.tenants import Role, Tenant
from serve_app.settings import DEFAULT_TENANT, AuthSettings
from serve_app.settings.sections import MODEL_ALIAS, MODEL_NAME_CHARS, Section

log = logging.getLogger("hermes.ingress")

MAX_FILE_BYTES = 4 << 20
MAX_TENANTS = 10_000
MAX_KEYS = 100_000
MAX_KEY_NAME_CHARS = 64
TENANT = r"[A-Za-z0-9_.-]{1,64}"
SCRAPER = "@metrics"
"""Stands for the reader of metrics in a line; the names of tenants contain no `@`."""

_LINE = re.compile(rf"(?P<tenant>@metrics|{TENANT})\s+sha256:(?P<digest>[0-9a-f]{{64}})")
_YAML = re.compile(r"(?:\s*(?:#.*)?\n)*(?:---|\{|[\"']?tenants[\"']?\s*:)")
"""How the first line with content begins in YAML; no line `<tenant> sha256:…` does."""
_FIELD = re.compile(r"[a-z_]{1,32}")
_FILE = "settings: auth.keys_file"
_NOT_PERMITTED = {
    Role.INFERENCE: "This API key is not for requests: its roles are {roles}.",
    Role.METRICS: "The metrics cover all tenants and need a key of their own: ask the operator for "
    "one (hermes-serve api-key --metrics).",
}


def _time(given: Any) -> Any:
    """YAML makes a time of what looks like one, and a text of it in quotation marks."""
    if not isinstance(given, str | datetime.datetime):
        raise ValueError("it must be a time such as 2027-01-31T00:00:00Z")
    return datetime.datetime.fromisoformat(given) if isinstance(given, str) else given


class KeyPolicy(Section):
    """One API key of a tenant."""

    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    """Of the key, as `hermes-serve api-key` prints it"""
    name: str = Field("", max_length=MAX_KEY_NAME_CHARS, pattern=r"^[^\p{Cc}\p{Cf}]*$")
    """For people"""
    expires: Annotated[AwareDatetime, BeforeValidator(_time)] | None = None
    """From when on it is refused"""
    roles: tuple[Annotated[Role, Field(strict=False)], ...] = Field(
        (Role.INFERENCE,), strict=False, min_length=1, max_length=len(Role)
    )
    """What it may be used for"""


Count = Annotated[int, Field(ge=1)]


class TenantPolicy(Section):
    """What a tenant may do. What is left out has no limit."""

    keys: list[KeyPolicy] = Field([])
    highest_class: Literal["critical", "realtime", "standard", "batch"] = "realtime"
    weight: float | None = Field(None, gt=0)
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    background_tokens: Count | None = None
    max_output_tokens: Count | None = None
    tokens_per_month: Count | None = None
    models: list[
        Annotated[str, Field(min_length=1, max_length=MODEL_NAME_CHARS, pattern=MODEL_ALIAS)]
    ] = Field([], min_length=1, max_length=64)
    overload: Literal["refuse", "async"] = "refuse"

    def tenant(self, name: str) -> Tenant:
        """The tenant without a key."""
        return Tenant(
            name,
            classes=CLASSES[URGENCY[self.highest_class] :],
            limits=Limits(*(getattr(self, limit) or 0 for limit in Limits._fields)),
            models=tuple(self.models),
            overload=self.overload,
        )


class KeyFacts(NamedTuple):
    """What the file says of one API key."""

    tenant: str
    name: str = ""
    expires_s: float = 0.0
    """Unix seconds from which on it is refused; 0: never."""
    roles: tuple[Role, ...] = (Role.INFERENCE,)


class Policy(NamedTuple):
    """What a keys file says."""

    keys: Mapping[bytes, KeyFacts] = {}
    """By the SHA-256 of each key."""
    tenants: Mapping[str, Tenant] = {}
    weights: Mapping[str, float] = {}
    """Of the tenants that have one."""


def key_id_of(digest: bytes) -> str:
    """How an API key is named where the key itself must not stand."""
    return f"key_{digest.hex()[:12]}"


def is_yaml(text: str) -> bool:
    return _YAML.match(text) is not None


def parse(text: str) -> Policy:
    """What the text of a file says. `SettingsError`: the first mistake, with its place."""
    if len(text) > MAX_FILE_BYTES:
        raise SettingsError(f"{_FILE}: the file is larger than {MAX_FILE_BYTES >> 20} MiB")
    found = list(_of_yaml(text) if is_yaml(text) else _of_lines(text))
    if len(found) > MAX_TENANTS:
        raise SettingsError(f"{_FILE}: there are more than {MAX_TENANTS} tenants")
    keys: dict[bytes, KeyFacts] = {}
    for tenant, policy in found:
        for number, key in enumerate(policy.keys, 1):
            digest = bytes.fromhex(key.hash.partition(":")[2])
            expires_s = key.expires.timestamp() if key.expires else 0.0
            facts = KeyFacts(tenant, key.name, expires_s, key.roles)
            if (other := keys.setdefault(digest, facts)) is not facts:
                raise SettingsError(
                    f"{_FILE}: tenant '{tenant}': key {number} is a key of '{other.tenant}' already"
                )
    if len(keys) > MAX_KEYS:
        raise SettingsError(f"{_FILE}: there are more than {MAX_KEYS} keys")
    weights = {tenant: policy.weight for tenant, policy in found if policy.weight}
    return Policy(keys, {tenant: policy.tenant(tenant) for tenant, policy in found}, weights)


def _of_lines(text: str) -> Iterator[tuple[str, TenantPolicy]]:
    hashes: dict[str, dict[str, None]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        # The default tenant is that of all requests if no key is required.
        if match is not None and match["tenant"] != DEFAULT_TENANT:
            hashes.setdefault(match["tenant"], {})[f"sha256:{match['digest']}"] = None
        elif line:
            raise SettingsError(
                f"{_FILE}: line {number} is not '<tenant> sha256:<64 hex digits>' "
                "(a tenant is named "
                f"with letters, digits, '_', '.' and '-', and not '{DEFAULT_TENANT}')"
            )
    for tenant, its in hashes.items():
        roles = (Role.METRICS if tenant == SCRAPER else Role.INFERENCE,)
        made = [KeyPolicy.model_construct(hash=one, roles=roles) for one in its]
        yield tenant, TenantPolicy.model_construct(keys=made)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a name that is there twice: the first of two tenants would lose its keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            raise yaml.MarkedYAMLError(problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def document_of(text: str) -> dict[str, Any]:
    """A policy as its text has it, with `tenants` at least; `SettingsError`: it is no YAML."""
    try:
        document = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"from line {mark.line + 1} on " if mark else ""
        raise SettingsError(f"{_FILE}: {place}it is no valid YAML, or has a name twice") from None
    if not isinstance(document, dict) or set(document) != {"tenants"}:
        raise SettingsError(f"{_FILE}: a policy has the field 'tenants' and no other")
    tenants = document["tenants"] = document["tenants"] or {}
    if not isinstance(tenants, dict) or not all(isinstance(one, dict) for one in tenants.values()):
        raise SettingsError(f"{_FILE}: 'tenants' takes names, and fields for each")
    return document


def _of_yaml(text: str) -> Iterator[tuple[str, TenantPolicy]]:
    """One tenant at a time, because pydantic collects all mistakes of what it is given."""
    for number, (name, given) in enumerate(document_of(text)["tenants"].items(), 1):
        usual = isinstance(name, str) and re.fullmatch(TENANT, name)
        if not usual or name == DEFAULT_TENANT:
            raise SettingsError(
                f"{_FILE}: tenant {number} is not named with letters, digits, '_', '.' and '-' "
                f"(1, yes and the like in quotation marks), or named '{DEFAULT_TENANT}'"
            )
        try:
            yield name, TenantPolicy.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise SettingsError(f"{_FILE}: tenant '{name}': {_explained(first)}") from None


def _explained(mistake: Any) -> str:
    """A mistake with its place. A name that is unknown may be a hash, and is not repeated."""
    loc = mistake["loc"]
    if mistake["type"] == "extra_forbidden" and not _FIELD.fullmatch(str(loc[-1])):
        loc = (*loc[:-1], "?")
    place = ".".join(str(part + 1) if isinstance(part, int) else str(part) for part in loc)
    return f"'{place}': {str(mistake['msg']).removeprefix('Value error, ')}"


# -- who sends a request ---------------------------------------------------------------------------


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
            with path.open(encoding="utf-8") as file:
                return parse(file.read(MAX_FILE_BYTES + 1))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "It is no text"
            if isinstance(error, OSError):
                self._version = ()  # the same file counts again once it can be read
            raise SettingsError(
                f"settings: auth.keys_file (or HERMES_KEYS_FILE) '{path}' cannot be read: {why}: "
                "give it lines that hermes-serve api-key prints, on every node with an ingress"
            ) from None


# -- edits ----------------------------------------------------------------------------------------


def with_key(text: str, tenant: str, digest: bytes, **more: Any) -> str:
    """The text with one more key; `more`: what a policy says of it. Comments of a policy are lost.

    Raises:
        SettingsError: the file, or what it would become, has a mistake, or has lines and is to say
            `more`.
    """
    parse(text)
    key = {"hash": f"sha256:{digest.hex()}", **more}
    if text.strip() and not is_yaml(text):
        if more:
            raise SettingsError(f"{_FILE}: only a policy in YAML says {', '.join(more)} of a key")
        changed = f"{text.rstrip()}\n{tenant} {key['hash']}\n"
    else:
        document = document_of(text) if text.strip() else {"tenants": {}}
        its = document["tenants"].setdefault(tenant, {})
        its["keys"] = [*its.get("keys", ()), key]
        changed = _dumped(document)
    parse(changed)
    return changed


def without_key(text: str, key_id: str) -> tuple[str, bytes, KeyFacts]:
    """The text without a key; its SHA-256, and what the text said of it. `SettingsError`: there is
    none, or a mistake.
    """
    found = [
        (digest, facts) for digest, facts in parse(text).keys.items() if key_id_of(digest) == key_id
    ]
    if len(found) != 1:
        raise SettingsError(f"{_FILE}: {len(found) or 'no'} keys have the id '{key_id[:80]}'")
    ((digest, facts),) = found
    its_hash = f"sha256:{digest.hex()}"
    if not is_yaml(text):
        kept = [line for line in text.splitlines() if its_hash not in line.partition("#")[0]]
        return "".join(f"{line}\n" for line in kept), digest, facts
    document = document_of(text)
    its = document["tenants"][facts.tenant]
    its["keys"] = [key for key in its["keys"] if key["hash"] != its_hash]
    return _dumped(document), digest, facts


def _dumped(document: dict[str, Any]) -> str:
    return yaml.safe_dump(
        document, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120
    )
