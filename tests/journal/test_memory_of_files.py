"""An ingress that receives and sends files of 200 MB hardly grows."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.s3_server import s3_server
from tests.waiting import PATIENCE_S

MIB = 2**20
MOST_MIB = 64
SIZE = 200_000_000
LINE = b'{"custom_id": "a", "body": {"messages": "' + b"x" * 960 + b'"}}\n'
INGRESS = """
import asyncio, sys
from tests.journal.in_process import door
async def main():
    url, namespace, folder = sys.argv[1:]
    async with door(url, namespace, files={"storage": folder}) as d:
        print(d.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


class Ingress:
    """One in a process of its own."""

    def __init__(self, pid: int, http: httpx.AsyncClient) -> None:
        self.http = http
        self._status = Path(f"/proc/{pid}/status")
        self._peak = Path(f"/proc/{pid}/clear_refs")

    def mib(self, name: str) -> int:
        (kib,) = re.findall(rf"^{name}:\s+(\d+) kB$", self._status.read_text(), re.MULTILINE)
        return int(kib) // 1024

    def forget_peak(self) -> None:
        self._peak.write_text("5")

    async def upload(self, size: int) -> str:
        body = _form(size)
        answer = await self.http.post(
            "/v1/files",
            content=body,
            headers={"content-type": "multipart/form-data; boundary=hermes"},
        )
        assert answer.status_code == 200, answer.text
        return str(json.loads(answer.text)["id"])

    async def downloaded(self, file_id: str) -> tuple[int, str]:
        """Bytes and digest."""
        size, digest = 0, hashlib.sha256()
        async with self.http.stream("GET", f"/v1/files/{file_id}/content") as answer:
            async for piece in answer.aiter_bytes():
                size += len(piece)
                digest.update(piece)
        return size, digest.hexdigest()


async def _form(size: int) -> AsyncIterator[bytes]:
    head = "--hermes\r\nContent-Disposition: form-data; name="
    yield f'{head}"purpose"\r\n\r\nbatch\r\n{head}"file"; filename="a"\r\n\r\n'.encode()
    for piece in _content(size):
        yield piece
    yield b"\r\n--hermes--\r\n"


def _content(size: int) -> list[bytes]:
    block = LINE * 64
    whole, rest = divmod(size, len(block))
    return [block] * whole + [block[:rest]]


@asynccontextmanager
async def ingress(redis_url: str, namespace: str, where: str) -> AsyncIterator[Ingress]:
    words = (sys.executable, "-c", INGRESS, redis_url, namespace, where)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            port = int(await process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            yield Ingress(process.pid, http)
        process.stdin.close()
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture(params=["folder", "s3"])
def where(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path)
        return
    with s3_server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server.where


@pytest.mark.clock
async def test_an_ingress_hardly_grows_with_200_mb(
    redis_url: str, namespace: str, where: str
) -> None:
    async with ingress(redis_url, namespace, where) as its:
        await its.downloaded(await its.upload(1000))
        before = its.mib("VmRSS")
        its.forget_peak()
        file_id = await its.upload(SIZE)
        uploaded = its.mib("VmHWM") - before
        expected = hashlib.sha256()
        for piece in _content(SIZE):
            expected.update(piece)
        assert await its.downloaded(file_id) == (SIZE, expected.hexdigest())
        grown = its.mib("VmHWM") - before
        print(f"MiB: {before} before, {uploaded} more for the upload, {grown} for both")
        assert grown <= MOST_MIB
