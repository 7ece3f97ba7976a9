"""The chart renders for every stage, and `helm lint` accepts it."""

from __future__ import annotations

import itertools
from typing import Any

import helm_python

from tests.chart.charts import (
    CHART,
    EVERYTHING,
    NAMED,
    STAGES,
    documents,
    merged,
    rendered,
    stage_values,
)
from tests.tables import each


@each("stage", STAGES)
def test_every_stage_passes_the_strict_lint(stage: str) -> None:
    report = helm_python.lint(str(CHART), stage_values(stage), strict=True, kube_version="v1.34.0")
    assert report["errors"] == []
    # Severity 1 is advice: Helm would like an icon.
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@each("stage, changes", itertools.product(STAGES, ({}, EVERYTHING)))
def test_no_key_stands_twice_and_no_value_is_null(stage: str, changes: dict[str, Any]) -> None:
    def check(node: object, path: str) -> None:
        assert node is not None, path
        if isinstance(node, dict):
            for key, value in node.items():
                check(value, f"{path}.{key}")
        if isinstance(node, list):
            for index, value in enumerate(node):
                check(value, f"{path}[{index}]")

    for document in documents(merged(stage_values(stage), changes)):
        check(document, document["kind"])


def test_two_renderings_are_the_same() -> None:
    # GitOps compares: nothing may be random or hold the time.
    first = dict(rendered(NAMED))
    chart = helm_python.Chart.load(str(CHART))
    assert chart.render(NAMED, name="hermes", namespace="prod") == first
