"""Alerts and dashboard use only metrics that the service exports, with labels that these have."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from serve_app.contract import Reason
from serve_app.loops import Loops
from serve_app.observability.ingress_metrics import BatchTelemetry, OrderTelemetry, TenantTelemetry
from serve_app.observability.metrics import Activity, Telemetry
from serve_app.observability.metrics_pages import queue_gauges
from serve_app.policy.classes import CLASSES
from tests.chart.charts import CHART, EVERYTHING, NAMED, ROOT, documents, merged, one, program
from tests.tables import each

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())

# Of redis_exporter, which is no Python package.
OF_THE_EXPORTER = {
    "redis_up",
    "redis_memory_used_bytes",
    "redis_memory_max_bytes",
    "redis_commands_processed_total",
    "redis_aof_current_size_bytes",
}
ALERTS_TEST = ROOT / "tests" / "chart" / "alerts_test.yaml"
OF_THE_TARGET = {"namespace", "pod"}
VALUES = {
    "reason": {str(reason) for reason in Reason},
    "state": {"completed", "failed", "cancelled", "expired", "paused"},
    "kind": {"first", "retry", "prompt", "output"},
    "class": set(CLASSES),
}
"""The values of the labels whose values are few."""


def groups() -> list[dict[str, Any]]:
    """The rule groups as installed in the namespace `prod`."""
    values = merged(NAMED, EVERYTHING, {"monitoring": {"rules": {"runbookUrl": "https://runbook"}}})
    found: list[dict[str, Any]] = one(documents(values), "PrometheusRule")["spec"]["groups"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"]]


def _expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


EXPRESSIONS = list(_expressions())


def own_metrics() -> dict[str, set[str]]:
    """The service's metrics, each with its labels."""
    telemetry = Telemetry()
    OrderTelemetry(telemetry.registry, TenantTelemetry(telemetry.registry))
    BatchTelemetry(telemetry.registry)
    Activity(telemetry.registry, Loops())
    registries: list[CollectorRegistry] = [telemetry.registry, queue_gauges({}, (0, 0), (0, 0))]
    found = {}
    for registry in registries:
        for collector in registry._collector_to_names:
            shown = {
                name
                for family in collector.collect()
                for sample in family.samples
                for name in sample.labels
            }
            its = getattr(collector, "_labelnames", shown)
            labels = {*its, "replica", *OF_THE_TARGET}
            for name in registry._collector_to_names[collector]:
                found[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    return found


def exported_by(package: str, folder: str, pattern: str) -> set[str]:
    """The metric names in a package's own sources."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    files = Path(spec.submodule_search_locations[0], folder).rglob("*.py")
    return {name for file in files for name in re.findall(pattern, file.read_text())}


@each("where, expression", EXPRESSIONS)
def test_every_metric_is_one_that_is_exported(where: str, expression: str) -> None:
    names = set(re.findall(r"\b(?:hermes|ray|redis)_\w+|\bvllm:\w+", expression))
    assert names, "an expression about nothing of ours"
    known = set(own_metrics()) | OF_THE_EXPORTER
    of_vllm = exported_by("vllm", "v1/metrics", r'"(vllm:\w+)"')
    of_ray = exported_by("ray", "dashboard/modules/metrics", r"\b(ray_[a-z_]+)")
    for name in names:
        histogram = re.sub("_(sum|count|bucket)$", "", name)
        bare = name.removesuffix("_total")
        assert name in known or name in of_ray or {name, bare, histogram} & of_vllm, name


@each("where, expression", EXPRESSIONS)
def test_every_label_is_one_that_the_metric_has(where: str, expression: str) -> None:
    metrics = own_metrics()
    for name, selector in re.findall(r"\b(hermes_\w+)(?:\{([^}]*)\})?", expression):
        pairs = re.findall(r'(\w+)\s*(?:=~|=|!=|!~)\s*"([^"]*)"', selector)
        assert {label for label, _ in pairs} <= metrics[name], name
        for label, value in pairs:
            assert value in VALUES.get(label, {value}), (name, label)


def test_alerts_have_no_link_where_the_runbook_has_no_address() -> None:
    rule = one(documents(merged(NAMED, EVERYTHING)), "PrometheusRule")
    found = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    assert found
    assert not any("runbook_url" in each["annotations"] for each in found)


def test_every_alert_leads_to_its_chapter_of_the_runbook_and_every_chapter_has_an_alert() -> None:
    chapters = re.findall(r"^## (.*)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules()}
    assert links == {name: f"https://runbook#{name.lower()}" for name in chapters}
    assert len(chapters) == len(links)


def test_every_chapter_of_the_runbook_names_panels_that_the_dashboard_has() -> None:
    _, *chapters = (ROOT / "docs" / "runbook.md").read_text().split("\n## ")
    words = [re.sub(r"\*\*.*?\*\*", "", " ".join(chapter.split())) for chapter in chapters]
    named = {name for text in words for name in re.findall(r"\*([^*]+)\*", text)}
    assert named
    assert named <= {panel["title"] for panel in DASHBOARD["panels"]}


def test_an_alert_asks_only_about_its_own_release() -> None:
    # A second release under the same Prometheus would hide the silence of this one.
    for rule in rules():
        selectors = re.findall(r"\b(?:(?:hermes|redis)_\w+|vllm:\w+)(\{[^}]*\})?", rule["expr"])
        assert selectors, rule["alert"]
        assert all('namespace="prod"' in selector for selector in selectors), rule["alert"]


def test_redis_is_watched_only_through_its_exporter() -> None:
    values = merged(NAMED, EVERYTHING, {"redis": {"internal": {"exporter": {"enabled": False}}}})
    assert not re.search(r"(?<!hermes_)redis_", str(one(documents(values), "PrometheusRule")))


def test_the_dashboard_that_is_installed_is_whole_and_found_by_grafana() -> None:
    item = one(documents(merged(NAMED, EVERYTHING)), "ConfigMap", "hermes-dashboard")
    assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(item["data"]["hermes-serve.json"]) == DASHBOARD
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))


def _promtools(test: dict[str, Any], known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One test of alerts_test.yaml as promtool reads it."""

    def fired(alert: str, labels: dict[str, str]) -> dict[str, Any]:
        rule, notes = known[alert], {"summary": labels.pop("summary")}
        return {
            "exp_labels": {**rule["labels"], "namespace": "prod", **labels},
            "exp_annotations": {**rule["annotations"], **notes},
        }

    looks = [
        {"eval_time": at, "alertname": name, "exp_alerts": [fired(name, one) for one in expected]}
        for (at, name), expected in ((key.split(), told) for key, told in test["alerts"].items())
    ]
    series = [{"series": name, "values": values} for name, values in test["series"].items()]
    return {"interval": "1m", "input_series": series, "alert_rule_test": looks}


def promtool(folder: Path, *words: str, **files: dict[str, Any]) -> None:
    """Let promtool check what is written into the files."""
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    command = [program("promtool", "prometheus"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_when_it_should(tmp_path: Path) -> None:
    known = {rule["alert"]: rule for rule in rules()}
    tests = [_promtools(test, known) for test in yaml.safe_load(ALERTS_TEST.read_text())]
    assert known.keys() == {look["alertname"] for t in tests for look in t["alert_rule_test"]}
    of_promtool = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": tests}
    words = ("test", "rules", "test.yaml")
    promtool(tmp_path, *words, alerts={"groups": groups()}, test=of_promtool)


def test_prometheus_can_read_every_expression(tmp_path: Path) -> None:
    texts = [
        text.replace("$__rate_interval", "5m").replace("$namespace", "prod")
        for _, text in EXPRESSIONS
    ]
    records = [{"record": f"test:{number}", "expr": text} for number, text in enumerate(texts)]
    checked = {"groups": [{"name": "test", "rules": records}]}
    promtool(tmp_path, "check", "rules", "rules.yaml", rules=checked)
