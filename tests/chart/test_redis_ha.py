"""Three Redis with Sentinel: what the chart expects, and what `helm/redis-ha.yaml` gives."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from serve_app.local.environment import ROOT
from serve_app.settings.redis_address import redis_address
from tests.chart.charts import HA, NAMED, Document, documents, merged, one, pod_templates
from tests.chart.test_redis import USERS, config_of, users

VALUES: Any = yaml.safe_load((ROOT / "helm" / "redis-ha.yaml").read_text())
OBJECTS = documents(merged(NAMED, HA))
FULL_NAME = VALUES["fullnameOverride"]
NOT_SHARED = {"bind", "port", "dir"}
"""Lines of redis.conf that the chart redis-ha writes itself."""


def environment(component: str) -> dict[str, Document]:
    """The environment of a pod."""
    template = pod_templates(OBJECTS)[component]
    return {item["name"]: item for item in template["spec"]["containers"][0]["env"]}


def test_the_service_asks_the_sentinels_of_that_release() -> None:
    for component in ("ingress", "engine"):
        found = environment(component)
        url = found["HERMES_REDIS_URL"]["value"]
        for name, key in (("REDIS", "password"), ("SENTINEL", "sentinel-password")):
            secret = found[f"HERMES_{name}_PASSWORD"]["valueFrom"]["secretKeyRef"]
            assert secret == {"name": VALUES["existingSecret"], "key": key}
            url = url.replace(f"$(HERMES_{name}_PASSWORD)", name.lower())
        assert list(found).index("HERMES_SENTINEL_PASSWORD") < list(found).index("HERMES_REDIS_URL")
        address = redis_address(url)
        hosts = [(f"{FULL_NAME}-announce-{n}", 26379) for n in range(VALUES["replicas"])]
        assert list(address.nodes) == hosts
        assert address.primary == VALUES["redis"]["masterGroupName"]
        assert address.login == {"username": "hermes", "password": "redis"}
        assert address.own_login == {"password": "sentinel"}
    assert VALUES["sentinel"]["authKey"] == "sentinel-password"
    assert VALUES["sentinel"]["existingSecret"] == VALUES["existingSecret"]


def test_rays_gcs_has_one_address_that_leads_to_the_primary() -> None:
    (check,) = pod_templates(OBJECTS)["head"]["spec"]["initContainers"]
    asked = {item["name"]: item.get("value") for item in check["env"]}
    assert asked["HERMES_GCS_REDIS"] == f"{FULL_NAME}-haproxy:6379"
    storage = one(OBJECTS, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert storage["redisAddress"] == f"{FULL_NAME}-haproxy:6379"
    assert storage["redisPassword"]["valueFrom"]["secretKeyRef"]["key"] == "ray-password"
    assert VALUES["haproxy"]["enabled"]
    assert VALUES["haproxy"]["timeout"]["client"] == "24d", "a silent GCS keeps its connection"


def test_they_have_the_settings_of_the_charts_own_redis() -> None:
    theirs = {name: str(value) for name, value in VALUES["redis"]["config"].items()}
    lines = [line for line in config_of({}) if line and not line.startswith("#")]
    for name, value in (line.split(" ", 1) for line in lines):
        if name not in NOT_SHARED:
            assert theirs.get(name) == value, name
    assert theirs["min-replicas-to-write"] == "1"


def test_their_users_come_from_the_charts_own_script() -> None:
    (init,) = VALUES["extraInitContainers"]
    given = {item["name"] for item in init["env"]}
    read = set(re.findall(r"\$\{?([A-Z_]+)", USERS.read_text()))
    assert given == read - {"METRICS_PASSWORD"}
    volumes = {volume["name"]: volume for volume in VALUES["extraVolumes"]}
    config = one(OBJECTS, "ConfigMap", volumes["users-script"]["configMap"]["name"])["data"]
    assert set(config) == {"users.sh"}
    assert config["users.sh"].strip() == USERS.read_text().strip()
    mounts = init["volumeMounts"] + VALUES["redis"]["extraVolumeMounts"]
    assert {mount["name"] for mount in mounts} == set(volumes)
    sources = [item["valueFrom"]["secretKeyRef"] for item in init["env"] if "valueFrom" in item]
    assert {source["name"] for source in sources} == {VALUES["existingSecret"]}


def test_a_primary_that_ends_hands_over_with_sentinels_password(tmp_path: Path) -> None:
    volumes = {volume["name"]: volume for volume in VALUES["extraVolumes"]}
    (item,) = volumes["sentinel-password"]["secret"]["items"]
    assert item["key"] == VALUES["sentinel"]["authKey"]
    assert volumes["sentinel-password"]["secret"]["secretName"] == VALUES["existingSecret"]
    mounts = {mount["name"]: mount["mountPath"] for mount in VALUES["redis"]["extraVolumeMounts"]}
    place = mounts["sentinel-password"]
    (tmp_path / item["path"]).write_text("the password")
    script = "trigger-failover-if-master.sh"
    (tmp_path / script).write_text('printf %s "$SENTINELAUTH"')
    command = [
        word.replace(place, str(tmp_path)).replace("/readonly-config", str(tmp_path))
        for word in VALUES["redis"]["lifecycle"]["preStop"]["exec"]["command"]
    ]
    assert subprocess.check_output(command, text=True) == "the password"


def test_only_with_sentinel_can_anybody_log_in_as_default(tmp_path: Any) -> None:
    given = {"HERMES_NAMESPACE": "p", "HERMES_PASSWORD": "h", "RAY_PASSWORD": "r"}
    alone = users(tmp_path, **given)
    assert alone["default"] == "user default off +@all ~* &*"
    three = users(tmp_path, **given, REPLICATION_PASSWORD="d")
    assert re.fullmatch(r"user default on #[0-9a-f]{64} \+@all ~\* &\*", three["default"])
    assert {name: rule for name, rule in three.items() if name != "default"} == {
        name: rule for name, rule in alone.items() if name != "default"
    }


def test_the_network_policies_of_both_releases_meet() -> None:
    policy = one(OBJECTS, "NetworkPolicy", "hermes-ray")["spec"]
    asked = {
        peer["podSelector"]["matchLabels"]["app"]: [port["port"] for port in rule["ports"]]
        for rule in policy["egress"]
        for peer in rule["to"]
        if "app" in peer.get("podSelector", {}).get("matchLabels", {})
    }
    assert asked == {"redis-ha": [6379, 26379], "redis-ha-haproxy": [6379]}
    peers = VALUES["networkPolicy"]["ingressRules"][0]["selectors"]
    assert {"podSelector": {"matchLabels": {"app": "redis-ha-haproxy"}}} in peers
    for rules in (VALUES["networkPolicy"], VALUES["haproxy"]["networkPolicy"]):
        (rule,) = rules["ingressRules"]
        allowed = rule["selectors"][0]["podSelector"]["matchLabels"]
        for component in ("head", "ingress", "engine"):
            labels = pod_templates(OBJECTS)[component]["metadata"]["labels"]
            assert allowed.items() <= labels.items()
    assert not [o for o in OBJECTS if o["kind"] == "StatefulSet"], "the chart's own Redis"
