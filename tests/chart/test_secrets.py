"""The two values that an installation needs, and the Secrets that the chart makes then: once, and
only where Helm sees them again. Helm talks to an API of Kubernetes' shape.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from serve_app.ingress.api_keys import SCRAPER, parse
from tests.chart import kinds
from tests.chart.charts import (
    CHART,
    HA,
    SECRETS,
    TWO,
    Document,
    documents,
    environment,
    merged,
    one,
    pod_templates,
)
from tests.chart.kubernetes_api import Cluster, helm_on, serving
from tests.chart.test_objects import NEWEST, OLDEST
from tests.chart.test_references import found
from tests.chart.test_refusals import refusal
from tests.chart.test_serve_config import arguments
from tests.tables import each

PLACE = "/api/v1/namespaces/prod/secrets/"
NAMES = ("hermes-keys", "hermes-redis")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
    return tmp_path


def chart() -> Any:
    return helm_python.Chart.load(str(CHART))


def entries(secret: Document) -> dict[str, str]:
    return {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}


def installed(folder: Path, *changes: Document, dry_run: str | None = "server") -> list[Document]:
    """The objects that `helm install` makes, or shows with `--dry-run=server`."""
    with serving(Cluster(folder)) as cluster:
        release = helm_on(cluster).install(
            chart(), "hermes", merged(TWO, *changes), dry_run=dry_run
        )
    return [item for item in yaml.safe_load_all(release["manifest"]) if item]


@each("version", [OLDEST, NEWEST])
def test_two_values_are_enough(folder: Path, version: str) -> None:
    objects = installed(folder, {})
    own = [item for item in objects if item["kind"] != "RayService"]
    assert [error for item in own for error in kinds.errors(item, version)] == []
    made = {item["metadata"]["name"]: item for item in objects if item["kind"] == "Secret"}
    pods = [*found(objects, "secretKeyRef"), {"name": "hermes-keys", "key": "metrics-key"}]
    for asked in pods:
        assert asked["key"] in made[asked["name"]]["data"]
    assert set(found(objects, "secretName")) == {"hermes-keys"}
    args = yaml.safe_load(one(objects, "RayService")["spec"]["serveConfigV2"])
    model = args["applications"][0]["args"]["model"]
    assert model == {"name": "big", "source": "org/big"}


def test_they_are_linted_and_each_size_goes_on_top() -> None:
    report = helm_python.lint(str(CHART), merged(TWO, SECRETS))
    assert [said["error"] for said in report["messages"]] == ["icon is recommended"]
    for file in sorted(CHART.glob("values-*.yaml")):
        size = yaml.safe_load(file.read_text())
        model = {"model": ""} if "model" in size.get("settings", {}) else {}
        assert refusal(merged(TWO, SECRETS, size, model)) == "", file.name


def test_the_keys_are_those_that_the_file_has(folder: Path) -> None:
    objects = installed(folder, {})
    secret = one(objects, "Secret", "hermes-keys")
    made = entries(secret)
    keys = parse(made.pop("keys")).keys
    found = {name: keys[hashlib.sha256(key.encode()).digest()] for name, key in made.items()}
    whose = {name: facts.tenant for name, facts in found.items()}
    assert whose == {"api-key": "client", "test-key": "helm-test", "metrics-key": SCRAPER}
    assert len(keys) == len(set(made.values())) == 3
    assert all(re.fullmatch("hk-[A-Za-z0-9]{43}", key) for key in made.values())
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@each(
    "changes, names",
    [
        ({}, {"password", "ray-password", "metrics-password"}),
        (HA, {"password", "ray-password", "sentinel-password", "replication-password"}),
        ({"redis.internal.passwordKey": "p"}, {"p", "ray-password", "metrics-password"}),
    ],
)
def test_redis_gets_passwords_that_a_url_can_hold(
    folder: Path, changes: Document, names: set[str]
) -> None:
    made = entries(one(installed(folder, changes), "Secret", "hermes-redis"))
    assert set(made) == names
    assert len(set(made.values())) == len(names)
    assert all(re.fullmatch("[A-Za-z0-9]{48}", password) for password in made.values())


def test_an_upgrade_keeps_them_and_so_does_the_next_install(folder: Path) -> None:
    with serving(Cluster(folder)) as cluster:

        def made() -> list[dict[str, str]]:
            return [entries(cluster.objects[PLACE + name]) for name in NAMES]

        config = helm_on(cluster)
        config.install(chart(), "hermes", TWO)
        added = base64.b64encode(b"acme sha256:" + b"a" * 64).decode()
        cluster.objects[PLACE + NAMES[0]]["data"]["keys"] = added  # by `kubectl patch`
        keys, redis = made()
        config.upgrade(chart(), "hermes", merged(TWO, {"image.tag": "0.3.0"}))
        assert made() == [keys, redis]
        cluster.objects = {PLACE + name: cluster.objects[PLACE + name] for name in NAMES}
        config = helm_on(cluster)
        config.install(chart(), "hermes", TWO)
        assert made() == [keys, redis]
        config.upgrade(chart(), "hermes", merged(TWO, HA))
        with_sentinel = made()[1]
        assert redis.items() < with_sentinel.items()
        assert "sentinel-password" in with_sentinel


def test_a_secret_of_that_name_that_somebody_else_has_made_is_used(folder: Path) -> None:
    by_hand = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAMES[0]}, "data": {}}
    with serving(Cluster(folder, objects={PLACE + NAMES[0]: by_hand})) as cluster:
        release = helm_on(cluster).install(chart(), "hermes", TWO)
        assert set(cluster.objects) >= {PLACE + name for name in NAMES}
    assert cluster.objects[PLACE + NAMES[0]] == by_hand
    assert f"secretName: {NAMES[0]}" in release["manifest"]


def test_secrets_that_are_named_are_not_made(folder: Path) -> None:
    objects = installed(folder, SECRETS)
    assert not [item for item in objects if item["kind"] == "Secret"]


def test_without_a_cluster_to_look_at_nothing_is_made(folder: Path) -> None:
    sentence = "auth.existingSecret is empty, and Helm does not see the cluster"
    assert sentence in refusal(TWO), "helm template"
    with pytest.raises(helm_python.HelmError, match=sentence):
        installed(folder, {}, dry_run="client")
    assert refusal(merged(TWO, SECRETS)) == ""
    assert refusal(merged(TWO, SECRETS, {"auth.existingSecret": "", "auth.enabled": False})) == ""


def test_the_notes_tell_how_to_read_the_clients_key(folder: Path) -> None:
    with serving(Cluster(folder)) as cluster:
        notes = helm_on(cluster).install(chart(), "hermes", TWO, dry_run="server")["notes"]
    assert "KEY=$(kubectl -n prod get secret hermes-keys -o jsonpath='{.data.api-key}'" in notes
    assert '-H "authorization: Bearer $KEY"' in notes
    assert '"model": "big"' in notes
    assert "Secrets that must exist" not in notes


@each(
    "source, name",
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("big", "big"),
        ("/models/a/b", "b"),
        ("builtin:tiny", "builtin-tiny"),
    ],
)
def test_a_model_is_called_by_the_end_of_its_source(source: str, name: str) -> None:
    volume = {"weights.existingClaim": "models"}
    found_model = arguments(merged(TWO, SECRETS, volume, {"model": source}))["model"]
    assert found_model == {"name": name, "source": source}
    named = {"model": source, "settings.model.name": "mine"}
    assert arguments(merged(TWO, SECRETS, volume, named))["model"]["name"] == "mine"


@each(
    "changes, offline",
    [
        ({}, "0"),
        ({"model": "builtin:tiny"}, "1"),
        ({"model": "/models/big"}, "1"),
        ({"model": "/models/big", "hub.access": True}, "0"),
        ({"hub.access": False, "env.HF_HOME": "/models/hub"}, "1"),
    ],
)
def test_a_hub_id_implies_the_hub_unless_the_values_say_otherwise(
    changes: Document, offline: str
) -> None:
    values = merged(TWO, SECRETS, {"weights.existingClaim": "models"}, changes)
    engine = pod_templates(documents(values))["engine"]
    assert environment(engine)["HF_HUB_OFFLINE"] == offline
