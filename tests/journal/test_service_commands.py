"""`hermes requests` and `hermes usage` against a service: the answers are those of its API."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.main import app
from serve_app.redis.check import Check
from tests.journal.in_process import (
    WORKER,
    Door,
    door,
    in_process,
    keys_of,
    settings_of,
    worker_process,
)
from tests.waiting import eventually

SCRIPT = Path(__file__).parents[2] / "scripts" / "requests"
STAYS = {"engine": {"kind": "simulated", "args": {"faults": {"lighthouse": "stay"}}}}
NO_KEYS: dict[str, str | None] = {"HERMES_API_KEY": None, "OPENAI_API_KEY": None}


async def hermes(at: Door, *words: str, port: int = 0, **env: str | None) -> Result:
    """The command, in a thread, because the service runs in this one."""
    url = f"http://127.0.0.1:{port or at.port}"
    named = {"HERMES_URL": url, **NO_KEYS, **env}
    return await asyncio.to_thread(CliRunner().invoke, app, words, prog_name="hermes", env=named)


async def printed(at: Door, *words: str, **more: Any) -> str:
    done = await hermes(at, *words, **more)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done.stdout


async def test_a_list_is_the_services_and_goes_on_over_its_pages(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.cli.requests._PAGE", 2)
    async with door(redis_url, namespace) as at:
        assert await printed(at, "requests", "list") == "no requests\n"
        posted = [await at.detached("x") for _ in range(5)]
        posted.append(await at.detached("x", "batch"))

        async def ids(*words: str) -> list[str]:
            lines = (await printed(at, "requests", "list", "--json", *words)).splitlines()
            return [json.loads(line)["id"] for line in lines]

        assert await ids("--all") == (newest := await ids())
        assert sorted(newest) == sorted(posted)
        assert await ids("--limit", "3") == newest[:3]
        assert await ids("--class", "batch") == [posted[-1]]
        assert await printed(at, "requests", "cancel", posted[0]) == f"{posted[0]} cancelled\n"
        assert await ids("--state", "cancelled") == [posted[0]]
        rows = (await printed(at, "requests", "list")).splitlines()
        assert [row.split()[0] for row in rows] == ["request", *newest]
        refused = await hermes(at, "requests", "list", "--state", "lost")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "must be one of queued" in refused.stderr


async def test_what_is_shown_is_what_the_service_says(redis_url: str, namespace: str) -> None:
    async with in_process(settings_of(redis_url, namespace)) as at:
        request_id = await at.detached("x", max_tokens=4)
        await at.http.get(f"/v1/requests/{request_id}/response")
        its = (await at.http.get(f"/v1/requests/{request_id}")).json()
        assert json.loads(await printed(at, "requests", "show", request_id, "--json")) == its
        text = await printed(at, "requests", "show", request_id)
        assert re.search(r"^state +completed$", text, re.MULTILINE)
        assert re.search(r"^usage .*output_tokens 4,", text, re.MULTILINE)
        unknown = await hermes(at, "requests", "show", "req_1")
        assert unknown.exit_code == 1
        assert unknown.stderr == "requests: No request 'req_1' is known (any more).\n"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_tail_is_the_text_of_the_whole_answer_over_connections_that_break(
    redis_url: str, namespace: str, stream: bool
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as at:
        request_id = await at.detached("x", stream=stream, max_tokens=30)
        other = await at.detached("x", max_tokens=30)
        answer = (await at.http.get(f"/v1/requests/{other}/response")).json()
        async with breaking(at.port, 700) as (port, broken):
            text = await printed(at, "requests", "tail", request_id, port=port)
        assert text == answer["choices"][0]["message"]["content"] + "\n"
        assert len(broken) == 1


@asynccontextmanager
async def breaking(port: int, after_bytes: int) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A way to the service that breaks once: after so many bytes of the first answer of events."""
    broken: list[bytes] = []

    async def carry(here: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = await here.readuntil(b"\r\n\r\n")
        writer.write(asked.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        breaks = b"/events" in asked and not broken
        passed = b""
        while data := await reader.read(1 << 16):
            passed += data
            if breaks and len(passed) > after_bytes:
                there.write(data[: after_bytes - len(passed)])
                broken.append(passed)
                break
            there.write(data)
        there.close()
        writer.close()

    async def cut(here: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
        try:
            await carry(here, there)
        except (ConnectionError, asyncio.IncompleteReadError):
            there.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], broken


async def test_a_tail_prints_what_there_is_and_says_why_the_rest_does_not_come(
    redis_url: str, namespace: str
) -> None:
    async with in_process(settings_of(redis_url, namespace, **STAYS)) as at:
        request_id = await at.detached("a lighthouse", stream=True)
        url = f"http://127.0.0.1:{at.port}"
        env = {**os.environ, "HERMES_URL": url, "PYTHONUNBUFFERED": ""}
        words = (SCRIPT, "tail", request_id)
        pipe = asyncio.subprocess.PIPE
        tail = await asyncio.create_subprocess_exec(*words, env=env, stdout=pipe, stderr=pipe)
        assert tail.stdout is not None
        text = b""
        while text.count(b" ") < 3:  # a word of each of the three tokens
            part = await tail.stdout.read(100)
            assert part, "it ended"
            text += part
        assert tail.returncode is None
        assert await printed(at, "requests", "cancel", request_id) == f"{request_id} cancelled\n"
        _, told = await tail.communicate()
        assert tail.returncode == 1
        assert told.decode().startswith("requests: ")
        assert told.count(b"\n") == 1


async def test_a_status_is_what_the_service_says(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace) as at:
        await at.detached("x")
        done = await hermes(at, "status", "--json")
        found = json.loads(done.stdout)
        assert (done.exit_code, found["ready"], found["workers"]) == (1, False, 0)
        assert found["queues"]["standard"]["waiting"] == 1
        text = (await hermes(at, "status")).stdout
        assert "not ready: no worker has its engine ready yet" in text
        assert re.search(r"^standard +1 +[\d,]+ +0 +\d+s$", text, re.MULTILINE)
    async with in_process(settings_of(redis_url, f"{namespace}-2")) as at:
        text = await printed(at, "status")
        assert re.search(r"^state +ready$", text, re.MULTILINE)
        assert re.search(r"^workers +1 of 2$", text, re.MULTILINE)


async def test_a_redis_that_is_tried_for_the_first_time_does_not_count_as_lost(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()

    async def late(check: Check) -> tuple[str, ...]:
        await tried.wait()
        return ()

    monkeypatch.setattr(Check, "run", late)
    settings = settings_of(redis_url, namespace)
    async with door(redis_url, namespace) as at:
        assert at.ingress.readiness.report()[1]["problem"] == "no worker has its engine ready yet"
        async with worker_process(settings):
            at.ingress.readiness.replicas.serving([WORKER])
            await eventually(lambda: at.ingress.readiness.report()[1]["workers"])
            said = "Redis is being tried for the first time"
            assert at.ingress.readiness.report()[1]["problem"] == said
            tried.set()
            await eventually(lambda: at.ingress.readiness.report()[0])


async def test_usage_is_what_the_ledger_says(redis_url: str, namespace: str) -> None:
    async with in_process(settings_of(redis_url, namespace)) as at:
        for request_class, tokens in (("standard", 3), ("batch", 5), ("batch", 7)):
            request_id = await at.detached("x", request_class, max_tokens=tokens)
            await at.http.get(f"/v1/requests/{request_id}/response")
        for words in ((), ("--all-tenants", "--by", "hour")):
            text = await printed(
                at, "usage", "--group-by", "class,batch", "--format", "jsonl", *words
            )
            rows = [json.loads(line) for line in text.splitlines()]
            assert {(row["class"], row["batch"]) for row in rows} == {
                ("standard", False),
                ("batch", True),
            }
            assert sum(row["output_tokens"] for row in rows) == 15
            assert sum(row["completed"] for row in rows) == 3
        *_, total = (await printed(at, "usage")).splitlines()
        assert total.split()[:2] == ["total", "3"]
        old = ("--from", "1970-01-01", "--to", "1970-03-01")  # of two pages
        assert await printed(at, "usage", *old) == "no usage\n"


async def test_whose_key_it_is_decides(redis_url: str, namespace: str, tmp_path: Path) -> None:
    auth = {**keys_of(tmp_path, "acme", "zeta", "ops"), "admin_tenants": ["ops"]}
    async with door(redis_url, namespace, auth=auth) as at:
        at.http.headers["authorization"] = "Bearer acme"
        request_id = await at.detached("x")
        shown = await printed(at, "requests", "show", request_id, "--json", HERMES_API_KEY="acme")
        assert json.loads(shown)["id"] == request_id
        await printed(at, "usage", "--all-tenants", OPENAI_API_KEY="ops")
        refused = {
            "HERMES_API_KEY": await hermes(at, "requests", "list", HERMES_API_KEY="s3cret"),
            "GET /v1/usage": await hermes(at, "usage", "--all-tenants", HERMES_API_KEY="acme"),
            request_id: await hermes(at, "requests", "cancel", request_id, HERMES_API_KEY="zeta"),
        }
        for word, done in refused.items():
            assert (done.exit_code, done.stdout) == (1, "")
            assert done.stderr.count("\n") == 1
            assert word in done.stderr
            assert "s3cret" not in done.stderr
        await eventually(lambda: len(at.ingress.limits.waiting) == 1)
