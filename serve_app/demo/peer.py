"""A bare vLLM server with the model of the demo, which has the same fault beside the service."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from serve_app.demo.faults import core_of
from serve_app.local import processes, surroundings
from serve_app.local.ports import free_port

_READY_WITHIN_S = 300.0
CPU_ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The environment of an engine on the CPU, as `cluster/local_cpu.yaml` has it."""
CPU_ARGUMENTS = ("--dtype=float32", "--enforce-eager")


def server(model: str, name: str, port: int, max_model_len: int) -> list[str]:
    """The command of vLLM's own server on the loopback."""
    # The module and not the `vllm` command, which fails under the CPU build's other name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--max-model-len", str(max_model_len)]


@dataclass
class Peer:
    url: str
    pid: int

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def kill_engine(self) -> None:
        if core := core_of(self.pid):
            os.kill(core, signal.SIGKILL)


def start(model: str, name: str, device: str, max_model_len: int, stack: ExitStack) -> Peer:
    """Start it, and wait until it answers. The stack ends it.

    Raises:
        RuntimeError: it does not start; the message has the end of its log.
    """
    port = free_port()
    command = server(model, name, port, max_model_len)
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    own = {}
    if device == "cpu":
        command, own = [*command, *CPU_ARGUMENTS], CPU_ENGINE
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    log = folder / "log"
    environment = surroundings.kept(os.environ) | own | {"VLLM_RPC_BASE_PATH": str(folder)}
    peer = Peer(f"http://127.0.0.1:{port}", processes.start(command, log, environment, folder))
    stack.callback(processes.end, peer.pid)
    if not processes.until(peer.is_ready, _READY_WITHIN_S, peer.pid, every_s=0.25):
        raise RuntimeError(f"vLLM's own server does not start:\n{processes.tail(log)}")
    return peer
