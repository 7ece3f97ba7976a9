"""`/v1/files` on a real ingress with a folder: as OpenAI's SDK uses it, and as nobody should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from serve_app import timings
from tests.journal.in_process import Door, door, keys_of
from tests.tables import Failures
from tests.waiting import PATIENCE_S, eventually

PATH = "/v1/files"
CONTENT = b"".join(b'{"custom_id": "%d"}\n' % n for n in range(1000))
BOUNDARY = "hermes"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, value: str | bytes, filename: str | None = None, more: str = "") -> bytes:
    named = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
    head = f"--{BOUNDARY}\r\nContent-Disposition: {named}\r\n{more}\r\n".encode()
    return head + (value.encode() if isinstance(value, str) else value) + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE = part("purpose", "batch")
FILE = part("file", CONTENT, "a.jsonl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
async def d(redis_url: str, namespace: str, tmp_path: Path, folder: Path) -> AsyncIterator[Door]:
    limits = {"max_bytes": 100_000, "bytes_per_tenant": 300_000, "max_uploads": 2}
    sections = {
        "files": {"storage": str(folder), **limits},
        "auth": keys_of(tmp_path, "alice", "bob"),
        "ingress": {"max_tenant_share": 0.5},
    }
    async with door(redis_url, namespace, **sections) as made:
        made.http.headers["authorization"] = "Bearer alice"
        yield made


def sdk(d: Door, key: str = "alice") -> AsyncOpenAI:
    url = f"http://127.0.0.1:{d.port}/v1"
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


async def upload(d: Door, *parts: bytes, **headers: str) -> Any:
    body = b"".join((*parts, END))
    return await d.http.post(PATH, content=body, headers={**FORM, **headers})


async def first_line(d: Door, body: bytes, announced: int) -> bytes:
    """Of the answer to an upload that is announced as larger than what comes of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer alice\r\n"
    head += f"Content-Type: {FORM['content-type']}\r\nContent-Length: {announced}\r\n\r\n"
    writer.write(head.encode() + body)
    line = await reader.readline()
    writer.close()
    return line


async def test_the_sdk_drives_every_method(d: Door) -> None:
    async with sdk(d) as client:
        made = await client.files.create(
            file=("in put\u00e9.jsonl", CONTENT),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (made.object, made.bytes, made.purpose) == ("file", len(CONTENT), "batch")
        assert (made.filename, made.status) == ("in put\u00e9.jsonl", "processed")
        assert made.expires_at == made.created_at + 3600
        assert await client.files.wait_for_processing(made.id) == made
        assert await client.files.retrieve(made.id) == made
        got = await client.files.content(made.id)
        assert got.content == CONTENT
        assert "in%20put%C3%A9.jsonl" in got.response.headers["content-disposition"]
        raw = await client.files.with_raw_response.retrieve(made.id)
        assert raw.parse() == made
        others = [await client.files.create(file=b"%d" % n, purpose="user_data") for n in range(3)]
        assert [one.expires_at for one in others] == [None] * 3
        assert [one.id async for one in client.files.list(order="asc", limit=2)] == [
            made.id,
            *(one.id for one in others),
        ]
        assert [one.id async for one in client.files.list(purpose="batch")] == [made.id]
        gone = await client.files.delete(made.id)
        assert (gone.id, gone.deleted, gone.object) == (made.id, True, "file")
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)


async def test_another_tenants_file_does_not_exist(d: Door) -> None:
    made = (await upload(d, PURPOSE, FILE)).json()
    async with sdk(d, "bob") as bob:
        for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError) as told:
                await call(made["id"])
            assert told.value.message.count(made["id"]) == 1
        assert (await bob.files.list()).data == []
        with pytest.raises(openai.BadRequestError):
            await bob.files.list(after=made["id"])
    assert (await d.http.get(f"{PATH}/{made['id']}")).json() == made
    refused = await d.http.get(PATH, headers={"authorization": "Bearer nobody"})
    assert refused.status_code == 401


async def test_a_part_of_a_file_can_be_read(d: Door) -> None:
    made = (await upload(d, PURPOSE, FILE)).json()
    size, url = len(CONTENT), f"{PATH}/{made['id']}/content"
    rows = {
        "bytes=0-9": (206, CONTENT[:10], f"bytes 0-9/{size}"),
        "bytes=10-": (206, CONTENT[10:], f"bytes 10-{size - 1}/{size}"),
        "bytes=-5": (206, CONTENT[-5:], f"bytes {size - 5}-{size - 1}/{size}"),
        f"bytes=5-{size + 9}": (206, CONTENT[5:], f"bytes 5-{size - 1}/{size}"),
        f"bytes={size}-": (416, None, f"bytes */{size}"),
        "bytes=-0": (416, None, f"bytes */{size}"),
        "bytes=9-5": (200, CONTENT, None),
        "bytes=0-1,3-4": (200, CONTENT, None),
        "lines=0-1": (200, CONTENT, None),
        "bytes=" + "9" * 40 + "-": (200, CONTENT, None),
    }
    with Failures() as failures:
        for asked, (status, content, told) in rows.items():
            with failures.of(asked):
                answer = await d.http.get(url, headers={"range": asked})
                assert (answer.status_code, answer.headers.get("content-range")) == (status, told)
                assert content is None or answer.content == content
    head = await d.http.head(url, headers={"range": "bytes=0-9"})
    assert (head.status_code, head.headers["content-length"], head.content) == (206, "10", b"")


async def test_an_empty_file_is_one(d: Door) -> None:
    made = (await upload(d, PURPOSE, part("file", b"", "a"))).json()
    assert (await d.http.get(f"{PATH}/{made['id']}/content")).content == b""
    answer = await d.http.get(f"{PATH}/{made['id']}/content", headers={"range": "bytes=0-0"})
    assert answer.status_code == 416


REFUSED: dict[str, tuple[int, str, str | None, list[bytes]]] = {
    "no purpose": (400, "invalid_request", "purpose", [FILE]),
    "a purpose of ours": (
        400,
        "invalid_request",
        "purpose",
        [FILE, part("purpose", "batch_output")],
    ),
    "no file": (400, "invalid_request", "file", [PURPOSE]),
    "a file as a field": (400, "invalid_request", "file", [PURPOSE, part("file", "text")]),
    "two files": (400, "invalid_request", "file", [PURPOSE, FILE, FILE]),
    "another file": (400, "invalid_request", "image", [PURPOSE, FILE, part("image", "a", "b")]),
    "no seconds": (
        400,
        "invalid_request",
        "expires_after[seconds]",
        [PURPOSE, FILE, part("expires_after[anchor]", "created_at")],
    ),
    "no anchor": (
        400,
        "invalid_request",
        "expires_after[anchor]",
        [PURPOSE, FILE, part("expires_after[seconds]", "3600")],
    ),
    "an expiry of another form": (
        400,
        "invalid_request",
        "expires_after[anchor]",
        [PURPOSE, FILE, part("expires_after", '{"anchor": "created_at", "seconds": 3600}')],
    ),
    "too soon": (
        400,
        "invalid_request",
        "expires_after[seconds]",
        [
            PURPOSE,
            FILE,
            part("expires_after[anchor]", "created_at"),
            part("expires_after[seconds]", "3599"),
        ],
    ),
    "an endless number": (
        400,
        "invalid_request",
        "expires_after[seconds]",
        [
            PURPOSE,
            FILE,
            part("expires_after[anchor]", "created_at"),
            part("expires_after[seconds]", "9" * 4000),
        ],
    ),
    "too large": (413, "body_too_large", None, [PURPOSE, part("file", b"x" * 100_001, "a")]),
    "too long a field": (400, "invalid_request", "a", [part("a", "x" * 4097), PURPOSE, FILE]),
    "too long a name": (400, "invalid_request", "file", [PURPOSE, part("file", b"x", "a" * 257)]),
    "too many parts": (400, "invalid_request", None, [part("a", "x")] * 33),
    "too long a header": (
        400,
        "invalid_request",
        None,
        [part("file", b"x", "a", "X-A: " + "a" * 5000 + "\r\n")],
    ),
    "too many headers": (
        400,
        "invalid_request",
        None,
        [part("file", b"x", "a", "X-A: a\r\n" * 20)],
    ),
    "a part without a name": (
        400,
        "invalid_request",
        None,
        [f"--{BOUNDARY}\r\n\r\nx\r\n".encode(), PURPOSE, FILE],
    ),
    "no form at all": (400, "invalid_request", None, [b"hello"]),
}


async def test_what_is_refused_leaves_nothing(d: Door, folder: Path) -> None:
    with Failures() as failures:
        for what, (status, code, param, parts) in REFUSED.items():
            with failures.of(what):
                answer = await upload(d, *parts)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
                assert stored(folder) == []
    half = await d.http.post(PATH, content=PURPOSE + FILE[:-9], headers=FORM)
    assert half.status_code == 400
    for headers in (
        {"content-type": "application/json"},
        {"content-type": "multipart/form-data"},
        {"content-type": f"multipart/form-data; boundary={'b' * 201}"},
        {**FORM, "content-encoding": "gzip"},
    ):
        answer = await d.http.post(PATH, content=PURPOSE + FILE + END, headers=headers)
        assert answer.status_code in (400, 415), headers
    assert stored(folder) == []
    assert (await d.http.get(PATH)).json()["data"] == []


async def test_a_body_that_is_announced_as_too_large_is_not_read(d: Door) -> None:
    assert b" 413 " in await first_line(d, b"", announced=9_999_999)


async def test_a_tenants_bytes_are_bounded(d: Door, folder: Path) -> None:
    large = part("file", b"x" * 99_999, "a")
    for _ in range(3):
        assert (await upload(d, PURPOSE, large)).status_code == 200
    refused = await upload(d, PURPOSE, FILE)
    assert (refused.status_code, refused.headers["x-hermes-reason"]) == (429, "tenant_limit")
    assert "299,997" in refused.json()["error"]["message"]
    assert len(stored(folder)) == 3
    async with sdk(d, "bob") as bob:
        await bob.files.create(file=CONTENT, purpose="batch")


async def test_the_same_key_is_the_same_file(d: Door, folder: Path) -> None:
    first = await upload(d, PURPOSE, FILE, **{"idempotency-key": "k"})
    again = await upload(d, PURPOSE, FILE, **{"idempotency-key": "k"})
    assert first.json() == again.json()
    assert stored(folder) == [first.json()["id"]]
    for parts in ([part("purpose", "evals"), FILE], [PURPOSE, part("file", b"x", "a.jsonl")]):
        other = await upload(d, *parts, **{"idempotency-key": "k"})
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_conflict")
    assert len(stored(folder)) == 1
    long = await upload(d, PURPOSE, FILE, **{"idempotency-key": "k" * 1025})
    assert long.status_code == 400


class Slow:
    """An upload of which the test decides when it goes on."""

    def __init__(self, d: Door, key: str = "alice") -> None:
        self._more: asyncio.Queue[bytes] = asyncio.Queue()
        headers = {**FORM, "authorization": f"Bearer {key}"}
        self.answer = asyncio.create_task(d.http.post(PATH, content=self._body(), headers=headers))

    async def _body(self) -> AsyncIterator[bytes]:
        yield PURPOSE + FILE[:-100]
        while piece := await self._more.get():
            yield piece

    def end(self) -> None:
        self._more.put_nowait(FILE[-100:] + END)
        self._more.put_nowait(b"")


async def test_one_tenants_uploads_leave_room_for_others(d: Door) -> None:
    held = d.ingress.connections.file_uploads
    slow = Slow(d)
    await eventually(lambda: len(held) == 1)
    refused = await upload(d, PURPOSE, FILE)
    assert (refused.status_code, refused.headers["x-hermes-reason"]) == (429, "tenant_limit")
    async with sdk(d, "bob") as bob:
        await bob.files.create(file=CONTENT, purpose="batch")
    slow.end()
    assert (await slow.answer).status_code == 200
    assert (await upload(d, PURPOSE, FILE)).status_code == 200
    assert len(held) == 0


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(d: Door, folder: Path) -> None:
    assert d.ingress.files is not None
    writing = d.ingress.files.storage
    slow = Slow(d)
    await eventually(lambda: len(d.ingress.connections.file_uploads) == 1)
    slow.answer.cancel()
    await eventually(lambda: len(d.ingress.connections.file_uploads) == 0)
    await eventually(lambda: not writing._giving_up)
    assert stored(folder) == []
    assert (await d.http.get(PATH)).json()["data"] == []
    assert (await upload(d, PURPOSE, FILE)).status_code == 200


async def test_an_upload_does_not_last_for_ever(
    d: Door, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(d.ingress.uploads, "stalled_s", 0.01)
    assert b" 408 " in await first_line(d, PURPOSE + FILE[:-9], announced=99_999)
    monkeypatch.setattr(d.ingress.uploads, "stalled_s", PATIENCE_S)
    monkeypatch.setattr(timings, "FILE_UPLOAD_S", -1.0)
    endless = await upload(d, PURPOSE, FILE)
    assert (endless.status_code, endless.json()["error"]["code"]) == (408, "upload_timeout")
    assert "-1 s" in endless.json()["error"]["message"]
    assert stored(folder) == []


async def test_a_lost_object_is_not_found(d: Door, folder: Path, namespace: str) -> None:
    made = (await upload(d, PURPOSE, FILE)).json()
    assert d.ingress.files is not None
    (folder / namespace / d.ingress.files.path("alice", made["id"])).unlink()
    assert (await d.http.get(f"{PATH}/{made['id']}/content")).status_code == 404


async def test_a_storage_that_cannot_be_used_is_told(d: Door, folder: Path, namespace: str) -> None:
    made = (await upload(d, PURPOSE, FILE)).json()
    top = folder / namespace
    top.rename(folder / "away")
    top.touch()
    refused = await upload(d, PURPOSE, FILE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    top.unlink()
    (folder / "away").rename(top)
    assert (await d.http.get(f"{PATH}/{made['id']}/content")).content == CONTENT


async def test_an_expired_file_is_gone(d: Door, later: Callable[[float], None]) -> None:
    expires = part("expires_after[anchor]", "created_at"), part("expires_after[seconds]", "3600")
    made = (await upload(d, PURPOSE, *expires, FILE)).json()
    later(3601)
    assert (await d.http.get(f"{PATH}/{made['id']}")).status_code == 404


async def test_without_a_storage_the_setting_is_named(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace) as d:
        rows = [
            await upload(d, PURPOSE, FILE),
            *[await d.http.get(f"{PATH}{below}") for below in ("", "/file-1", "/file-1/content")],
            await d.http.delete(f"{PATH}/file-1"),
        ]
        for answer in rows:
            assert answer.status_code == 501
            assert "files.storage" in answer.json()["error"]["message"]
            assert answer.headers["x-should-retry"] == "false"


async def test_files_are_described(d: Door) -> None:
    paths = (await d.http.get("/openapi.json")).json()["paths"]
    form = paths[PATH]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["file", "purpose"]
    assert set(paths) >= {PATH, PATH + "/{file_id}", PATH + "/{file_id}/content"}
