"""Three Ray nodes with addresses of their own, in network namespaces: what the death of a whole node loses (nothing).

The head runs no replicas, as in production. Clients come by way of either of the other two nodes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scripts.disorder.parts import Parts
from scripts.disorder.traffic import Told
from scripts.local import processes
from scripts.local.nodes import Nodes
from scripts.local.service import application_status, merged
from tests.service.disturbance import simulated_text, under, whole_again
from tests.service.services import CONFIG, KINDS, Services
from tests.service.support import Running, until

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(600)]
TOKENS = 600  # 15 s


class EveryNode(httpx.AsyncBaseTransport):
    """Connects to one node after the other, as a load balancer or a name with several addresses does."""

    def __init__(self, nodes: Nodes, numbers: list[int]) -> None:
        self._hosts = itertools.cycle(nodes.hosts[number].address for number in numbers)
        self._transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(host=next(self._hosts))
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        await self._transport.aclose()


@pytest.fixture(scope="module")
def nodes(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head without room, and two nodes of which neither has room for everything."""
    services.end()  # memory is for one service
    made = Nodes(tmp_path_factory.mktemp("nodes"), [(0, 0), (3, 0), (3, 0)])
    made.up()
    try:
        # One ingress on each: were both on the node that dies, a worker might take the other's last CPU before them.
        made.deploy(CONFIG, merged(KINDS["simulated"]["args"], {"ingress": {"max_replicas_per_node": 1}}))
        yield made
    finally:
        made.down()


@pytest.fixture
def cluster(nodes: Nodes) -> Iterator[Running]:
    """The service, by way of the last node, whole before each test."""
    running = Running(nodes.service)
    whole_again(running, 3)
    for number in (1, 2):
        until(f"node {number} answers", lambda n=number: ready(nodes.url(n)))
    yield running
    running.close()


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_replicas_live_on_both_nodes_and_each_node_answers(nodes: Nodes, cluster: Running) -> None:
    deployed = application_status(nodes.service.dashboard_url)["deployments"]
    places = {replica["node_ip"] for name in deployed for replica in deployed[name]["replicas"]}
    assert places == {host.address for host in nodes.hosts[1:]}


@pytest.mark.parametrize("kind", ["dies", "is cut off for 20 s"])
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
        told = under(cluster, strike, simulated_text, TOKENS, count=12, transport=EveryNode(nodes, [1, 2]))
    finally:
        if kind == "dies":
            nodes.start_node(1)
    assert any(one.breaks for one in told), "nobody was connected to the node"
    assert max(int(one.state["attempts"]) for one in told) >= 2, "nothing ran on the node"


def test_a_redis_that_restarts_takes_rays_head_with_it_and_no_stream(nodes: Nodes, cluster: Running) -> None:
    """Ray's GCS (2.60) does not connect again: it ends, and whoever looks after the head starts it anew."""
    (gcs,) = [pid for pid in nodes.hosts[0].pids() if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    async def strike(parts: Parts, told: list[Told]) -> None:
        (redis,) = parts.pids("redis")
        parts.kill(redis)
        await asyncio.sleep(8)
        await asyncio.to_thread(parts.restart_redis)

    under(cluster, strike, simulated_text, TOKENS, count=12, transport=EveryNode(nodes, [1, 2]))
    until("the GCS ends", lambda: not processes.is_alive(gcs))
    nodes.hosts[0].kill()
    nodes.start_head()
    deployed = until("Serve is back", lambda: application_status(nodes.service.dashboard_url).get("deployments"))
    assert set(deployed) == {"Ingress", "Worker"}


def test_a_head_that_dies_disturbs_no_stream(nodes: Nodes, cluster: Running) -> None:
    async def strike(parts: Parts, told: list[Told]) -> None:
        await asyncio.to_thread(nodes.hosts[0].kill)
        await asyncio.sleep(2)
        await asyncio.to_thread(nodes.start_head)

    under(cluster, strike, simulated_text, TOKENS, count=12, transport=EveryNode(nodes, [1, 2]))
    deployed = until("Serve is back", lambda: application_status(nodes.service.dashboard_url).get("deployments"))
    assert set(deployed) == {"Ingress", "Worker"}
