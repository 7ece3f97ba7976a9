"""The settings tree: every mistake is reported with its setting and its fix."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.errors import SettingsError
from serve_app.settings import load_settings
from serve_app.settings.tree import RENAMED, _warn
from tests.tables import each


def refusal(args: dict[str, Any]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(args)
    return str(caught.value)


@each(
    "args, words",
    [
        # An unknown key is named with its path.
        ({"worker": {}}, ("'worker': ", "not permitted")),
        (
            {"workers": {"autoscaling": {"min_replica": 1}}},
            ("'workers.autoscaling.min_replica': ", "not permitted"),
        ),
        # A wrong value is named with its key and what it takes.
        ({"ingress": {"heartbeat_s": "10s"}}, ("'ingress.heartbeat_s'", "valid number")),
        ({"ingress": {"max_body_bytes": "16MiB"}}, ("'ingress.max_body_bytes'", "valid integer")),
        ({"journal": {"retention_s": -1}}, ("'journal.retention_s'", "greater than 0")),
        ({"namespace": "a:b"}, ("'namespace'", "takes letters, digits")),
        ({"telemetry": {"traces_endpoint": "collector:4317"}}, ("'telemetry.traces_endpoint'",)),
        ({"engine": {"kind": "magic"}}, ("'engine.kind'", "'vllm' or 'simulated'")),
        ({"workers": 3}, ("'workers'",)),
        # An impossible combination names both sides.
        (
            {"workers": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}},
            ("min_replicas (3)", "(2)"),
        ),
        (
            {"ingress": {"request_timeout_s": 9, "max_request_timeout_s": 8}},
            ("request_timeout_s (9)", "(8)"),
        ),
        (
            {"workers": {"device": "gpu", "tensor_parallel_size": 4, "gpus_per_replica": 2}},
            ("workers.gpus_per_replica (2)", "workers.tensor_parallel_size (4)"),
        ),
        # Nothing is infinite.
        ({"order": {"tenant_weights": {"a": float("inf")}}}, ("finite",)),
        ({"journal": {"retention_s": float("inf")}}, ("finite",)),
        ({"limits": {"max_tools": 10**20}}, ("max_tools takes no number beyond",)),
        ({"order": {"tenant_weights": {"a": 1e300}}}, ("tenant_weights.a takes no number beyond",)),
    ],
)
def test_a_mistake_is_named_with_its_key_and_its_fix(
    args: dict[str, Any], words: tuple[str, ...]
) -> None:
    message = refusal(args)
    for word in words:
        assert word in message


@each("args", ["hello", None])
def test_args_are_a_mapping(args: Any) -> None:
    assert refusal(args).startswith("settings: Input should be a valid dictionary")


def test_a_value_that_is_no_section_may_hold_a_password_and_is_not_shown() -> None:
    assert "secret" not in refusal({"redis": "redis://:secret@here/0", "namespace": "secret:"})


def test_all_mistakes_are_told_at_once() -> None:
    message = refusal({"worker": {}, "journal": {"retention_s": 0}})
    assert "'worker'" in message
    assert "'journal.retention_s'" in message


def test_the_environment_takes_the_place_of_the_redis_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_REDIS_URL", "rediss://:secret@elsewhere:7000/1")
    settings = load_settings({"redis": {"url": "redis://here/0", "connect_timeout_s": 3}})
    assert settings.redis.url == "rediss://:secret@elsewhere:7000/1"
    assert settings.redis.connect_timeout_s == 3


def test_a_redis_url_from_the_environment_is_checked_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HERMES_REDIS_URL", ":secret@elsewhere:7000")
    message = refusal({})
    assert "HERMES_REDIS_URL" in message
    assert "redis://" in message
    assert "secret" not in message


def test_keys_that_are_required_must_be_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal({"auth": {"required": True}})
    assert "'auth.keys_file'" in message
    assert "HERMES_KEYS_FILE" in message
    monkeypatch.setenv("HERMES_KEYS_FILE", "/etc/hermes/keys")
    assert load_settings({"auth": {"required": True}}).auth.keys_file == "/etc/hermes/keys"


@each(
    "old, new",
    [
        (f"{section}.{old}", f"{section}.{new}")
        for section, names in RENAMED.items()
        for old, new in names.items()
    ],
)
def test_a_former_name_is_taken_with_one_warning_and_refused_beside_the_new_one(
    old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    section, name = new.split(".")
    default = getattr(getattr(load_settings({}), section), name)
    given, former = default / 2 if isinstance(default, float) else default + 1, old.split(".")[1]
    _warn.cache_clear()
    caplog.clear()
    for _ in range(2):
        settings = load_settings({section: {former: given}})
        assert getattr(getattr(settings, section), name) == given
    assert caplog.messages == [f"settings: {old} is deprecated; use {new}, which replaces it"]
    assert f"remove {old}" in refusal({section: {former: given, name: given}})
