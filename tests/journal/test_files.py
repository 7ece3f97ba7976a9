"""Records of files, and the bounds, ages and leftovers of what they stand for; on a real Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable, RequestRefused
from serve_app.files.files import OUTPUT, File, Files, new_file_id
from serve_app.files.storage import Storage
from tests.journal.journal_helpers import World
from tests.tables import each
from tests.waiting import eventually

DAY_S = 86_400
CONTENT = b"0123456789"


@pytest.fixture
def sections() -> dict[str, Any]:
    return {"files": {"bytes_per_tenant": 1024, "files_per_tenant": 5}}


@pytest.fixture
async def its(w: World, tmp_path: Path) -> Files:
    clock = w.store.clock
    await w.link.call([("PING",)])
    return Files(w.link, clock, w.settings, Storage(str(tmp_path)))


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def stored(its: Files, tenant: str = "t", content: bytes = CONTENT, **fields: Any) -> File:
    """A file whose object is whole and which has no record."""
    file_id = new_file_id()
    path = its.path(tenant, file_id)
    size = await its.storage.put(path, pieces(content))
    now_s = int(its._clock.now_s())
    return replace(File(file_id, tenant, size, now_s, "a.jsonl", "user_data", path), **fields)


async def added(its: Files, tenant: str = "t", **fields: Any) -> File:
    return await its.add(await stored(its, tenant, **fields))


async def objects(its: Files) -> set[str]:
    return {path async for path in its.storage.under("files")}


async def ids(its: Files, **how: Any) -> list[str]:
    page = await its.listed("t", **how)
    assert page is not None
    return [file.id for file in page[0]]


async def test_a_file_is_its_tenants_alone(its: Files) -> None:
    file = await added(its)
    assert await its.get("t", file.id) == file
    assert await its.get("other", file.id) is None
    assert await its.listed("other") == ([], False)
    assert not await its.delete("other", file.id)
    assert await objects(its) == {file.path}
    assert await its.delete("t", file.id)
    assert await its.get("t", file.id) is None
    assert await objects(its) == set()
    assert not await its.delete("t", file.id)


async def test_nothing_is_left_in_redis_of_a_deleted_file(w: World, its: Files) -> None:
    await its.delete("t", (await added(its, expires_s=2**40)).id)
    assert [key async for key in w.operator.scan_iter(f"{w.settings.namespace}:*")] == []


async def test_files_are_listed_in_pages(its: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedisClock, "now_ms", lambda _: 1_800_000_000_000)  # all in this one
    files = [await added(its, purpose="batch" if n % 2 else "evals") for n in range(5)]
    mine = [file.id for file in files]
    assert await ids(its, order="asc") == mine
    assert await ids(its) == mine[::-1]
    assert await its.listed("t", order="asc", limit=2) == (files[:2], True)
    assert await its.listed("t", order="asc", limit=3, after=mine[1]) == (files[2:], False)
    assert await ids(its, after=mine[1]) == [mine[0]]
    assert await ids(its, purpose="batch", order="asc") == [mine[1], mine[3]]
    assert (await its.listed("t", purpose="evals", limit=2) or [0, 0])[1] is True
    assert (await its.listed("t", purpose="batch", limit=2) or [0, 0])[1] is False
    assert await its.listed("t", after="none") is None


async def test_a_listing_looks_further_than_one_round_trip(
    its: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.files.files._A_LOOK", 2)
    files = [await added(its, purpose="evals" if n == 4 else "batch") for n in range(5)]
    assert await ids(its, order="asc", purpose="evals") == [files[4].id]
    assert await its.listed("t", order="asc", limit=4) == (files[:4], True)


async def test_a_tenant_has_so_many_bytes_and_files(its: Files) -> None:
    await its.check_room("t", 1024)
    first = await added(its, content=b"x" * 1000)
    for size in (25, 2000):
        with pytest.raises(RequestRefused) as told:
            await its.check_room("t", size)
        assert told.value.reason is Reason.TENANT_LIMIT
        assert all(one in told.value.message for one in ("1,000", "1,024", f"{size:,}"))
        assert told.value.headers()["x-should-retry"] == "false"
    with pytest.raises(RequestRefused, match="1,024"):
        await added(its, content=b"x" * 25)
    await added(its, "other", content=b"x" * 1000)
    await added(its, purpose=OUTPUT, content=b"x" * 1000)  # it counts and is not refused
    with pytest.raises(RequestRefused, match="2,000 bytes"):
        await its.check_room("t", 1)
    await its.delete("t", first.id)
    with pytest.raises(RequestRefused, match="1,000 bytes"):
        await its.check_room("t", 25)
    for _ in range(4):
        await added(its, content=b"")
    with pytest.raises(RequestRefused, match="5 files"):
        await added(its, content=b"")
    with pytest.raises(RequestRefused, match="5 files"):
        await its.check_room("t", 0)


async def test_an_idempotency_key_has_one_file(its: Files, w: World) -> None:
    first = await its.add(await stored(its), "key", "digest")
    second = await stored(its)
    assert await its.add(second, "key", "digest") == first
    assert await its.get("t", second.id) is None
    with pytest.raises(RequestRefused) as told:
        await its.add(await stored(its), "key", "another")
    assert told.value.reason is Reason.IDEMPOTENCY_CONFLICT
    others = [await its.add(await stored(its, "other"), "key", "another"), await added(its)]
    assert first.id not in [one.id for one in others]
    await its.delete("t", first.id)
    third = await stored(its)
    assert await its.add(third, "key", "another") == third
    (key,) = [key async for key in w.operator.scan_iter("*:file_upload:*") if await w.operator.hget(
        key, "value") == b"another" and (await w.operator.hget(key, "record") or b"").endswith(
        third.id.encode())]  # fmt: skip
    assert 0 < await w.operator.pttl(key) <= timings.FILE_KEY_MS


async def test_a_file_is_recorded_once_however_often(its: Files, w: World) -> None:
    file = await stored(its)
    assert await its.add(file) == await its.add(replace(file, filename="later")) == file
    assert await w.operator.hgetall(f"{w.settings.namespace}:file_bytes") == {b"t": b"10"}


async def test_an_expired_file_is_gone_and_then_deleted(
    its: Files, later: Callable[[float], None]
) -> None:
    now_s = int(its._clock.now_s())
    key = ("key", "digest")
    short = await its.add(await stored(its, expires_s=now_s + 4000), *key)
    long = await added(its, expires_s=now_s + 9000)
    forever = await added(its)
    later(5000)
    assert await its.get("t", short.id) is None
    assert await ids(its, order="asc") == [long.id, forever.id]
    again = await its.add(await stored(its, expires_s=now_s + 9000), *key)
    assert again.id != short.id
    assert short.path not in await objects(its)
    later(10_000)
    assert len(await objects(its)) == 3
    await its.sweep()
    assert await objects(its) == {forever.path}
    assert await its.listed("t") == ([forever], False)


@each("purpose, expires_s", [("batch", 30 * DAY_S), (OUTPUT, 30 * DAY_S), ("user_data", 0)])
async def test_files_of_batches_expire(its: Files, purpose: str, expires_s: int) -> None:
    file = await stored(its, purpose=purpose)
    assert (await its.add(file)).expires_s == (file.created_s + expires_s if expires_s else 0)


async def test_a_search_goes_on_when_the_storage_can_be_used_again(
    its: Files,
    w: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
) -> None:
    unknown = await stored(its)
    os.utime(tmp_path / unknown.path, (1, 1))
    (tmp_path / "files").rename(tmp_path / "away")
    (tmp_path / "files").symlink_to("files")  # nobody can read it
    monkeypatch.setattr(timings, "FILES_SWEEP_LOOK_S", 0.01)
    lock = f"{w.settings.namespace}:files_sweep"
    searching = asyncio.create_task(its.keep_swept())
    await eventually(lambda: "cannot be searched" in logged.text)
    assert 0 < await w.operator.pttl(lock) <= timings.FILES_SWEEP_MS
    (tmp_path / "files").unlink()
    (tmp_path / "away").rename(tmp_path / "files")
    await asyncio.sleep(0.05)
    assert await objects(its) == {unknown.path}, "another ingress may be at it"
    await w.operator.delete(lock)
    await eventually(lambda: searching.done() or not (tmp_path / unknown.path).exists())
    assert not searching.done()
    searching.cancel()


async def test_a_search_waits_for_redis(its: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that ended each time would make the ingress unhealthy."""
    monkeypatch.setattr(timings, "FILES_SWEEP_LOOK_S", 0.01)
    asked = asyncio.Queue[None]()

    async def unreachable(*_: object, **__: object) -> None:
        asked.put_nowait(None)
        raise RedisUnavailable("gone")

    monkeypatch.setattr(its._link, "call", unreachable)
    searching = asyncio.create_task(its.keep_swept())
    for _ in range(3):
        await asked.get()
    assert not searching.done()
    searching.cancel()


async def test_what_dead_processes_left_is_deleted_after_a_day(its: Files, tmp_path: Path) -> None:
    known = await added(its)
    unknown, new = await stored(its), await stored(its)
    segment = "segments/batch_1/1"
    await its.storage.put(segment, pieces(CONTENT))
    half = tmp_path / "files" / "half#1"
    half.write_bytes(CONTENT)
    long_ago_s = its._clock.now_s() - DAY_S - 60
    for path in (known.path, unknown.path, segment, "files/half#1"):
        os.utime(tmp_path / path, (long_ago_s, long_ago_s))
    await its.sweep()
    assert await objects(its) == {known.path, new.path}
    assert not half.exists()
    assert await its.storage.size(segment) == len(CONTENT)
