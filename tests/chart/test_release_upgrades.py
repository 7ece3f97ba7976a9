"""What a `helm upgrade` replaces: only pods that must change, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import helm_python
import yaml

from tests.chart.charts import (
    CHART,
    NAMED,
    Document,
    cluster_of,
    documents,
    merged,
    one,
    ray_groups,
    stage_values,
)
from tests.chart.test_refusals import refusal
from tests.tables import each

SCALING = {"settings.workers.autoscaling": {"min_replicas": 1, "max_replicas": 4}}


def seen_by_kuberay(values: Document) -> Document:
    """The cluster as KubeRay compares it: it leaves the counts out, since the autoscaler changes
    them.
    """
    cluster = cluster_of(documents(values))
    for group in cluster["workerGroupSpecs"]:
        for count in ("replicas", "minReplicas", "maxReplicas"):
            del group[count]
    return cluster


@each(
    "before, change",
    [
        ({}, {"settings.workers.replicas": 2}),
        (SCALING, {"settings.workers.autoscaling.max_replicas": 8}),
        ({}, {"ingressPods.replicas": 3}),
        ({}, {"settings.ingress.max_request_timeout_s": 7200}),
        ({}, {"image.tag": "0.3.0"}),
    ],
)
def test_other_pods_are_another_cluster(before: Document, change: Document) -> None:
    values = merged(NAMED, before)
    assert seen_by_kuberay(values) != seen_by_kuberay(merged(values, change))


@each(
    "change",
    [
        {"settings.model.name": "other"},
        {"settings.workers.max_running_requests": 32},
    ],
)
def test_settings_that_change_no_pod_are_taken_up_where_they_are(change: Document) -> None:
    assert seen_by_kuberay(NAMED) == seen_by_kuberay(merged(NAMED, change))


def test_with_pods_to_spare_another_bound_of_the_replicas_is_no_upgrade() -> None:
    before = merged(NAMED, SCALING, {"autoscaler.maxPods": 8})
    after = merged(before, {"settings.workers.autoscaling.max_replicas": 8})
    assert seen_by_kuberay(before) == seen_by_kuberay(after)
    for values in (before, merged(after, {"autoscaler.maxPods": 3})):
        assert ray_groups(documents(values))["engines"]["maxReplicas"] == 8


def test_another_version_of_the_chart_alone_restarts_nothing(tmp_path: Path) -> None:
    values = merged(NAMED, {"image.tag": "0.2.0"})
    folder = Path(shutil.copytree(CHART, tmp_path / "hermes-serve"))
    about = yaml.safe_load((folder / "Chart.yaml").read_text())
    (folder / "Chart.yaml").write_text(
        yaml.safe_dump({**about, "version": "9.9.9", "appVersion": "9.9.9"})
    )
    chart = helm_python.Chart.load(str(folder))
    rendered = chart.render(values, name="hermes", namespace="prod")
    texts = [text for path, text in rendered.items() if not path.endswith("NOTES.txt")]
    after = [item for text in texts for item in yaml.safe_load_all(text) if item]
    before = documents(values)
    assert (
        one(after, "ConfigMap", "hermes-redis")["metadata"]
        != one(before, "ConfigMap", "hermes-redis")["metadata"]
    )
    for kind, key in (("StatefulSet", "template"), ("RayService", "rayClusterConfig")):
        assert one(after, kind)["spec"][key] == one(before, kind)["spec"][key]


def test_a_release_may_move_from_one_gpu_stage_to_the_next() -> None:
    # Kubernetes lets nobody change these fields of a StatefulSet.
    def fixed(stage: str) -> Document:
        spec = one(documents(stage_values(stage)), "StatefulSet")["spec"]
        return {key: value for key, value in spec.items() if key not in ("replicas", "template")}

    assert fixed("single-gpu") == fixed("multi-gpu") == fixed("multi-node")


@each("path, place", [("upgrade.type", "/upgrade"), ("uninstall", "")])
def test_what_reuse_values_leaves_out_is_refused(path: str, place: str) -> None:
    # A template would take it for false, for no ports (which opens all) or end in Go's words.
    sentence = f"at '{place}': missing property '{path.split('.')[-1]}'"
    assert sentence in refusal(merged(NAMED, {path: None}))
