"""LiteLLM's own functions for files and batches, unmodified, drive a batch to its output file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.installed_clients import ENVIRONMENT, SCRIPTS, python
from tests.journal.in_process import in_process, settings_of
from tests.waiting import PATIENCE_S


@pytest.mark.nightly
async def test_litellm_runs_a_batch(redis_url: str, namespace: str, tmp_path: Path) -> None:
    script = SCRIPTS / "python" / "batch_with_litellm.py"
    interpreter = await asyncio.to_thread(python)
    settings = settings_of(redis_url, namespace, files={"storage": str(tmp_path)})
    async with in_process(settings) as d:
        words = str(interpreter), str(script), f"http://127.0.0.1:{d.port}/v1", "hermes-tiny"
        pipe = asyncio.subprocess.PIPE
        client = await asyncio.create_subprocess_exec(
            *words, env=ENVIRONMENT, stdout=pipe, stderr=pipe
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                out, errors = await client.communicate()
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
    assert client.returncode == 0, errors.decode()[-2_000:]
    assert json.loads(out.splitlines()[-1]) == {
        "status": "completed",
        "completed": 3,
        "failed": 0,
        "metadata": {"by": "litellm"},
        "answers": {f"line-{number}": 200 for number in range(3)},
    }
