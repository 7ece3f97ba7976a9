"""Coding agents and benchmarks as their users install them, set up as docs/agents.md says, with the
prompts that they send, at a service with a long context. The agents play scripts
(tests/scripted_model.py): their tools write a line in every turn.

`HERMES_TIMES=7` has each of them play seven times while processes die.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from scripts.chaos_testing.parts import Parts
from serve_app.contract import CHATS, COMPLETIONS, RESPONSES
from tests import bpe_model
from tests.installed_clients import ENVIRONMENT, of_agent, of_guidellm
from tests.scripts_to_play import Script, holder, let_go
from tests.service.disturbance import on_disk, whole_again
from tests.service.support import Running, replicas
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]  # it concerns the clients
ASKED = 3
TIMES = int(os.environ.get("HERMES_TIMES", "1"))
TURNS, SAID = 10, "All ten lines are written."
KILLED = {2: "worker", 4: "ingress", 6: "redis", 8: "engine"}
Call = tuple[str, dict[str, Any]]
SHELLS: dict[str, Callable[[str], Call]] = {
    "Claude Code": lambda command: ("Bash", {"command": command, "description": "Write a line"}),
    "Codex": lambda command: ("exec_command", {"cmd": command}),
    "Hermes Agent": lambda command: ("terminal", {"command": command}),
    "OpenCode": lambda command: ("bash", {"command": command, "description": "Write a line"}),
}


class Playing:
    """An agent that plays a script of ten calls, and what the service books meanwhile."""

    def __init__(self, service: Running, name: str, folder: Path, held: list[int]) -> None:
        self.service = service
        self.folder = folder
        self.lines = [
            f"line {turn}, of a certain length, as {turn} of {TURNS}" for turn in range(TURNS)
        ]
        self._written = folder / "lines"
        calls = [SHELLS[name](f"echo '{line}' >> {self._written}") for line in self.lines]
        self.script = Script(SAID, calls, held)
        self._before = self._booked()
        command, environment = of_agent(
            name, service.url, service.model, folder / "home", self.script.write(folder)
        )
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _booked(self) -> dict[str, int]:
        """What the ledger has of all requests so far."""
        buckets = self.service.http.get("/v1/usage?bucket_width=1d").json()["data"]
        found = [result for bucket in buckets for result in bucket["results"]]
        return {
            name: sum(one[name] for one in found)
            for name in ("num_model_requests", "output_tokens")
        }

    def running(self) -> dict[str, Any]:
        (found,) = self.service.http.get("/v1/requests?state=running").json()["data"]
        return dict(found)

    def check(self) -> None:
        """The calls were made in their order, once each, and every request is booked once."""
        told, _ = self.process.communicate(timeout=900)
        assert self.process.returncode == 0
        assert SAID in told
        assert self._written.read_text().splitlines() == self.lines
        booked = self._booked()
        new = {name: booked[name] - self._before[name] for name in booked}
        limit = new["num_model_requests"]
        asked = self.service.http.get(f"/v1/requests?limit={limit}").json()["data"]
        assert {one["state"] for one in asked} == {"completed"}
        tokens = [one["usage"]["output_tokens"] for one in asked]
        assert sum(tokens) == new["output_tokens"]
        tokenizer = Tokenizer.from_file(str(bpe_model.FOLDER / "tokenizer.json"))
        said = [tokenizer.encode(self.script.says(turn)).ids for turn in range(TURNS + 1)]
        assert set(tokens) == {len(ids) + 1 for ids in said}  # with the end


def strike(playing: Playing, turn: int, kind: str) -> None:
    """Kill what works on a call of which a half is written."""
    service, parts = playing.service, Parts(playing.service.service)
    standing = until(
        f"the engine stands still in turn {turn}", lambda: holder(playing.folder, turn)
    )
    if kind in ("engine", "worker"):
        above = {one.pid for one in psutil.Process(standing).parents()}
        parts.kill(*above.intersection(parts.pids(kind)))
    elif kind == "ingress":
        (_, fields), *_ = service.entries(service.journal_key(playing.running()["id"]))
        wake = json.loads(fields[b"m"])["wake"]
        ingresses = replicas(service.service.dashboard_url, "Ingress")
        (holding,) = (one["pid"] for one in ingresses if one["replica_id"] in wake)
        parts.kill(holding)
    else:
        on_disk(service)
        parts.kill(*parts.pids("redis"))
        service.service.restart_redis()
    let_go(playing.folder, turn)


@pytest.mark.parametrize("name", [*SHELLS, "OpenAI's Agents SDK", "LangChain"])
def test_an_agent_completes_a_turn(agents: Running, tmp_path: Path, name: str) -> None:
    command, environment = of_agent(name, agents.url, agents.model, tmp_path)
    ran = subprocess.run(
        command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=600
    )
    assert ran.returncode == 0
    (asked,) = agents.http.get("/v1/requests?limit=1").json()["data"]
    assert asked["state"] == "completed"


@pytest.mark.parametrize("name", SHELLS)
def test_an_agent_calls_a_tool_in_each_of_ten_turns(
    agents: Running, tmp_path: Path, name: str
) -> None:
    Playing(agents, name, tmp_path, []).check()


@pytest.mark.disturbs
@pytest.mark.parametrize("name", [*SHELLS] * TIMES)
def test_an_agent_does_not_notice_that_processes_die(
    agents: Running, tmp_path: Path, name: str
) -> None:
    whole_again(agents, 2)
    playing = Playing(agents, name, tmp_path, [*KILLED])
    for turn, kind in KILLED.items():
        strike(playing, turn, kind)
    playing.check()
    whole_again(agents, 2)


@pytest.mark.parametrize("provider", ["hermes", "OpenAI"])
def test_codex_compacts_its_session_and_goes_on(
    agents: Running, tmp_path: Path, provider: str
) -> None:
    """Of a provider with the name OpenAI it asks a `compaction` by a `compaction_trigger`, of any
    other one a summary by a prompt of its own.
    """
    prompt = Script(SAID).write(tmp_path)
    command, environment = of_agent("Codex", agents.url, agents.model, tmp_path, prompt)
    config = tmp_path / ".codex" / "config.toml"
    named = config.read_text().replace('name = "hermes"', f'name = "{provider}"')
    config.write_text(named)
    *shell, begin = command
    full = "-c model_auto_compact_token_limit=1 resume --last"
    told = [
        subprocess.run(
            [*shell, line],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        for line in (begin, begin.replace(f'"{prompt}"', f'{full} "{prompt}"'))
    ]
    assert [one.returncode for one in told] == [0, 0], told[-1].stderr
    assert ["context compacted" in one.stderr for one in told] == [False, True]
    assert all(SAID in one.stdout for one in told)
    asked = agents.http.get("/v1/requests?limit=3").json()["data"]
    assert [one["state"] for one in asked] == ["completed"] * 3
    _, compacting, _ = asked
    answer = agents.http.get(f"/v1/requests/{compacting['id']}/response").text
    assert ('"type":"compaction"' in answer) == (provider == "OpenAI")


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
