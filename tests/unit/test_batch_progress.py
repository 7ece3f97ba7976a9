"""What the metrics say of batches: bounded, and true."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from serve_app.batches.progress import Pace, Progress, shown
from serve_app.batches.record import BatchState
from serve_app.observability.ingress_metrics import BatchTelemetry

RUNS = BatchState.IN_PROGRESS


def of(batch_id: str, state: BatchState = RUNS, spare_s: float = 1.0, **more: Any) -> Progress:
    return Progress(
        batch_id, state, **{"in_flight": 2, "left": 7, "paused": False, **more}, spare_s=spare_s
    )


def test_the_pace_counts_only_the_time_in_which_lines_ran() -> None:
    pace = Pace()
    assert pace.needed_s(10, 0.0) == 0, "nobody knows"
    pace.runs(True, 100.0)
    pace.runs(True, 110.0)
    assert pace.needed_s(10, 120.0) == 0, "still nobody"
    pace.done = 5
    assert pace.needed_s(10, 120.0) == 40, "5 lines in 20 s"
    pace.runs(False, 120.0)
    assert pace.needed_s(10, 50_000.0) == 40, "then its window was closed"
    pace.runs(True, 50_000.0)
    assert pace.needed_s(10, 50_020.0) == 80


def test_lines_and_time_of_what_is_ending_do_not_count() -> None:
    batches, lines, spare_s = shown(
        [
            of("runs", spare_s=-5.0),
            of("closed", paused=True, in_flight=0),
            of("new", BatchState.VALIDATING, in_flight=0, left=0),
            of("ends", BatchState.FINALIZING, spare_s=-9.0),
            of("cancelled", BatchState.CANCELLING, spare_s=-9.0),
        ]
    )
    states = {"in_progress": 2, "validating": 1, "finalizing": 1, "cancelling": 1}
    assert batches == states
    assert lines == {"in_flight": 2, "waiting": 5, "paused": 7}
    assert spare_s == {"runs": -5.0, "closed": 1.0, "new": 1.0}


def test_only_the_nearest_twenty_are_named_and_no_series_stays() -> None:
    registry = CollectorRegistry()
    telemetry = BatchTelemetry(registry)

    def named(name: str) -> set[str]:
        samples = [one for family in registry.collect() for one in family.samples]
        return {label for one in samples if one.name == name for label in one.labels.values()}

    for first in (0, 500):
        telemetry.show(*shown(of(str(n), spare_s=float(n)) for n in range(first + 99, first, -1)))
        expected = {str(first + n) for n in range(1, 21)}
        assert named("hermes_batch_spare_seconds") == expected
    telemetry.done("completed", 3)
    telemetry.clear()
    for name in ("hermes_batches", "hermes_batch_lines", "hermes_batch_spare_seconds"):
        assert named(name) == set()
    assert named("hermes_batch_lines_done_total") == {"completed", "failed", "expired", "cancelled"}
    done = registry.get_sample_value("hermes_batch_lines_done_total", {"outcome": "completed"})
    assert done == 3
