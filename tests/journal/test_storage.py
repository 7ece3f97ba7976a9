"""Objects are whole or absent, in a folder and in S3."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest

from serve_app.files.storage import PIECE_BYTES, Storage, StorageUnavailable, joined
from tests.s3_server import S3Server, s3_server
from tests.waiting import eventually

MIB = 2**20
LATER_S = 2**32


async def pieces(*some: bytes) -> AsyncIterator[bytes]:
    for piece in some:
        yield piece


async def breaking(error: Exception) -> AsyncIterator[bytes]:
    """More than an upload's parts, and an end that was not expected."""
    for _ in range(20):
        yield b"x" * MIB
    raise error


async def whole(storage: Storage, path: str, start: int = 0, end: int | None = None) -> bytes:
    return b"".join([piece async for piece in storage.get(path, start, end)])


async def found(storage: Storage, prefix: str) -> dict[str, int]:
    return {path: await storage.size(path) async for path in storage.under(prefix)}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def on_s3(s3: S3Server, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Storage:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return Storage(f"{s3.where}/prefix/{namespace}")


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return Storage(str(tmp_path / "made" / "when needed"))
    made: Storage = request.getfixturevalue("on_s3")
    return made


async def test_an_object_is_read_as_it_was_written(storage: Storage) -> None:
    some = [os.urandom(size) for size in (1, 7 * MIB, 100, 17 * MIB + 3)]
    content = b"".join(some)
    assert await storage.put("files/a/1", pieces(*some)) == len(content)
    assert await whole(storage, "files/a/1") == content
    assert max([len(piece) async for piece in storage.get("files/a/1")]) == PIECE_BYTES
    assert await whole(storage, "files/a/1", 5, 3 * MIB) == content[5 : 3 * MIB]
    assert await whole(storage, "files/a/1", len(content) - 3) == content[-3:]
    assert await storage.read("files/a/1", MIB, MIB + 9) == content[MIB : MIB + 9]
    assert await storage.read("files/a/1", len(content) - 3, len(content) + 9) == content[-3:]
    assert await storage.put("files/a/1", pieces(b"other")) == 5
    assert await whole(storage, "files/a/1") == b"other"


async def test_an_object_may_be_empty(storage: Storage) -> None:
    assert await storage.put("files/a/1", pieces()) == 0
    assert await whole(storage, "files/a/1") == b""
    assert await storage.read("files/a/1", 0, 0) == b""


async def test_objects_are_found_below_a_folder_and_deleted(storage: Storage) -> None:
    for path in ("files/a/1", "files/a/2", "files/ab/3"):
        await storage.put(path, pieces(b"12"))
    assert await found(storage, "files/a") == {"files/a/1": 2, "files/a/2": 2}
    assert len(await found(storage, "files")) == 3
    assert await found(storage, "none") == {}
    await storage.delete(["files/a/1", "files/a/none", "files/ab/3"])
    await storage.delete([])
    assert await found(storage, "files") == {"files/a/2": 2}
    with pytest.raises(FileNotFoundError):
        await whole(storage, "files/a/1")
    with pytest.raises(FileNotFoundError):
        await storage.read("files/a/1", 0, 1)


async def test_objects_are_found_by_their_age(storage: Storage) -> None:
    await storage.put("files/a/1", pieces(b"12"))
    assert [path async for path in storage.under("files", LATER_S)] == ["files/a/1"]
    assert [path async for path in storage.under("files", 1)] == []


async def test_what_breaks_off_leaves_what_was_there(storage: Storage) -> None:
    for error in (ConnectionError("gone"), ValueError("malformed")):
        with pytest.raises(type(error), match=str(error)):
            await storage.put("files/a/1", breaking(error))
        assert await found(storage, "files") == {}
    await storage.put("files/a/1", pieces(b"old"))
    with pytest.raises(ConnectionError):
        await storage.put("files/a/1", breaking(ConnectionError()))
    assert await whole(storage, "files/a/1") == b"old"


async def test_what_a_killed_process_left_in_a_folder_is_removed(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    await storage.put("files/a/1", pieces(b"12"))
    left = tmp_path / "files/a/2#1"  # obstore's name
    left.write_bytes(b"half")
    assert await found(storage, "files") == {"files/a/1": 2}
    await storage.drop_unfinished(1)
    assert left.exists()
    await storage.drop_unfinished(LATER_S)
    assert not left.exists()
    assert await whole(storage, "files/a/1") == b"12"


async def test_an_unfinished_object_has_the_name_that_is_removed(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))

    async def looked() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * MIB
        assert any("#" in name for _, _, names in os.walk(tmp_path) for name in names)
        assert await found(storage, "files") == {}

    await storage.put("files/a/1", looked())
    assert await found(storage, "files") == {"files/a/1": 20 * MIB}


async def test_an_impossible_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "files").touch()
    for storage in (Storage(str(tmp_path / "file")), Storage(str(tmp_path / "folder"))):
        with pytest.raises(StorageUnavailable) as told:
            await storage.put("files/1", breaking(AssertionError("it was read to its end")))
        assert "\n" not in str(told.value)


async def test_what_is_cancelled_leaves_what_was_there(storage: Storage) -> None:
    await storage.put("files/a/1", pieces(b"old"))
    begun = asyncio.Event()

    async def stopping() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * MIB
        begun.set()
        await asyncio.Event().wait()

    writing = asyncio.create_task(storage.put("files/a/1", stopping()))
    await begun.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await eventually(lambda: not storage._giving_up)
    assert await whole(storage, "files/a/1") == b"old"
    assert await found(storage, "files") == {"files/a/1": 3}


async def test_s3_keeps_nothing_of_what_broke_off(on_s3: Storage, s3: S3Server) -> None:
    await on_s3.put("files/a/1", pieces(b"12"))
    uploading = []

    async def looked(then: Awaitable[object]) -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * MIB
        uploading.append(len(s3.unfinished()))
        begun.set()
        await then

    async def failing() -> None:
        raise ConnectionError

    begun = asyncio.Event()
    with pytest.raises(ConnectionError):
        await on_s3.put("files/a/2", looked(failing()))
    await eventually(lambda: s3.unfinished() == [])  # the upload is given up behind the error
    begun.clear()
    cancelled = asyncio.create_task(on_s3.put("files/a/3", looked(asyncio.Event().wait())))
    await begun.wait()
    cancelled.cancel()
    await eventually(lambda: cancelled.done() and not on_s3._giving_up)
    assert uploading == [1, 1]
    await eventually(lambda: s3.unfinished() == [])
    assert await found(on_s3, "files") == {"files/a/1": 2}


async def test_a_wrong_secret_is_told_and_not_shown(
    on_s3: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(StorageUnavailable) as told:
        await Storage("s3://hermes/other").put("files/a/1", pieces(b"12"))
    assert "wrong-secret" not in str(told.value)
    assert "\n" not in str(told.value)


async def test_small_pieces_are_joined() -> None:
    assert [one async for one in joined(pieces(b"ab", b"", b"cdefg", b"h"), 3)] == [
        b"abc",
        b"def",
        b"gh",
    ]
