"""Stage three with the real engine: each replica four processes on a node of its own, and a node that dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.disorder.parts import Parts
from scripts.disorder.traffic import Told
from scripts.local import processes
from scripts.local.environment import ROOT
from scripts.local.network import Host
from tests.service.disturbance import PROMPTS, attempts, real_text, under
from tests.service.support import Running, together
from tests.service.test_nodes import EveryNode
from tests.service.test_stages import alone, nodes_of, replicas

__all__ = ["alone"]  # the fixture: one service at a time

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(900)]
TOKENS = 250
ON_CPUS = {
    "model": {"name": "hermes-tiny", "source": "builtin:tiny"},
    "engine": {
        "args": {
            "dtype": "float32", "max_model_len": 4096, "enforce_eager": True, "num_gpu_blocks_override": 512,
            "gpu_memory_utilization": 0.05,
        }
    },
    "workers": {"device": "cpu", "stall_s": 60.0, "health_check_timeout_s": 60.0},
    "ingress": {"replicas": 2, "heartbeat_s": 1.0, "disconnect_grace_s": 60.0},
    "auth": {"required": False},
}  # fmt: skip
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def ranks(host: Host) -> int:
    """How many processes of an engine compute there."""
    titles = [Path(f"/proc/{pid}/cmdline") for pid in host.pids() if processes.is_alive(pid)]
    return sum(b"VLLM::Worker" in title.read_bytes() for title in titles)


def test_nothing_is_lost_with_the_node_of_an_engine_of_four_processes(tmp_path: Path) -> None:
    with nodes_of(tmp_path, [(0, 0), (6, 4), (6, 4)], ENVIRONMENT) as nodes:
        nodes.deploy(ROOT / "cluster" / "multi_node.yaml", ON_CPUS, timeout_s=420)
        assert len(replicas(nodes, "Worker")) == 2
        assert [ranks(host) for host in nodes.hosts] == [0, 4, 4], "a replica's ranks are on one node"
        service = Running(nodes.service)
        expected = real_text(service)
        together([lambda prompt=prompt: expected(prompt, TOKENS) for prompt in PROMPTS])

        async def strike(_: Parts, __: list[Told]) -> None:
            await asyncio.to_thread(nodes.hosts[1].kill)

        told = under(service, strike, expected, TOKENS, give_up_s=300, transport=EveryNode(nodes, [1, 2]))
        service.close()
        assert any(one.breaks for one in told), "nobody was connected to the node"
        assert max(attempts(told)) >= 2, "nothing ran on the node"
