"""Stage three with the real engine: each replica has four processes on its own node, and a node
dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.chaos_testing.parts import Parts
from scripts.chaos_testing.traffic import Told
from serve_app.local import processes
from serve_app.local.environment import ROOT
from tests.service.disturbance import attempts, real_text, under
from tests.service.network import Host
from tests.service.nodes import Nodes
from tests.service.services import ENGINES_ON_CPUS
from tests.service.support import Running, replicas
from tests.service.test_nodes import every_node

# Four processes on two cores take minutes.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.disturbs,
    pytest.mark.timeout(1800),
]
TOKENS = 250
ON_CPUS = {
    "model": {"name": "hermes-tiny", "source": "builtin:tiny"},
    "engine": {
        "args": {
            "dtype": "float32",
            "max_model_len": 4096,
            "enforce_eager": True,
            "num_gpu_blocks_override": 512,
            "gpu_memory_utilization": 0.05,
        }
    },
    "workers": {"device": "cpu", "engine_stall_timeout_s": 60.0, "health_check_timeout_s": 60.0},
    "ingress": {"replicas": 2, "heartbeat_s": 1.0, "disconnect_grace_s": 60.0},
    "auth": {"required": False},
}


@contextmanager
def nodes_of(folder: Path, sizes: list[tuple[int, int]]) -> Iterator[Nodes]:
    made = Nodes(folder, sizes, number=2)
    made.up(ENGINES_ON_CPUS)
    try:
        yield made
    finally:
        made.down()


def ranks(host: Host) -> int:
    """Number of an engine's processes on that node."""
    titles = [Path(f"/proc/{pid}/cmdline") for pid in host.pids() if processes.is_alive(pid)]
    return sum(b"VLLM::Worker" in title.read_bytes() for title in titles)


def test_nothing_is_lost_with_the_node_of_an_engine_of_four_processes(
    alone: None, tmp_path: Path
) -> None:
    with nodes_of(tmp_path, [(0, 0), (6, 4), (6, 4)]) as nodes:
        nodes.deploy(ROOT / "cluster" / "multi_node.yaml", ON_CPUS, timeout_s=900)
        assert len(replicas(nodes.service.dashboard_url, "Worker")) == 2
        of_each = [ranks(host) for host in nodes.hosts]
        assert of_each == [0, 4, 4], "a replica's ranks are on one node"
        service = Running(nodes.service)
        expected = real_text(service)

        async def strike(_: Parts, __: list[Told]) -> None:
            await asyncio.to_thread(nodes.hosts[1].kill)

        ways = every_node(nodes)
        told = under(service, strike, expected, TOKENS, give_up_s=600, transport=ways)
        service.close()
        assert any(one.breaks for one in told), "nobody was connected to the node"
        assert max(attempts(told)) >= 2, "nothing ran on the node"
