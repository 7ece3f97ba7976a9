"""LiteLLM's proxy, unmodified, in front of the service: files and batches go through it, by
OpenAI's SDK and each of the two headers with which a client names the service.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve_app.local import ports
from tests.installed_clients import ENVIRONMENT, SCRIPTS, of_litellms_proxy
from tests.journal.in_process import Door, in_process, settings_of
from tests.waiting import PATIENCE_S, eventually, until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
START_S = 600.0
MODEL, CHATS, HELD = "hermes-tiny", "/v1/chat/completions", "HELD"
BY_MODEL, BY_PROVIDER = {"x-litellm-model": MODEL}, {"custom-llm-provider": "hosted_vllm"}


@asynccontextmanager
async def proxy(d: Door, folder: Path) -> AsyncIterator[str]:
    """The URL of a proxy in front of the service."""
    config, port = SCRIPTS / "litellm-proxy" / "config.yaml", ports.free_port()
    service = {"HOSTED_VLLM_API_BASE": f"http://127.0.0.1:{d.port}/v1", "HOSTED_VLLM_API_KEY": "k"}
    service["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    command = await asyncio.to_thread(of_litellms_proxy)
    words = "--config", str(config), "--host", "127.0.0.1", "--port", str(port)
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, *words, env={**ENVIRONMENT, **service}, cwd=folder, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}/v1"
        await asyncio.to_thread(until, "it serves", lambda: _serves(url, process), START_S)
        yield url
    finally:
        process.kill()
        await process.wait()


def _serves(url: str, process: asyncio.subprocess.Process) -> bool:
    assert process.returncode is None, "the proxy has ended"
    try:
        return httpx.get(f"{url}/models", timeout=PATIENCE_S).is_success
    except httpx.ConnectError:
        return False


def lines(*prompts: str) -> tuple[str, bytes]:
    """A file with a request for each prompt."""
    asked = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    made = [
        {"custom_id": str(number), "method": "POST", "url": CHATS, "body": {"model": MODEL, **one}}
        for number, one in enumerate(asked)
    ]
    return "in.jsonl", "".join(json.dumps(one) + "\n" for one in made).encode()


async def over(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """A batch that has ended."""

    async def ended() -> Any:
        found = await client.batches.retrieve(batch_id)
        return found if found.status in ("completed", "cancelled") else None

    return await eventually(ended)


async def answers(client: openai.AsyncOpenAI, file_id: str) -> dict[str, Any]:
    """The lines of a file with results."""
    found = map(json.loads, (await client.files.content(file_id)).text.splitlines())
    return {one["custom_id"]: one for one in found}


async def files_and_batches(client: openai.AsyncOpenAI, d: Door) -> None:
    file = await client.files.create(file=lines("one", "two"), purpose="batch")
    assert (await client.files.retrieve(file.id)).bytes == file.bytes
    assert (await client.files.content(file.id)).content == lines("one", "two")[1]
    assert (await client.files.list(limit=1)).data[0].filename == "in.jsonl"
    usual: Any = {"endpoint": CHATS, "completion_window": "2d", "metadata": {"by": "litellm"}}
    made = await client.batches.create(input_file_id=file.id, **usual)
    done = await over(client, made.id)
    assert (done.id, done.status, done.metadata) == (made.id, "completed", {"by": "litellm"})
    assert done.expires_at - done.created_at == 2 * 86_400
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 0)
    found = await answers(client, done.output_file_id)
    assert {n: one["response"]["status_code"] for n, one in found.items()} == {"0": 200, "1": 200}
    held = await client.files.create(file=lines("one", HELD), purpose="batch")
    # LiteLLM passes on what is in a field `extra_body`, which no SDK knows.
    own: Any = {"extra_body": {"extra_body": {"window": "22:00-06:00"}}}
    second = await client.batches.create(input_file_id=held.id, **usual, **own)
    newest = (await d.http.get("/v1/batches?limit=1")).json()["data"][0]
    assert newest["window"] == "22:00-06:00"
    assert (await client.batches.list(limit=1)).data[0].id == second.id
    assert (await client.batches.cancel(second.id)).status == "cancelling"
    ended = await over(client, second.id)
    assert ended.status == "cancelled"
    found = await answers(client, ended.error_file_id)
    assert found["1"]["error"]["code"] == "batch_cancelled"
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError, match="not found"):
        await client.files.retrieve(file.id)


@pytest.fixture
async def served(redis_url: str, namespace: str, tmp_path: Path) -> AsyncIterator[tuple[Door, str]]:
    """A service, and the URL of a proxy in front of it."""
    engine = {"kind": "simulated", "args": {"faults": {HELD: "stay"}}}
    files = {"storage": str(tmp_path / "files")}
    settings = settings_of(redis_url, namespace, files=files, engine=engine)
    async with in_process(settings) as d, proxy(d, tmp_path) as url:
        yield d, url


async def test_files_and_batches_go_through_litellms_proxy(served: tuple[Door, str]) -> None:
    d, url = served
    for named in (BY_MODEL, BY_PROVIDER):
        own: Any = {"default_headers": named, "timeout": PATIENCE_S, "max_retries": 0}
        async with openai.AsyncOpenAI(base_url=url, api_key="none", **own) as client:
            said: Any = {"model": MODEL, "messages": [{"role": "user", "content": "a lighthouse"}]}
            said["temperature"] = 0
            whole = await client.chat.completions.create(**said)
            chunks = await client.chat.completions.create(**said, stream=True)
            told = [one.choices[0].delta.content or "" async for one in chunks if one.choices]
            assert "".join(told) == whole.choices[0].message.content
            await files_and_batches(client, d)
            wrong: Any = {"endpoint": CHATS, "completion_window": "9d"}
            file = await client.files.create(file=lines("one"), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="from 1m to 7d"):
                await client.batches.create(input_file_id=file.id, **wrong)


async def test_batches_are_paged_by_the_providers_name(served: tuple[Door, str]) -> None:
    """By a model's name LiteLLM hides ids in its own, and sends those on as `after`."""
    _, url = served
    own: Any = {"default_headers": BY_PROVIDER, "max_retries": 0}
    async with openai.AsyncOpenAI(base_url=url, api_key="none", **own) as client:
        file = await client.files.create(file=lines("one"), purpose="batch")
        usual: Any = {"endpoint": CHATS, "completion_window": "24h"}
        made = [(await client.batches.create(input_file_id=file.id, **usual)).id for _ in range(3)]
        listed = [one.id async for one in client.batches.list(limit=1)]
        assert listed[:3] == made[::-1]
