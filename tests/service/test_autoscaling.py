"""Ray Serve starts engines while requests wait, and ends them when there is nothing to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli import serve_api
from tests.service.disturbance import simulated_text, whole_again
from tests.service.services import PLACES, WORKERS
from tests.service.support import Running
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.disturbs]
SOON = {"upscale_delay_s": 2, "downscale_delay_s": 2}
"""Beside these, Serve takes up to 16 s to hear of the load."""
USERS = 3 * PLACES
START_S = 180


def running(service: Running, deployment: str) -> dict[str, str]:
    """The ids of the running replicas, each with its host; none while Serve builds the
    application.
    """
    status = serve_api.application_status(service.service.dashboard_url)
    found = status.get("deployments", {}).get(deployment, {}).get("replicas", [])
    return {one["replica_id"]: one["node_ip"] for one in found if one["state"] == "RUNNING"}


@contextmanager
def scaling(service: Running) -> Iterator[Callable[..., None]]:
    """Calling what it yields deploys the service with such an autoscaling."""
    dashboard = service.service.dashboard_url
    before = yaml.safe_load((Path(service.service.state_dir) / "serve.yaml").read_text())

    def deploy(**autoscaling: Any) -> None:
        document = deepcopy(before)
        (application,) = document["applications"]
        application["args"]["workers"]["autoscaling"] = {**SOON, **autoscaling}
        serve_api.with_scaling(application)
        serve_api.deploy(dashboard, document)

    try:
        yield deploy
    finally:
        serve_api.deploy(dashboard, before)
        whole_again(service, WORKERS)
        service.until_idle()


def test_engines_are_as_many_as_the_queue_needs_and_a_new_bound_replaces_none(
    simulated: Running,
) -> None:
    follow_the_queue(simulated, [simulated])


def follow_the_queue(service: Running, ways: Sequence[Running]) -> set[str]:
    """One engine becomes three, two and one again, while users ask through each of the `ways`; no
    answer is lost or another. Returns the hosts of the three.

    The target is above what an engine runs at a time: Serve's own policy would add none.
    """
    before = {name: running(service, name) for name in ("Worker", "Ingress")}
    enough = threading.Event()

    def asks(number: int) -> int:
        answers = 0
        while not enough.is_set():
            prompt = f"Question {number}.{answers}"
            way = ways[number % len(ways)]
            assert way.text(prompt, 100) == simulated_text(prompt, 100)
            answers += 1
        return answers

    def engines(count: int) -> dict[str, str] | None:
        found = running(service, "Worker")
        return found if len(found) == count else None

    def replaced(deployment: str, count: int) -> dict[str, str] | None:
        found = running(service, deployment)
        return found if len(found) == count and not found.keys() & before[deployment] else None

    with scaling(service) as deploy, ThreadPoolExecutor(USERS + 1) as threads:
        bounds = {"min_replicas": 1, "target_ongoing_requests": PLACES + 4}
        deploy(max_replicas=3, **bounds)
        until("one is left", lambda: replaced("Worker", 1), START_S)
        door = len(before["Ingress"])
        ingresses = until("ingresses run", lambda: replaced("Ingress", door), START_S)
        users = [threads.submit(asks, number) for number in range(USERS)]
        try:
            three = until("three run", lambda: engines(3), START_S)
            deploy(max_replicas=2, **bounds)
            two = until("two run", lambda: engines(2), START_S)
            assert two.keys() < three.keys()
            long = threads.submit(ways[0].text, "A long story", 3_000)
        finally:
            enough.set()
        assert all(user.result() > 1 for user in users), "none was lost"
        one = until("one runs", lambda: engines(1), START_S)
        assert long.result() == simulated_text("A long story", 3_000)
        assert one.keys() < two.keys()
        assert running(service, "Ingress") == ingresses
    return set(three.values())
