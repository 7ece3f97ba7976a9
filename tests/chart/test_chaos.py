"""What `scripts/chaos --kubernetes` creates and changes fits the chart: valid objects, `restricted`
pods, the network policies, and an upgrade that starts a second cluster.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.chaos_testing.kubernetes import manifests
from scripts.chaos_testing.kubernetes.release import Release
from scripts.chaos_testing.kubernetes.standing import COMPONENT
from scripts.local.environment import ROOT
from tests.chart import kinds
from tests.chart.charts import CHART, Document, Loader, documents, merged, one, stage_values
from tests.chart.test_network import ALL, reaches
from tests.tables import each

pytestmark = pytest.mark.nightly  # it concerns a tool

DEFAULTS = yaml.load((CHART / "values.yaml").read_text(), Loader)
RELEASE = Release(
    "hermes", "prod", "hermes-serve-0.2.0", "1", merged(DEFAULTS, ALL), ("hermes-keys", "test-key")
)
CODE = {path: (ROOT / path).read_text() for path in manifests.CODE}
CLIENT = manifests.client(RELEASE, "abc123", 0, 300, "auto", 600)
CREATED = [manifests.code(RELEASE, "abc123", CODE), CLIENT, manifests.cut_policy(RELEASE, "abc123")]


@each("version", ["1.29", "1.37"])
def test_everything_that_a_run_creates_is_valid(version: str) -> None:
    assert [kinds.errors(item, version) for item in CREATED] == [[], [], []]


def test_the_client_runs_under_pod_security_restricted() -> None:
    spec = CLIENT["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    assert {kind for volume in spec["volumes"] for kind in volume} == {
        "name",
        "emptyDir",
        "configMap",
    }
    context = container["securityContext"]
    assert context["runAsNonRoot"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_client_needs_nothing_that_the_image_lacks(tmp_path: Path) -> None:
    """The files lie as the pod mounts them. Only `serve_app`'s dependencies are beside them."""
    code = tmp_path / "chaos"
    (volume,) = [volume for volume in CLIENT["spec"]["volumes"] if volume["name"] == "code"]
    for item in volume["configMap"]["items"]:
        file = code / item["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CREATED[0]["data"][item["key"]])
    given = {
        one["name"]: one["value"]
        for one in CLIENT["spec"]["containers"][0]["env"]
        if "value" in one
    }
    given |= {"PYTHONPATH": str(code), "HERMES_URL": "http://127.0.0.1:1"}
    given |= {"HERMES_CHAOS_SOCKET": str(tmp_path / "socket"), "PATH": os.environ["PATH"]}
    module = [sys.executable, "-m", manifests.MODULE]
    process = subprocess.Popen([*module, "serve"], cwd=tmp_path, env=given)
    try:
        answer = subprocess.run(
            [*module, "state"], cwd=tmp_path, env=given, capture_output=True, text=True, check=True
        )
        assert '"ready": {}' in answer.stdout
        unknown = subprocess.run([*module, "nonsense"], cwd=tmp_path, env=given, check=False)
        assert unknown.returncode
    finally:
        process.terminate()
        process.wait()


def with_client(objects: list[Document]) -> list[Document]:
    """The chart's objects, with the client in place of `helm test`'s pod."""
    return [*(item for item in objects if item["kind"] != "Pod"), CLIENT]


def test_the_client_reaches_the_service_and_nothing_else() -> None:
    objects = with_client(documents(ALL))
    assert reaches(objects, "test", "ingress", 8000)
    assert reaches(objects, "test", "engine", 8000)
    assert not reaches(objects, "test", "redis", 6379)
    assert not reaches(objects, "test", "head", 8265)


def test_a_pod_that_is_cut_off_reaches_nobody_and_is_reached_by_nobody() -> None:
    objects = copy.deepcopy(documents(ALL))
    assert reaches(objects, "engine", "redis", 6379)
    cluster = one(objects, "RayService")["spec"]["rayClusterConfig"]
    (engines,) = [g for g in cluster["workerGroupSpecs"] if g["groupName"] == "engines"]
    engines["template"]["metadata"]["labels"] |= {COMPONENT: "cut", manifests.CUT: "engine"}
    objects.append(manifests.cut_policy(RELEASE, "abc123"))
    for peer, port in (("redis", 6379), ("head", 6379), ("ingress", 30000), ("test", 8000)):
        assert not reaches(objects, "cut", peer, port)
        assert not reaches(objects, peer, "cut", port)
    assert not reaches(objects, "ns/kuberay-operator", "cut", 8000)


def test_the_annotation_of_an_upgrade_changes_every_pod_of_ray_and_nothing_else() -> None:
    before = stage_values("multi-node")
    after = merged(before, {"podAnnotations": {manifests.OWN: "abc123"}})
    changed = [
        new for old, new in zip(documents(before), documents(after), strict=True) if old != new
    ]
    assert [item["kind"] for item in changed] == ["RayService"]
    cluster = changed[0]["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all(g["template"]["metadata"]["annotations"][manifests.OWN] == "abc123" for g in groups)
