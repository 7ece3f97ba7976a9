"""Three Ray nodes with their own addresses, in network namespaces: the death of a whole node loses
nothing.

The head runs no replicas, as in production. Clients connect through either of the other two nodes.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from scripts.chaos_testing.parts import Parts
from scripts.chaos_testing.traffic import Told
from serve_app.cli.serve_api import application_status
from serve_app.local import processes
from serve_app.local.service import merged
from tests.running_time import RunningTime
from tests.service.disturbance import Towards, on_disk, simulated_text, under, whole_again
from tests.service.nodes import Nodes
from tests.service.services import CONFIG, Services, limited
from tests.service.support import CHAT, Running, asking, replicas
from tests.service.test_autoscaling import follow_the_queue
from tests.waiting import until

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(1200)]
TOKENS = 600  # 15 s
MANY = 24
"""Streams; of seven in one ingress, the load bound leaves none of three workers without one."""
GCS_HANGS_S, AFTERWARDS_S = 10.0, 3.0


def every_node(nodes: Nodes, *numbers: int) -> Towards:
    """Connects to one node after the other, as a load balancer or a name with several addresses
    does.
    """
    urls = itertools.cycle(httpx.URL(nodes.url(number)) for number in numbers or (1, 2))
    return Towards(lambda: next(urls))


def serve_is_back(nodes: Nodes) -> None:
    dashboard = nodes.service.dashboard_url
    found = until("Serve is back", lambda: application_status(dashboard).get("deployments"))
    assert set(found) == {"Ingress", "Worker"}


@pytest.fixture(scope="module")
def nodes(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head without capacity, and two nodes, neither of which has capacity for everything."""
    services.end()  # memory is for one service
    made = Nodes(tmp_path_factory.mktemp("nodes"), [(0, 0), (3, 0), (3, 0)])
    made.up()
    try:
        # One ingress on each: were both on the node that dies, a worker might take the other's last
        # CPU before them.
        one_each = {"ingress": {"max_replicas_per_node": 1}, "auth": {"required": False}}
        made.deploy(CONFIG, merged(limited("simulated", outage=True), one_each))
        yield made
    finally:
        made.down()


@pytest.fixture
def cluster(nodes: Nodes) -> Iterator[Running]:
    """The service through the last node, with all replicas ready before each test."""
    nodes.wait_joined()
    running = Running(nodes.service)
    whole_again(running, 3)
    for number in (1, 2):
        until(f"node {number} answers", partial(ready, nodes.url(number)))
    yield running
    running.close()


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def gcs_of(nodes: Nodes) -> int:
    """The process of Ray's GCS."""
    (gcs,) = [
        pid
        for pid in nodes.hosts[0].pids()
        if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return gcs


@pytest.mark.nightly  # a release property
def test_replicas_live_on_both_nodes_and_each_node_answers(nodes: Nodes, cluster: Running) -> None:
    places = {replica["node_ip"] for replica in replicas(nodes.service.dashboard_url)}
    assert places == {host.address for host in nodes.hosts[1:]}


@pytest.mark.nightly  # a release property
def test_engines_follow_the_queue_on_both_nodes(nodes: Nodes, cluster: Running) -> None:
    """Each node has room for two of the three engines beside its ingress."""
    ways = [Running(replace(nodes.service, url=nodes.url(number))) for number in (1, 2)]
    assert follow_the_queue(cluster, ways) == {host.address for host in nodes.hosts[1:]}
    for way in ways:
        way.close()


@pytest.mark.parametrize(
    "kind", ["dies", pytest.param("is cut off for 20 s", marks=pytest.mark.nightly)]
)
def test_streams_outlive_a_node_that(nodes: Nodes, cluster: Running, kind: str) -> None:
    async def strike(parts: Parts, told: list[Told]) -> None:
        if kind == "dies":
            await asyncio.to_thread(nodes.hosts[1].kill)
            return
        nodes.hosts[1].cut()
        try:
            await asyncio.sleep(20)
        finally:
            nodes.hosts[1].mend()

    try:
        # Only silence tells of a cut.
        ways, silent_s = every_node(nodes), 60 if kind == "dies" else 6
        told = under(
            cluster, strike, simulated_text, TOKENS, MANY, transport=ways, silent_s=silent_s
        )
    finally:
        if kind == "dies":
            nodes.start_node(1)
    assert any(one.breaks for one in told), "nobody was connected to the node"
    assert max(int(one.state["attempts"]) for one in told) >= 2, "nothing ran on the node"


@pytest.mark.nightly  # a release property
def test_a_redis_that_restarts_takes_rays_head_with_it_and_no_stream(
    nodes: Nodes, cluster: Running
) -> None:
    """Ray's GCS (2.60) does not connect again: it ends, and whoever looks after the head starts it
    anew.
    """
    gcs = gcs_of(nodes)

    async def strike(parts: Parts, told: list[Told]) -> None:
        (redis,) = parts.pids("redis")
        await asyncio.to_thread(on_disk, cluster)
        parts.kill(redis)
        await asyncio.sleep(8)
        await asyncio.to_thread(parts.service.restart_redis)

    under(cluster, strike, simulated_text, TOKENS, count=12, transport=every_node(nodes))
    until("the GCS ends", lambda: not processes.is_alive(gcs))
    nodes.hosts[0].kill()
    nodes.start_head()
    serve_is_back(nodes)


@pytest.mark.nightly  # a release property
def test_a_head_that_dies_disturbs_no_stream(nodes: Nodes, cluster: Running) -> None:
    async def strike(parts: Parts, told: list[Told]) -> None:
        await asyncio.to_thread(nodes.hosts[0].kill)
        await asyncio.sleep(2)
        await asyncio.to_thread(nodes.start_head)

    under(cluster, strike, simulated_text, TOKENS, count=12, transport=every_node(nodes))
    serve_is_back(nodes)


async def slowest_s(nodes: Nodes, seconds: float, running: RunningTime) -> dict[str, float]:
    """The longest times of new requests, ten a second, on new connections to one node after the
    other. No request waits for an earlier one.
    """
    took_s = {"GET /readyz": 0.0, f"POST {CHAT}": 0.0}

    async def ask(http: httpx.AsyncClient, name: str) -> None:
        began_s = running.now_s()
        method, path = name.split()
        body = asking(tokens=4) if method == "POST" else None
        asked = await http.request(method, path, json=body)
        assert asked.status_code == 200, asked.text
        took_s[name] = max(took_s[name], running.now_s() - began_s)

    until_s = time.monotonic() + seconds
    async with (
        httpx.AsyncClient(
            base_url=nodes.service.url, transport=every_node(nodes), timeout=60
        ) as http,
        asyncio.TaskGroup() as group,
    ):
        while time.monotonic() < until_s:
            for name in took_s:
                group.create_task(ask(http, name))
            await asyncio.sleep(0.2)
    return took_s


def longest_pause_s(told: list[Told], from_s: float, to_s: float) -> float:
    """The longest time without an event in which a stream that had not ended was."""
    return max(
        min(later_s, to_s) - max(earlier_s, from_s)
        for one in told
        for earlier_s, later_s in itertools.pairwise(one.arrivals_s)
        if later_s > from_s and earlier_s < to_s
    )


@pytest.mark.clock
def test_a_gcs_that_hangs_holds_up_no_stream_and_no_request(nodes: Nodes, cluster: Running) -> None:
    """It answers nobody, and its connections stay: nobody is told."""
    gcs = gcs_of(nodes)
    found: dict[str, dict[str, float]] = {}
    between_s: list[float] = []

    async def strike(parts: Parts, told: list[Told]) -> None:
        between_s.extend((time.monotonic(), running.now_s()))
        parts.send(gcs, signal.SIGSTOP)
        try:
            found["meanwhile"] = await slowest_s(nodes, GCS_HANGS_S, running)
        finally:
            parts.send(gcs, signal.SIGCONT)
        found["afterwards"] = await slowest_s(nodes, AFTERWARDS_S, running)
        between_s.extend((time.monotonic(), running.now_s()))

    with RunningTime() as running:
        told = under(cluster, strike, simulated_text, TOKENS, count=12, transport=every_node(nodes))
    from_s, ran_from_s, to_s, ran_to_s = between_s
    stood_s = (to_s - from_s) - (ran_to_s - ran_from_s)
    pause_s = longest_pause_s(told, from_s, to_s) - stood_s
    print(f"GCS stopped for {GCS_HANGS_S:g} s: longest pause {pause_s:.2f} s, longest {found}")
    assert not any(one.breaks for one in told if one.streamed)
    # What waits for the GCS takes as long as it hangs; a busy machine alone takes its time, too.
    assert pause_s < GCS_HANGS_S / 2
    assert max(took_s for times in found.values() for took_s in times.values()) < GCS_HANGS_S / 2
