"""The keys file: the API keys, whose they are, and what the policy of each tenant permits. Pure.

It is either lines `<tenant> sha256:<64 hex digits>`, where empty lines and what follows a `#` are
ignored, and `@metrics` in place of a tenant marks a key that opens `/metrics` and nothing else; or
a policy in YAML:

    tenants:
      acme:
        keys:
          - {hash: "sha256:<64 hex digits>", name: ci, expires: 2027-01-31T00:00:00Z}
        highest_class: standard
        requests_per_minute: 600

A key is 256 random bits (`hermes-serve api-key`), so a plain hash is enough: no dictionary attack
is possible. A message names the place of a mistake, never what stands there, which may be a key.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import AwareDatetime, BeforeValidator, Field, ValidationError

from serve_app.errors import SettingsError
from serve_app.policy.classes import CLASSES, URGENCY
from serve_app.policy.tenants import Limits, Role, Tenant
from serve_app.settings import DEFAULT_TENANT
from serve_app.settings.sections import MODEL_ALIAS, MODEL_NAME_CHARS, Section

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
            weight=self.weight or 1.0,
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
