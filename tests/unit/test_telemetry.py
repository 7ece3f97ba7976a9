"""Metrics: every reason has a series, and the merged page counts nothing twice."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from serve_app.contract import Reason, State
from serve_app.observability.metrics import Telemetry
from serve_app.observability.metrics_pages import merge_pages, queue_gauges
from tests.tables import each

ROOT = Path(__file__).parents[2]
GROUPS = ("process", "activity", "order", "tenants", "batches", "queue", "redis", "retained")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(page: bytes) -> Samples:
    """Every sample by name and labels; a doubled one fails."""
    found: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} stands twice"
            found[key] = sample.value
    return found


def worked(times: int) -> Telemetry:
    telemetry = Telemetry()
    for _ in range(times):
        telemetry.count("hermes_requests_admitted", "standard")
        telemetry.observe("hermes_queue_wait_time_seconds", 0.3, "standard")
        telemetry.count("hermes_attempts", "first")
        telemetry.observe("hermes_time_to_first_token_seconds", 0.02, "standard")
        telemetry.tokens.output(1, None)
        telemetry.tokens.output(1, 0.004)
        telemetry.tokens.prompt(5)
        telemetry.observe("hermes_batch_processing_time_seconds", 0.5, "standard")
        telemetry.count("hermes_requests_ended", "standard", State.COMPLETED, "")
    telemetry.set("hermes_in_flight_requests", times)
    return telemetry


def test_a_time_between_tokens_is_in_the_bucket_of_its_bound_and_in_all_above() -> None:
    telemetry = Telemetry()
    telemetry.tokens.prompt(7)
    telemetry.tokens.output(3, None)
    for gap_s in (0.005, 0.0051, 9.0):
        telemetry.tokens.output(1, gap_s)
    found = {
        (name.removeprefix("hermes_"), *(value for _, value in labels)): value
        for (name, labels), value in samples(telemetry.page()).items()
        if name.startswith(("hermes_tokens", "hermes_inter_token"))
    }
    below = "inter_token_time_seconds_bucket"
    assert [found[below, le] for le in ("0.002", "0.005", "0.01", "5.0", "+Inf")] == [0, 1, 2, 2, 3]
    assert found["inter_token_time_seconds_count",] == 3
    assert round(found["inter_token_time_seconds_sum",], 4) == 9.0101
    assert (found["tokens_total", "prompt"], found["tokens_total", "output"]) == (7, 6)


def test_every_sample_of_a_merged_page_names_its_replica() -> None:
    pages = {"a": worked(1).page(), "b": worked(2).page()}
    merged = samples(merge_pages(pages, CollectorRegistry()))
    expected: Samples = {}
    for replica, page in pages.items():
        for (name, labels), value in samples(page).items():
            expected[name, tuple(sorted([*labels, ("replica", replica)]))] = value
    former = {key: value for key, value in merged.items() if key not in expected}
    assert merged == expected | former
    assert {name for name, _ in former} == {"hermes_loop_held_total", "hermes_journal_kept_bytes"}


def test_a_renamed_metric_is_shown_under_its_former_name_too() -> None:
    """Also beside the page of a replica of an older version, which has only the former name."""
    old = b"# TYPE hermes_loop_held_total counter\nhermes_loop_held_total 3\n"
    telemetry = Telemetry()
    telemetry.count("hermes_event_loop_blocks")
    gauges = queue_gauges({}, kept_bytes=(5, 9))
    page = merge_pages({"new": telemetry.page(), "old": old}, gauges)
    found = samples(page)
    held = {key: value for key, value in found.items() if key[0] == "hermes_loop_held_total"}
    assert held == {
        ("hermes_loop_held_total", (("replica", replica),)): value
        for replica, value in (("new", 1), ("old", 3))
    }
    assert found["hermes_event_loop_blocks_total", (("replica", "new"),)] == 1
    assert found["hermes_kept_answers_bytes", ()] == found["hermes_retained_answers_bytes", ()] == 5
    text = b"# HELP hermes_kept_answers_bytes Former name of "
    assert text + b"hermes_retained_answers_bytes, for" in page


def test_the_queue_belongs_to_no_replica_and_is_counted_once() -> None:
    page = merge_pages(
        {"a": worked(1).page(), "b": worked(1).page()}, queue_gauges({"batch": (1, 2, 3, 4.5)})
    )
    queue = {
        key: value
        for key, value in samples(page).items()
        if key[0].startswith("hermes_queue_") and "_wait_" not in key[0]
    }
    label = (("class", "batch"),)
    assert queue == {
        ("hermes_queue_depth", label): 1,
        ("hermes_queue_claimed", label): 2,
        ("hermes_queue_limit", label): 3,
        ("hermes_queue_oldest_age_seconds", label): 4.5,
    }


@each("reason", Reason)
def test_every_reason_can_be_counted(reason: Reason) -> None:
    telemetry = Telemetry()
    telemetry.count("hermes_requests_refused", reason)
    telemetry.count("hermes_requests_ended", "batch", State.FAILED, reason)
    found = samples(telemetry.page())
    assert found["hermes_requests_refused_total", (("reason", reason.value),)] == 1
    labels = (("class", "batch"), ("reason", reason.value), ("state", "failed"))
    assert found["hermes_requests_ended_total", labels] == 1


def test_every_metric_is_counted_somewhere_and_nothing_else_is() -> None:
    called = re.compile(r'\.(?:of|count|observe|set)\(\s*"(hermes_\w+)"')
    code = [path for room in ("serve_app", "workers") for path in (ROOT / room).rglob("*.py")]
    counted = {name for path in code for name in called.findall(path.read_text())}
    described = tomllib.loads((ROOT / "serve_app/observability/metrics.toml").read_text())
    assert counted == {name for group in GROUPS for name in described[group]}


def test_calls_at_home_and_elsewhere_are_counted_from_the_first_on() -> None:
    telemetry = Telemetry()
    labels = [("hermes_calls_total", (("placed", placed),)) for placed in ("home", "overflow")]
    assert [samples(telemetry.page())[label] for label in labels] == [0, 0]
    for calls in ({True: 3, False: 0}, {True: 5, False: 1}, {True: 5, False: 1}):
        telemetry.called(calls)
    assert [samples(telemetry.page())[label] for label in labels] == [5, 1]
