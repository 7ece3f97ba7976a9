"""API keys: hashed, and changed without a restart."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.clock import SYSTEM
from serve_app.contract import Reason
from serve_app.errors import RequestRefused, SettingsError
from serve_app.ingress.api_keys import ApiKeys, parse
from serve_app.policy.tenants import Role, Tenant
from serve_app.settings import AuthSettings
from tests.tables import each


def digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def line(tenant: str, key: str) -> str:
    return f"{tenant} {digest(key)}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(
        "# who may ask\n\n" + line("acme", "hk-1") + line("acme", "hk-2") + line("zeta", "hk-3")
    )
    return path


def made(file: Path, now_s: Callable[[], float] = SYSTEM.unix_s) -> ApiKeys:
    return ApiKeys(AuthSettings(required=True, keys_file=str(file)), now_s)


def test_a_key_tells_its_tenant_and_a_tenant_may_have_several(file: Path) -> None:
    keys = made(file)
    assert [keys.tenant(f"Bearer {key}").id for key in ("hk-1", "hk-2", "hk-3")] == [
        "acme",
        "acme",
        "zeta",
    ]
    assert keys.tenant("bearer hk-1").id == "acme"


@each(
    "authorization",
    ["", "Bearer", "Bearer ", "hk-1", "Basic hk-1", "Bearer hk-4", "Bearer hk-1 hk-2", "Bearer é"],
)
def test_a_refused_key_is_not_repeated_in_the_error(file: Path, authorization: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        made(file).tenant(authorization)
    assert refused.value.reason is Reason.INVALID_API_KEY
    assert refused.value.status == 401
    assert refused.value.headers()["www-authenticate"] == "Bearer"
    assert refused.value.headers()["x-should-retry"] == "false"
    assert "hk-" not in refused.value.message


def test_without_keys_everybody_is_one_tenant() -> None:
    assert ApiKeys(AuthSettings()).tenant("Bearer whatever") == Tenant(
        "default", roles=(Role.INFERENCE, Role.ADMIN)
    )


def test_a_changed_file_counts_once_it_is_looked_at_and_a_broken_one_not_at_all(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = made(file)
    file.write_text(line("acme", "hk-9"))
    assert keys.tenant("Bearer hk-1").id == "acme", "a file is looked at once a second"
    asyncio.run(keys.look())
    assert keys.tenant("Bearer hk-9").id == "acme"
    with pytest.raises(RequestRefused):
        keys.tenant("Bearer hk-1")
    file.write_text("acme hk-in-the-clear\n")

    def errors() -> list[str]:
        return [one.message for one in caplog.records if one.levelno == logging.ERROR]

    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            asyncio.run(keys.look())
    assert keys.tenant("Bearer hk-9").id == "acme"
    assert not keys.valid
    assert len(errors()) == 1
    assert "line 1" in caplog.text
    assert "hk-in-the-clear" not in caplog.text
    file.unlink()
    for _ in range(2):
        asyncio.run(keys.look())
    assert len(errors()) == 2
    assert keys.tenant("Bearer hk-9").id == "acme"
    file.write_text(line("acme", "hk-9"))
    asyncio.run(keys.look())
    assert keys.valid


@each(
    "text",
    [
        "acme hk-1",
        "acme sha256:12",
        f"sha256:{'0' * 64}",
        f"a:b sha256:{'0' * 64}",
        f"default sha256:{'0' * 64}",
    ],
)
def test_a_line_that_makes_no_sense_is_named_by_its_number(text: str) -> None:
    with pytest.raises(SettingsError, match="line 2 "):
        parse(f"# keys\n{text}\n")


def test_metrics_need_a_key_of_their_own_kind_that_opens_nothing_else(file: Path) -> None:
    file.write_text(file.read_text() + line("@metrics", "hk-m"))
    keys = made(file)
    keys.tenant("Bearer hk-m", Role.METRICS)
    for role, authorization in ((Role.INFERENCE, "Bearer hk-m"), (Role.METRICS, "Bearer hk-1")):
        with pytest.raises(RequestRefused) as refused:
            keys.tenant(authorization, role)
        assert (refused.value.status, refused.value.reason) == (403, Reason.KEY_NOT_PERMITTED)
    with pytest.raises(RequestRefused) as refused:
        keys.tenant("Bearer hk-wrong", Role.METRICS)
    assert refused.value.reason is Reason.INVALID_API_KEY
    ApiKeys(AuthSettings()).tenant("", Role.METRICS)  # where no key is required


@each("name, why", [("none", "No such file"), ("", "Is a directory"), ("binary", "It is no text")])
def test_a_file_that_cannot_be_read_is_named_with_its_settings_and_the_fix(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(SettingsError) as refused:
        made(tmp_path / name)
    said = str(refused.value)
    assert f"auth.keys_file (or HERMES_KEYS_FILE) '{tmp_path / name}' cannot be read: {why}" in said
    assert "hermes-serve api-key" in said


def test_a_key_permits_what_the_settings_say_of_its_tenant(tmp_path: Path) -> None:
    """Without keys everybody is an operator, but `critical` is for those that are named."""
    auth = {"critical_tenants": ["default", "ops"], "admin_tenants": ["ops"]}
    everybody = ApiKeys(AuthSettings.model_validate(auth)).tenant("")
    assert (everybody.admin, "critical" in everybody.classes) == (True, True)
    (tmp_path / "keys").write_text("".join(line(name, f"hk-{name}") for name in ("ops", "a")))
    required = {"required": True, "keys_file": str(tmp_path / "keys")}
    keys = ApiKeys(AuthSettings.model_validate(auth | required))
    ops, other = (keys.tenant(f"Bearer hk-{name}") for name in ("ops", "a"))
    assert (ops.admin, "critical" in ops.classes) == (True, True)
    assert (other.admin, "critical" in other.classes) == (False, False)
    with pytest.raises(RequestRefused, match=r"admin_tenants; ask\."):
        other.check_admin("That is", "; ask")


def test_an_expired_key_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(
        f"tenants: {{a: {{keys: [{{hash: {digest('hk-1')}, expires: 1970-01-01T00:16:40Z}}]}}}}"
    )
    now_s = [999.9]
    keys = made(tmp_path / "keys", lambda: now_s[0])
    assert keys.tenant("Bearer hk-1").id == "a"
    now_s[0] = 1000.0
    with pytest.raises(RequestRefused, match="has expired") as refused:
        keys.tenant("Bearer hk-1")
    assert refused.value.status == 401


def test_the_files_weights_go_before_the_settings_and_change_with_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("tenants: {a: {weight: 4}, b: {}}")
    settings = AuthSettings(required=True, keys_file=str(file))
    keys = ApiKeys(settings, weights={"a": 2.0, "c": 3.0})
    weights = keys.weights
    assert weights == {"a": 4.0, "c": 3.0}
    file.write_text("tenants: {b: {weight: 0.5}}")
    asyncio.run(keys.look())
    assert weights == {"a": 2.0, "b": 0.5, "c": 3.0}
