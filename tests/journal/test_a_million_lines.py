"""A million lines in batches of several tenants: what Redis has of them, how soon a page of batches
is read meanwhile, and how long the ingress that checks them stands still.

    python -m pytest -s tests/journal/test_a_million_lines.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from serve_app.contract import CHATS
from tests.journal.in_process import keys_of
from tests.journal.journal_helpers import PrivateRedis
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.clock, pytest.mark.nightly, pytest.mark.timeout(1_800)]

TENANTS, OF_EACH, LINES = "abcde", 4, 50_000
A_PAGE = 100
MOST_PAGE_MS, LEAST_LINES_A_S = 200.0, 500.0
MOST_REDIS_BYTES = 10_000_000
"""It knows nothing of lines that are not taken."""
INGRESS = """
import asyncio, json, sys, time, uvloop
from serve_app.foundation import freeze_heap
from tests.journal.in_process import door
async def watch():
    global longest_s
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(0.005)
        longest_s = max(longest_s, time.perf_counter() - began_s - 0.005)
async def main():
    global longest_s
    url, namespace, sections = sys.argv[1:]
    async with door(url, namespace, **json.loads(sections)) as d:
        freeze_heap()
        watching, longest_s = asyncio.create_task(watch()), 0.0
        print(d.port, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(longest_s, flush=True)
            longest_s = 0.0
uvloop.run(main())
"""
"""It sees no worker, so none of the lines runs. Its event loop is that of Ray's processes; it tells
the longest pause of this loop since it was asked before.
"""


class Ingress:
    """One in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient) -> None:
        self._process = process
        self._http = http
        self.pages_ms: list[float] = []

    async def longest_pause_s(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return float(await self._process.stdout.readline())

    async def uploaded(self, tenant: str, text: bytes) -> str:
        """The id of an input file."""
        files = {"file": ("in.jsonl", text)}
        answer = await self._http.post(
            "/v1/files", data={"purpose": "batch"}, files=files, headers=_bearer(tenant)
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def create(self, tenant: str, **its: object) -> None:
        asked = {"endpoint": CHATS, "completion_window": "24h", **its}
        answer = await self._http.post("/v1/batches", json=asked, headers=_bearer(tenant))
        assert answer.status_code == 200, answer.text

    async def lines(self, tenant: str) -> int:
        """How many lines of a tenant's newest batches were checked; none may have failed."""
        began_s = time.perf_counter()
        answer = await self._http.get(
            "/v1/batches", params={"limit": A_PAGE}, headers=_bearer(tenant)
        )
        self.pages_ms.append((time.perf_counter() - began_s) * 1e3)
        batches = answer.json()["data"]
        assert {one["status"] for one in batches} <= {"validating", "in_progress"}
        return sum(one["request_counts"]["total"] for one in batches)


def _bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


@asynccontextmanager
async def ingress(redis_url: str, folder: Path) -> AsyncIterator[Ingress]:
    sections = {"files": {"storage": str(folder / "files")}, "auth": keys_of(folder, *TENANTS)}
    words = (sys.executable, "-c", INGRESS, redis_url, "million", json.dumps(sections))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            port = int(await process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            yield Ingress(process, http)
        process.stdin.close()
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _text(lines: int) -> bytes:
    made = []
    for number in range(lines):
        messages = [{"role": "user", "content": f"What is {number}?"}]
        body = {"model": "hermes-tiny", "messages": messages}
        made.append({"custom_id": f"{number}", "method": "POST", "url": CHATS, "body": body})
    return b"".join(json.dumps(one).encode() + b"\n" for one in made)


async def test_a_million_lines(private_redis: PrivateRedis, tmp_path: Path) -> None:
    text = await asyncio.to_thread(_text, LINES)
    one_line = json.loads(text.splitlines()[0])
    small = A_PAGE - OF_EACH
    wanted = dict.fromkeys(TENANTS, OF_EACH * LINES)
    wanted["a"] += small
    async with ingress(private_redis.url, tmp_path) as its:
        files = [(t, await its.uploaded(t, text)) for t in TENANTS for _ in range(OF_EACH)]
        before = int((await private_redis.client.info("memory"))["used_memory"])
        await its.longest_pause_s()
        began_s = time.perf_counter()
        for tenant, file_id in files:
            await its.create(tenant, input_file_id=file_id)
        for _ in range(small):  # for a page that is full
            await its.create("a", requests=[one_line])

        async def all_checked() -> bool:
            await asyncio.sleep(0.05)
            return [await its.lines(tenant) for tenant in TENANTS] == [*wanted.values()]

        while not await all_checked():
            pass
        took_s = time.perf_counter() - began_s
        pause_s = await its.longest_pause_s()
        grown = int((await private_redis.client.info("memory"))["used_memory"]) - before
        full_ms = list[float]()
        its.pages_ms, meanwhile_ms = full_ms, its.pages_ms
        for _ in range(200):
            await its.lines("a")
    lines = sum(wanted.values())
    p95_ms = _p95(meanwhile_ms)
    print(f"\nlines={lines} redis_mb={grown / 1e6:.2f} lines_checked_a_s={lines / took_s:.0f}")
    print(f"page_p95_ms={p95_ms:.1f} afterwards_ms={_p95(full_ms):.1f} pause_s={pause_s:.3f}")
    assert grown <= MOST_REDIS_BYTES
    assert lines / took_s >= LEAST_LINES_A_S
    assert max(p95_ms, _p95(full_ms)) <= MOST_PAGE_MS


def _p95(all_ms: list[float]) -> float:
    return sorted(all_ms)[int(0.95 * len(all_ms))]
