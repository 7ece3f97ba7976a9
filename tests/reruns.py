"""A pytest plugin: a test that uses a real Redis, service or engine, or that a clock decides, is
run once more if it failed, and what passed then is printed apart and kept in a file.

Any other test is pure and never run again: it fails for a reason. Nor does a rerun excuse a test:
one that appears twice among twenty runs is to be repaired, or marked `clock`. With `--reruns 0`
none is run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.stalls import Stalled, Stalls

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".hermes" / "reruns.jsonl"
REAL = (
    "journal",
    "engine",
    "service",
    "chart/test_first_container.py",
    "chart/test_pods_end.py",
    "chart/test_redis_live.py",
    "chart/test_redis_start.py",
)
"""Folders and files whose tests use real processes."""
_FAILURE_CHARS = 4_000

_stalls = pytest.StashKey[Stalls]()
_before = pytest.StashKey[Stalled]()
_failed_once: dict[str, dict[str, Any]] = {}
_passed_then: list[dict[str, Any]] = []


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stalls] = Stalls()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("reruns") == 0:  # a marker would count for more
        return
    real = {Path(__file__).parent / name for name in REAL}
    for item in items:
        if real & {item.path, *item.path.parents} or item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_before] = item.config.stash[_stalls].so_far()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        stalled = item.config.stash[_stalls].so_far() - item.stash[_before]
        report.sections.append(("stalls during the test", str(stalled)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes what failed once, and what passed then."""
    if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # pytest-rerunfailures' own
        _failed_once[report.nodeid] = {
            "test": report.nodeid,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "phase": report.when,
            "failure": _failure(report.longreprtext),
            "stalls": dict(report.sections).get("stalls during the test", ""),
            "load": os.getloadavg()[0],
        }
    elif report.when == "call" and report.passed and report.nodeid in _failed_once:
        _passed_then.append(_failed_once.pop(report.nodeid))


def _failure(text: str) -> str:
    """All that pytest says of the exceptions, which may have caused each other: the last one tells
    what an exception without a caller was ignored in.
    """
    told = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return "\n".join(told or [text])[-_FAILURE_CHARS:]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    # With pytest-xdist, results are gathered by its controller.
    if not _passed_then or hasattr(config, "workerinput"):
        return
    terminalreporter.section("passed at the second try", sep="=", yellow=True)
    for row in _passed_then:
        terminalreporter.line(f"{row['test']} ({row['phase']})")
        for line in row["failure"].splitlines():
            terminalreporter.line(f"    {line}")
        terminalreporter.line(f"    {row['stalls']} load={row['load']:.1f}")
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as kept:
        kept.writelines(json.dumps(row) + "\n" for row in _passed_then)
    terminalreporter.line(f"kept in {KEPT.relative_to(ROOT)}")
