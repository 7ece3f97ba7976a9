"""The chaos client (`scripts/chaos_testing/in_pod.yaml`) fits a release of the chart: a valid,
`restricted` pod, the network policies, the chart's names; and an upgrade starts a second cluster.
"""

from __future__ import annotations

import re

import pytest
import yaml

from scripts.local.environment import ROOT
from tests.chart import kinds
from tests.chart.charts import Document, documents, merged, one, stage_values
from tests.chart.test_network import ALL
from tests.tables import each

pytestmark = pytest.mark.nightly  # it concerns a tool

JOB = yaml.safe_load((ROOT / "scripts" / "chaos_testing" / "in_pod.yaml").read_text())
POD = JOB["spec"]["template"]
(CLIENT,) = POD["spec"]["containers"]


@each("version", ["1.29", "1.37"])
def test_the_job_is_valid(version: str) -> None:
    assert kinds.errors(JOB, version) == []


def test_the_client_is_helm_tests_pod_with_another_command() -> None:
    """So what other tests show of that pod holds for it, too: what it reaches, and what it may."""
    test = one(documents(ALL), "Pod")
    (smoke,) = test["spec"]["containers"]
    labels = test["metadata"]["labels"]
    assert POD["metadata"]["labels"] == labels
    for key in ("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks"):
        assert POD["spec"][key] == test["spec"][key]
    change_policy = {"fsGroupChangePolicy": "OnRootMismatch"}
    assert POD["spec"]["securityContext"] | change_policy == test["spec"]["securityContext"]
    assert CLIENT["securityContext"] == smoke["securityContext"]
    theirs = {entry["name"]: entry for entry in smoke["env"]}
    assert CLIENT["command"][-1] == theirs["HERMES_URL"]["value"]
    mine = {entry["name"]: entry for entry in CLIENT["env"]}
    mine["HERMES_API_KEY"]["valueFrom"]["secretKeyRef"].pop("optional")
    assert mine["HERMES_API_KEY"] == theirs["HERMES_API_KEY"]
    head = one(documents(ALL), "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["template"]["spec"]["containers"][0]["image"] == smoke["image"], "as the page asks"


def test_the_annotation_of_an_upgrade_changes_every_pod_of_ray_and_nothing_else() -> None:
    page = (ROOT / "docs" / "kubernetes-chaos.md").read_text()
    ((name, value),) = re.findall(r"--set-string podAnnotations\.(\w+)=(\w+)", page)
    before = stage_values("multi-node")
    after: Document = merged(before, {"podAnnotations": {name: value}})
    changed = [
        new for old, new in zip(documents(before), documents(after), strict=True) if old != new
    ]
    assert [item["kind"] for item in changed] == ["RayService"]
    cluster = changed[0]["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all(g["template"]["metadata"]["annotations"][name] == value for g in groups)
