"""Real services for the tests: vLLM on the CPU, Ray Serve, Redis, HAProxy; one at a time, each
started once.

A service takes about a minute to start, so tests share them: most use `service`, the others
`simulated` or `tensor_parallel`. Tests are grouped by service, and tests that disturb a service run
last in their group. A test with the mark `outage` gets the service with production's limits.
Clusters of Ray nodes are shared in the same way.

While you write tests, `HERMES_KEEP_SERVICES=/tmp/some/folder` keeps the services there for the next
run; stop one with `scripts/quickstart --down --state-dir /tmp/some/folder/shared`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import bpe_model, runs
from tests.service.nodes import Nodes
from tests.service.services import Services
from tests.service.support import Running

_FIXTURES = (
    "service",
    "simulated",
    "flooded",
    "embedding",
    "agents",
    "tensor_parallel",
    "nodes",
)
_services: Services | None = None


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    """Starts services; stops the last one at the end."""
    global _services
    kept = os.environ.get("HERMES_KEEP_SERVICES")
    with tempfile.TemporaryDirectory(
        prefix=runs.folder_prefix(), ignore_cleanup_errors=True
    ) as folder:
        _services = Services(Path(kept or folder), keep=bool(kept))
        try:
            yield _services
        finally:
            _services.end()
            _services = None


@pytest.fixture
def outage(request: pytest.FixtureRequest) -> bool:
    """Whether the test is about an outage or a hang."""
    return request.node.get_closest_marker("outage") is not None


@pytest.fixture
def service(services: Services, outage: bool) -> Running:
    """HAProxy, two ingress replicas, two engine replicas."""
    return services.get("shared", outage)


@pytest.fixture
def simulated(services: Services, outage: bool) -> Running:
    """HAProxy, two ingress replicas that require API keys, three replicas of the simulated engine,
    whose text a prompt alone decides.
    """
    return services.get("simulated", outage)


@pytest.fixture
def flooded(services: Services) -> Running:
    """As `service`, but that API keys are required and connections have their usual limits."""
    return services.get("flooded")


@pytest.fixture
def embedding(services: Services) -> Running:
    """As `flooded`, with a model that embeds."""
    return services.get("embedding")


@pytest.fixture
def agents(services: Services) -> Running:
    """As `service`, with a model that plays scripts and has a context for the prompts of agents."""
    if services.kind != "agents":
        bpe_model.make()
    return services.get("agents")


@pytest.fixture
def tensor_parallel(services: Services) -> Running:
    """Ray's Python proxy, two ingress replicas, one engine replica over four processes."""
    return services.get("tensor-parallel")


@pytest.fixture
def gpu_machine(services: Services) -> Nodes:
    """One Ray node that was told of four GPUs, with nothing deployed."""
    return services.nodes("gpu-machine")


@pytest.fixture
def gpu_nodes(services: Services) -> Nodes:
    """A head without GPUs and three nodes that were told of four each, with nothing deployed."""
    return services.nodes("gpu-nodes")


@pytest.fixture
def alone(services: Services) -> None:
    """Nothing else runs: memory is for one service."""
    services.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group by service, what disturbs it last; starting a service counts as part of the first
    test's time.
    """

    order = [*_FIXTURES, "gpu_machine", "gpu_nodes", "alone"]

    def place(item: pytest.Item) -> tuple[int, bool, bool]:
        names = getattr(item, "fixturenames", ())
        used = max((n for n, name in enumerate(order, 1) if name in names), default=0)
        has = item.get_closest_marker
        return used, has("outage") is not None, used > 0 and has("disturbs") is not None

    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in mine:
        if item.get_closest_marker("nightly") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1200))
    positions = [index for index, item in enumerate(items) if item in set(mine)]
    for index, item in zip(positions, sorted(mine, key=place), strict=True):
        items[index] = item


def pytest_configure(config: pytest.Config) -> None:
    for mark in (
        "disturbs: kills a part of the shared service; runs after the others",
        "outage: needs production's limits, because what it does must be noticed",
    ):
        config.addinivalue_line("markers", mark)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if (
        report.failed
        and _services is not None
        and set(_FIXTURES) & set(getattr(item, "fixturenames", ()))
    ):
        report.sections.append(("the ends of the service's logs", _services.logs()))
        _services.broken |= item.get_closest_marker("disturbs") is not None
    return report
