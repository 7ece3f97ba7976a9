"""The job that `helm uninstall` runs first, against an API of Kubernetes' shape; and what the chart
says to an install onto remains.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.chart.charts import CHART, NAMED, STAGES, documents, merged, one, stage_values
from tests.chart.kubernetes_api import PLACE, Cluster, helm_on, serving
from tests.tables import each

DELETED = [f"DELETE {PLACE}"]


def there(**metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "hermes", "namespace": "prod", **metadata},
    }


def uninstall(cluster: Cluster, seconds: str = "100") -> subprocess.CompletedProcess[str]:
    given = {
        "HERMES_ACCOUNT": str(cluster.folder),
        "HERMES_RELEASE": "hermes",
        "HERMES_NAMESPACE": "prod",
        "HERMES_TIMEOUT_SECONDS": seconds,
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(cluster.port),
    }
    return subprocess.run(
        [sys.executable, str(CHART / "files" / "uninstall.py")],
        env={"PATH": os.environ["PATH"], **given},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_deletes_the_rayservice_and_waits_until_it_is_gone(tmp_path: Path) -> None:
    with serving(Cluster(tmp_path, there(), looks=2)) as cluster:
        done = uninstall(cluster)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("RayService hermes is gone\n")
    looks = [f"GET {PLACE}"] * 3
    assert cluster.asked[1:] == DELETED + looks, "two times it was still there"
    assert cluster.asked[0] == "DELETE /api/v1/namespaces/prod/pods/hermes-test"


def test_a_release_that_never_came_up_is_done_at_once(tmp_path: Path) -> None:
    with serving(Cluster(tmp_path)) as cluster:
        done = uninstall(cluster)
    assert done.returncode == 0, done.stderr
    assert cluster.asked[1:] == [*DELETED, f"GET {PLACE}"]


def test_what_does_not_go_is_told_and_bounded_in_time(tmp_path: Path) -> None:
    with serving(Cluster(tmp_path, there(), looks=1000)) as cluster:
        done = uninstall(cluster, "0.5")
    assert done.returncode == 1
    assert done.stderr.startswith("not done after 0.5 s: RayService hermes is being deleted, but ")
    assert "ray.io/rayservice-finalizer still holds it" in done.stderr
    assert done.stderr.count("\n") == 1


def test_missing_rights_are_told_at_once(tmp_path: Path) -> None:
    with serving(Cluster(tmp_path, there(), forbidden=True)) as cluster:
        done = uninstall(cluster)
    assert done.returncode == 1
    assert "the Kubernetes API answers 403: hermes-uninstall cannot DELETE" in done.stderr
    assert (done.stderr.count("\n"), len(cluster.asked)) == (1, 1)


def test_an_api_that_cannot_be_reached_is_told_with_the_value_to_look_at(tmp_path: Path) -> None:
    with serving(Cluster(tmp_path)) as cluster:
        pass
    done = uninstall(cluster, "0.5")
    assert done.returncode == 1
    values = "networkPolicy.apiServerCidrs, networkPolicy.apiServerPorts"
    assert f"cannot be reached ({values}?)" in done.stderr


def test_nobody_else_is_taken_for_the_api(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with serving(Cluster(tmp_path, there())) as cluster, serving(Cluster(other)):
        (tmp_path / "ca.crt").write_text((other / "ca.crt").read_text())
        done = uninstall(cluster, "0.5")
    assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
    assert cluster.asked == []


@each("stage", STAGES)
def test_the_job_has_the_least_rights_and_only_while_it_runs(stage: str) -> None:
    objects = documents(stage_values(stage))
    of_hook = [item for item in objects if item["metadata"]["name"] == "hermes-uninstall"]
    hooks = {
        item["kind"]: item["metadata"]["annotations"]
        for item in of_hook
        if item["kind"] != "NetworkPolicy"
    }
    assert set(hooks) == {"ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Job"}
    for kind, said in hooks.items():
        assert said["helm.sh/hook"] == "pre-delete"
        assert said["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
        assert said["helm.sh/hook-weight"] == ("0" if kind == "Job" else "-1")
    role = one(of_hook, "Role")["rules"]
    assert role == [
        {
            "apiGroups": ["ray.io"],
            "resources": ["rayservices"],
            "resourceNames": ["hermes"],
            "verbs": ["get", "delete"],
        },
        {
            "apiGroups": [""],
            "resources": ["pods"],
            "resourceNames": ["hermes-test"],
            "verbs": ["delete"],
        },
    ]
    binding = one(of_hook, "RoleBinding")
    assert binding["roleRef"]["name"] == "hermes-uninstall"
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "hermes-uninstall", "namespace": "prod"}
    ]


def test_the_job_gets_what_the_script_asks_for_and_ends_before_helm_gives_up() -> None:
    objects = documents(merged(NAMED, {"uninstall": {"timeoutSeconds": 170}}))
    spec = one(objects, "Job")["spec"]
    assert (spec["activeDeadlineSeconds"], spec["backoffLimit"]) == (200, 0)
    assert spec["ttlSecondsAfterFinished"] >= 3600, "whoever comes back can still read its log"
    assert one(documents(NAMED), "Job")["spec"]["activeDeadlineSeconds"] < 300, "Helm's own"
    pod = spec["template"]["spec"]
    assert pod["serviceAccountName"] == "hermes-uninstall"
    variables = {item["name"]: item["value"] for item in pod["containers"][0]["env"]}
    assert variables == {
        "HERMES_RELEASE": "hermes",
        "HERMES_NAMESPACE": "prod",
        "HERMES_TIMEOUT_SECONDS": "170",
        "NVIDIA_VISIBLE_DEVICES": "void",
    }
    script = one(objects, "ConfigMap", "hermes-uninstall")["data"]["uninstall.py"]
    assert script.strip() == (CHART / "files" / "uninstall.py").read_text().strip()


def install(cluster: Cluster, **changes: Any) -> str:
    """What `helm install --dry-run=server` says, which asks the cluster."""
    try:
        chart = helm_python.Chart.load(str(CHART))
        helm_on(cluster).install(chart, "hermes", merged(NAMED, changes), dry_run="server")
    except helm_python.HelmError as error:
        return str(error)
    return ""


@each("going", [True, False])
def test_an_install_onto_remains_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, going: bool
) -> None:
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if going else {}
    with serving(Cluster(tmp_path, there(**metadata), looks=1000)) as cluster:
        said = install(cluster)
    assert ('the RayService "hermes" is still being deleted' in said) is going, said
    assert f"GET {PLACE}" in cluster.asked, said
