"""The chart's own Redis never evicts, and its script writes one user for each that logs in."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from serve_app.local.environment import ROOT
from tests.chart.charts import CHART, NAMED, Document, documents, merged, one
from tests.tables import each

USERS = CHART / "files" / "redis-users.sh"
START = CHART / "files" / "redis-start.sh"
PASSWORDS = {
    "HERMES_PASSWORD": "a b'$(id)\"c",
    "RAY_PASSWORD": "ray-secret",
    "METRICS_PASSWORD": "seen",
}


def users(tmp_path: Path, **environment: str) -> dict[str, str]:
    """The users that the script writes."""
    script = USERS.read_text().replace("/run/redis", str(tmp_path))
    subprocess.run(
        ["sh", "-c", script],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        check=True,
    )
    file = tmp_path / "users.acl"
    assert file.stat().st_mode & 0o077 == 0
    rows = file.read_text().splitlines()
    assert all(row.startswith("user ") for row in rows), "an ACL file takes nothing else"
    return {row.split()[1]: row for row in rows}


def test_the_service_has_the_same_rights_with_the_chart_as_without_it(tmp_path: Path) -> None:
    shipped = (ROOT / "cluster" / "redis.acl").read_text().splitlines()
    digest = hashlib.sha256(PASSWORDS["HERMES_PASSWORD"].encode()).hexdigest()
    of_hermes = next(row for row in shipped if row.startswith("user hermes "))
    found = users(tmp_path, HERMES_NAMESPACE="hermes", **PASSWORDS)
    assert found["hermes"] == of_hermes.replace("REPLACE_WITH_SHA256_OF_THE_PASSWORD", digest)
    assert found["default"] in shipped
    assert not [password for password in PASSWORDS.values() if password in "".join(found.values())]


@each("missing", ["HERMES_PASSWORD", "RAY_PASSWORD", "HERMES_NAMESPACE"])
def test_there_are_no_users_without_their_passwords(tmp_path: Path, missing: str) -> None:
    given = {"HERMES_NAMESPACE": "prod", **PASSWORDS}
    del given[missing]
    with pytest.raises(subprocess.CalledProcessError):
        users(tmp_path, **given)


def test_the_pod_hands_the_script_what_it_reads() -> None:
    values = merged(NAMED, {"redis": {"internal": {"exporter": {"enabled": True}}}})
    redis = one(documents(values), "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    read = set(re.findall(r"\$\{?([A-Z_]+)", USERS.read_text()))
    assert {item["name"] for item in redis["env"]} == read - {"REPLICATION_PASSWORD"}
    config = one(documents(values), "ConfigMap", "hermes-redis")["data"]
    for name, file in (("start.sh", START), ("users.sh", USERS)):
        assert config[name].strip() == file.read_text().strip()


def test_a_redis_that_is_back_before_its_probes_is_reached_at_once() -> None:
    service = one(documents(NAMED), "Service", "hermes-redis")["spec"]
    assert service["publishNotReadyAddresses"] is True
    pod = one(documents(NAMED), "StatefulSet")["spec"]["template"]["spec"]
    assert pod["containers"][0]["startupProbe"]["periodSeconds"] == 1
    for toleration in pod["tolerations"]:
        assert toleration["tolerationSeconds"] == 30, "not five minutes on a dead node"
    assert len(pod["tolerations"]) == 2


def config_of(changes: Document) -> list[str]:
    text: str = one(documents(merged(NAMED, changes)), "ConfigMap", "hermes-redis")["data"][
        "redis.conf"
    ]
    return text.splitlines()


def test_nothing_is_evicted_and_everything_is_written_down() -> None:
    lines = config_of({"redis": {"internal": {"appendfsync": "always", "maxmemory": "5gb"}}})
    for line in (
        "appendonly yes",
        "appendfsync always",
        "maxmemory 5gb",
        "maxmemory-policy noeviction",
        'save ""',
        "auto-aof-rewrite-min-size 128mb",  # a restart reads the whole file
    ):
        assert line in lines
    claims = one(documents(NAMED), "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert claims[0]["spec"]["resources"]["requests"]["storage"] == "50Gi"


def test_a_changed_configuration_restarts_redis() -> None:
    def mark(changes: Document) -> str:
        template = one(documents(merged(NAMED, changes)), "StatefulSet")["spec"]["template"]
        found: str = template["metadata"]["annotations"]["hermes-serve/config"]
        return found

    assert mark({}) == mark({"head": {"cpus": 3}})
    assert mark({}) != mark({"redis": {"internal": {"appendfsync": "always"}}})
