"""Coding agents and benchmarks as their users install them, with the prompts that they send, at a
service with a long context.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from serve_app.contract import CHATS, COMPLETIONS, RESPONSES
from tests import bpe_model
from tests.installed_clients import ENVIRONMENT, of_codex, of_guidellm
from tests.service.support import Running

pytestmark = pytest.mark.nightly  # it concerns the clients
ASKED = 3


def test_codex_completes_a_turn(agents: Running, tmp_path: Path) -> None:
    home, said = tmp_path / "codex", tmp_path / "said"
    command = of_codex(agents.url, agents.model, home, said, "stream_max_retries = 0")
    environment = {**ENVIRONMENT, "CODEX_HOME": str(home)}
    ran = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=600)
    assert ran.returncode == 0
    (asked,) = agents.http.get("/v1/requests?limit=1").json()["data"]
    assert asked["state"] == "completed"
    assert asked["usage"]["prompt_tokens"] > 5_000
    whole = agents.http.get(f"/v1/responses/resp_{asked['id']}").json()
    texts = [part["text"] for item in whole["output"] for part in item["content"]]
    assert said.read_text() == "".join(texts)


def test_guidellm_runs_its_own_smoke_benchmark(agents: Running, tmp_path: Path) -> None:
    for path in (CHATS, COMPLETIONS, RESPONSES):
        backend = f"kind=openai_http,target={agents.url},model={agents.model},request_format={path}"
        file = tmp_path / f"{path.rpartition('/')[2]}.json"
        command = of_guidellm(
            *("--backend", backend, "--profile", "kind=synchronous", "--disable-progress"),
            *("--constraint", f"kind=max_requests,count={ASKED}"),
            *("--tokenizer", f"kind=hf_auto,model={bpe_model.FOLDER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--output", f"kind=json,path={file}"),
        )
        ran = subprocess.run(
            command, env={**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path, timeout=600
        )
        assert ran.returncode == 0
        (benchmark,) = json.loads(file.read_text())["benchmarks"]
        ended = benchmark["metrics"]["request_totals"]
        assert (ended["successful"], ended["errored"], ended["incomplete"]) == (ASKED, 0, 0), path
