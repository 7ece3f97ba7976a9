"""The keys file: lines or a policy, and what is said of a mistake."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from serve_app.errors import SettingsError
from serve_app.ingress import api_keys
from serve_app.ingress.api_keys import KeyFacts, parse, with_key, without_key
from serve_app.policy.tenant_limits import Limits
from serve_app.policy.tenants import Role, Tenant
from tests.tables import each

HASH, OTHER = (f"sha256:{digit * 64}" for digit in "ab")


def policy(fields: str) -> str:
    return f'tenants:\n  acme: {{keys: [{{hash: "{HASH}"}}], {fields}}}\n'


def test_lines_permit_every_class_and_have_no_limits() -> None:
    found = parse(f"# keys\n\nacme {HASH}  # first\n@metrics {OTHER}\nacme {HASH}\n")
    assert found.tenants["acme"] == Tenant("acme")
    assert found.keys == {
        b"\xaa" * 32: KeyFacts("acme"),
        b"\xbb" * 32: KeyFacts("@metrics", roles=(Role.METRICS,)),
    }
    assert found.weights == {}


def test_a_policy_says_what_a_tenant_may_do() -> None:
    found = parse(
        f"""# who may ask
tenants:
  acme:
    keys:
      - hash: {HASH}
        name: laptop
        expires: "2027-01-31T01:00:00+01:00"
        roles: [inference, admin]
      - {{hash: "{OTHER}", expires: 2027-01-31T00:00:00Z, roles: [metrics]}}
    highest_class: standard
    weight: 2
    requests_per_minute: 1
    tokens_per_minute: 2
    concurrent_requests: 3
    background_tokens: 4
    max_output_tokens: 5
    tokens_per_month: 6
    models: [hermes-*]
    overload: async
  zeta: {{}}
"""
    )
    assert found.tenants["zeta"] == Tenant("zeta")
    assert found.tenants["acme"] == Tenant(
        "acme",
        classes=("standard", "batch"),
        limits=Limits(1, 2, 3, 4, 5, 6),
        models=("hermes-*",),
        overload="async",
    )
    expires_s = 1_801_353_600.0
    assert found.keys == {
        b"\xaa" * 32: KeyFacts("acme", "laptop", expires_s, (Role.INFERENCE, Role.ADMIN)),
        b"\xbb" * 32: KeyFacts("acme", "", expires_s, (Role.METRICS,)),
    }
    assert found.weights == {"acme": 2.0}
    both = parse("tenants: {a: {highest_class: critical}, b: {highest_class: batch}}").tenants
    assert [one.classes[0] for one in both.values()] == ["critical", "batch"]


@each(
    "text",
    [
        "tenants:",
        "\n# none\ntenants: {}\n",
        "---\ntenants:\n",
        json.dumps({"tenants": {}}),
        "",
        "#",
    ],
)
def test_a_file_may_have_nobody(text: str) -> None:
    assert parse(text).tenants == {}


@each(
    "text, said",
    [
        (policy("weight: 0"), "tenant 'acme': 'weight': .* greater than 0"),
        (policy("weight: .inf"), "'weight'"),
        (policy("weight: '2'"), "'weight': .*number"),
        (policy("requests_per_minute: 0"), "'requests_per_minute'"),
        (policy("requests_per_minute: 99999999999999999999"), "beyond"),
        (policy("requests_per_hour: 1"), "'requests_per_hour': Extra"),
        (policy(f"{HASH}: 1"), r"'\?': Extra"),
        (policy("highest_class: urgent"), "'highest_class': .*'batch'"),
        (policy("models: []"), "'models'"),
        (policy("models: ['a[b]']"), "'models.1'"),
        (policy("overload: wait"), "'overload'"),
        (f"tenants: {{a: {{keys: [{{hash: {HASH[:-1]}}}]}}}}", "tenant 'a': 'keys.1.hash'"),
        (
            f"tenants: {{a: {{keys: [{{hash: {HASH}, roles: [root]}}]}}}}",
            "'keys.1.roles.1'.*'gateway'",
        ),
        (f"tenants: {{a: {{keys: [{{hash: {HASH}, roles: []}}]}}}}", "'keys.1.roles'"),
        (f"tenants: {{a: {{keys: [{{hash: {HASH}, expires: 2027-01-31}}]}}}}", "a time such as"),
        (f"tenants: {{a: {{keys: [{{hash: {HASH}, expires: soon}}]}}}}", "'keys.1.expires'"),
        (f"tenants: {{a: {{keys: [{{hash: {HASH}, expires: 2027-01-31 00:00:00}}]}}}}", "timezone"),
        (f"tenants: {{a: {{keys: [{{hash: {HASH}, expires: 2027-99-31T00:00:00Z}}]}}}}", "YAML"),
        (
            f"tenants: {{a: {{keys: [{{hash: {HASH}}}]}}, b: {{keys: [{{hash: {HASH}}}]}}}}",
            "tenant 'b': key 1 is a key of 'a' already",
        ),
        (f"a {HASH}\nb {HASH}", "tenant 'b': key 1 is a key of 'a' already"),
        ("tenants:\n  a: {}\n  a: {}\n", "from line 2 on .* a name twice"),
        ("tenants:\n  a: {b\n", "from line [23] on it is no valid YAML"),
        ("tenants: {1: {}}", "tenant 1 is not named"),
        ("tenants: {default: {}}", "tenant 1 is not named .* or named 'default'"),
        ("tenants: {'@metrics': {}}", "tenant 1 is not named"),
        ("tenants: [a]", "takes names"),
        ("tenants: {a: 1}", "takes names"),
        ("tenants: {}\nkeys: {}", "no other"),
        ("---\n- a", "no other"),
        ("tenants: !!python/object:os.system {}", "YAML"),
    ],
)
def test_a_mistake_is_named_by_its_place_and_never_repeated(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=f"^settings: auth.keys_file: .*{said}") as refused:
        parse(text)
    assert HASH[7:30] not in str(refused.value)


def hashes(count: int) -> list[dict[str, Any]]:
    found = (hashlib.sha256(str(number).encode()).hexdigest() for number in range(count))
    return [{"hash": f"sha256:{digest}"} for digest in found]


def test_a_file_has_a_bounded_number_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"tenants": {"a": {"keys": hashes(3)}, "b": {}, "c": {}}})
    parse(text)
    for name, most, said in (
        ("MAX_KEYS", 2, "more than 2 keys"),
        ("MAX_TENANTS", 2, "more than 2 tenants"),
        ("MAX_FILE_BYTES", len(text) - 1, "larger than"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(api_keys, name, most)
            with pytest.raises(SettingsError, match=said):
                parse(text)


def test_a_key_is_added_to_lines_and_to_a_policy_and_removed_from_both() -> None:
    lines = with_key(f"# first\nacme {HASH}", "zeta", b"\xbb" * 32)
    assert lines == f"# first\nacme {HASH}\nzeta {OTHER}\n"
    text, digest, facts = without_key(lines, "key_" + "b" * 12)
    assert (text, digest, facts.tenant) == (f"# first\nacme {HASH}\n", b"\xbb" * 32, "zeta")

    for text in ("", policy("weight: 2, models: [a]")):
        more = {"name": "ci", "roles": ["metrics"], "expires": "2027-01-31T00:00:00Z"}
        made = with_key(text, "zeta", b"\xbb" * 32, **more)
        facts = KeyFacts("zeta", "ci", 1_801_353_600.0, (Role.METRICS,))
        assert parse(made).keys[b"\xbb" * 32] == facts
        left, _, found = without_key(made, "key_" + "b" * 12)
        assert (found, parse(left).keys) == (facts, parse(text).keys)
        assert parse(left).tenants["zeta"] == Tenant("zeta")
        assert parse(text).tenants.items() <= parse(left).tenants.items()


@each(
    "text, key_id, said",
    [
        (f"a {HASH}", "key_" + "b" * 12, "no keys have the id 'key_b"),
        (f"a {HASH}\nb sha256:{'a' * 63}b", "key_" + "a" * 12, "2 keys have the id"),
        ("a b", "key_" + "a" * 12, "line 1"),
    ],
)
def test_what_is_not_one_key_is_not_removed(text: str, key_id: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        without_key(text, key_id)


@each(
    "text, tenant, more, said",
    [
        (f"a {HASH}", "a", {"name": "ci", "roles": ["admin"]}, "says name, roles of a key"),
        (f"a {OTHER}", "b", {}, "is a key of 'a' already"),
        ("", "a", {"roles": ["root"]}, "'keys.1.roles.1'"),
        ("", "default", {}, "tenant 1 is not named"),
        ("a b", "b", {}, "line 1"),
    ],
)
def test_a_key_that_would_break_a_file_is_not_added(
    text: str, tenant: str, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        with_key(text, tenant, b"\xbb" * 32, **more)
