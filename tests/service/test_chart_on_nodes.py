"""The chart's Serve config, deployed for real, and a node that dies while OpenAI's own client
streams.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from serve_app.client import ReconnectingTransport
from tests.chart.charts import documents, one, stage_values
from tests.service.disturbance import simulated_text
from tests.service.nodes import Nodes
from tests.service.services import KEYS
from tests.service.support import asking, openai_client, replicas
from tests.service.test_stages import SIMULATED

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.disturbs,
    pytest.mark.timeout(1200),
]
TOKENS = 400  # 10 s
ENGINE = {
    "engine": {**SIMULATED["engine"], "args": {"tokens_per_s": 40}},
    "ingress": {"heartbeat_s": 1.0},
}


def story(number: int) -> str:
    return f"Story number {number}"


def test_every_token_once_while_the_node_of_an_engine_dies(
    gpu_nodes: Nodes, tmp_path: Path
) -> None:
    """With the reconnecting transport whoever held the connection; with the client as it is where
    that one lives on.
    """
    config = tmp_path / "serve.yaml"
    config.write_text(
        one(documents(stage_values("multi-node")), "RayService")["spec"]["serveConfigV2"]
    )
    service = gpu_nodes.deploy(config, ENGINE, timeout_s=600)
    begun = threading.Barrier(13)
    where: Counter[str] = Counter()

    def ask(number: int, client: httpx.Client) -> str:
        sdk = openai_client(gpu_nodes.url(0), KEYS["acme"], client)
        body = asking(story(number), TOKENS, service.model, stream=True)
        with sdk.chat.completions.with_streaming_response.create(**body) as response:
            where[response.headers["x-hermes-replica"]] += 1
            text = ""
            for count, chunk in enumerate(response.parse()):
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                if count == 20:
                    begun.wait(240)
        return text

    with ThreadPoolExecutor(12) as pool:
        plain = [pool.submit(ask, n, httpx.Client(timeout=120)) for n in range(6)]
        steady = [
            pool.submit(ask, n, httpx.Client(timeout=30, transport=ReconnectingTransport()))
            for n in range(6, 12)
        ]
        begun.wait(240)
        busiest = where.most_common(1)[0][0]
        workers = replicas(service.dashboard_url, "Worker")
        place = next(w["node_ip"] for w in workers if w["replica_id"] == busiest)
        next(host for host in gpu_nodes.hosts if host.address == place).kill()
        errors = [answer.exception(400) for answer in (*plain, *steady)]
        for number, answer in enumerate((*plain, *steady)):
            if errors[number] is None:
                assert answer.result() == simulated_text(story(number), TOKENS)
        assert errors[6:] == [None] * 6
        broken = [error for error in errors if error is not None]
        assert len(broken) <= 3, "three of four ingresses live on"
        of_a_connection = httpx.TransportError | openai.APIConnectionError
        assert all(isinstance(error, of_a_connection) for error in broken), broken
