"""Objects by path, in a folder or in a bucket of S3, through obstore, whose work runs on threads of
its own.

An object is whole or absent: a folder gets it by a rename, S3 by the end of a multipart upload. A
process that is killed while it writes leaves a part: `drop_unfinished` removes it from a folder; a
bucket needs a rule for its lifecycle (docs/kubernetes.md).
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from serve_app.errors import HermesError
from serve_app.loops import retrieved
from serve_app.redaction import redacted

PIECE_BYTES = 2**20
_PART_BYTES = 5 * 2**20
"""Of an upload. S3 takes 10,000 of them, and none that is smaller."""
_PARTS_AT_ONCE = 2
_DELETED_AT_ONCE = 1000
_TO_S3 = "s3://"


class StorageUnavailable(HermesError):
    """The storage cannot be reached, is full or refuses; the message holds no credential."""


class Storage:
    """A folder, or `s3://bucket/prefix`.

    S3's credentials, region and endpoint come from the environment, by AWS's names
    (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`, and those of
    roles on EC2 and EKS).

    All methods raise `StorageUnavailable`; those that read, `FileNotFoundError` for an object that
    does not exist.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._folder = None if where.startswith(_TO_S3) else Path(where)
        self._giving_up: set[asyncio.Task[None]] = set()

    @cached_property
    def _store(self) -> LocalStore | S3Store:
        """Made at its first use: a service without its storage does everything else."""
        if self._folder is not None:
            return LocalStore(self._folder, mkdir=True, automatic_cleanup=True)
        bucket, _, prefix = self._where.removeprefix(_TO_S3).partition("/")
        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        return S3Store(bucket, prefix=prefix or None, client_options={"allow_http": plain})

    async def put(self, path: str, pieces: AsyncIterator[bytes]) -> int:
        """Write an object, or replace it, and return its bytes. Whatever `pieces` raises is raised
        here, and nothing is written then.
        """
        handed: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(1)
        writing = asyncio.create_task(self._write(path, _until_none(handed)))
        size = 0
        try:
            async for piece in joined(pieces):
                size += len(piece)
                await _hand(handed, piece, writing)
            await _hand(handed, None, writing)
        except BaseException as error:
            # What was uploaded is given up by what reads on, not by what is cancelled: S3 would
            # keep its parts.
            self._giving_up.add(writing)
            writing.add_done_callback(self._giving_up.discard)
            writing.add_done_callback(retrieved)
            while not handed.empty():
                handed.get_nowait()
            handed.put_nowait(error)
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.wait([writing])
            raise
        await writing
        return size

    async def _write(self, path: str, pieces: AsyncIterator[bytes]) -> None:
        with _explained():
            await obstore.put_async(
                self._store,
                path,
                pieces,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )

    async def get(self, path: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes from `start` to before `end`, in pieces of at most `PIECE_BYTES`. Each is a
        question of its own, so that a slow reader holds no connection.
        """
        if end is None:
            end = await self.size(path)
        for at in range(start, end, PIECE_BYTES):
            yield await self.read(path, at, min(at + PIECE_BYTES, end))

    async def read(self, path: str, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end`, fewer if the object ends before."""
        if start >= end:
            return b""
        with _explained():
            return bytes(await obstore.get_range_async(self._store, path, start=start, end=end))

    async def size(self, path: str) -> int:
        """Bytes of an object."""
        with _explained():
            return (await obstore.head_async(self._store, path))["size"]

    async def delete(self, paths: Sequence[str]) -> None:
        """What does not exist is no error."""
        at_once = _DELETED_AT_ONCE if self._folder is None else 1
        for first in range(0, len(paths), at_once):
            with _explained(), suppress(FileNotFoundError):
                await obstore.delete_async(self._store, paths[first : first + at_once])

    async def under(self, prefix: str, before_s: float = math.inf) -> AsyncIterator[str]:
        """Paths of the objects below a folder that were written before a time (Unix seconds, by
        the storage's clock), in no order.
        """
        with _explained():
            async for some in obstore.list(self._store, prefix):
                for one in some:
                    if one["last_modified"].timestamp() < before_s:
                        yield one["path"]

    async def drop_unfinished(self, before_s: float) -> None:
        """Remove what processes left in a folder that died while they wrote, before a time."""
        if self._folder is not None:
            await asyncio.to_thread(_drop_unfinished, self._folder, before_s)


async def each(*pieces: bytes) -> AsyncIterator[bytes]:
    """Pieces that are there already, for `Storage.put`."""
    for piece in pieces:
        yield piece


async def joined(pieces: AsyncIterator[bytes], size: int = PIECE_BYTES) -> AsyncIterator[bytes]:
    """The same bytes in pieces of `size` and a last one, however small they come: each costs a turn
    of two threads.
    """
    kept = bytearray()
    async for piece in pieces:
        kept += piece
        while len(kept) >= size:
            yield bytes(kept[:size])
            del kept[:size]
    if kept:
        yield bytes(kept)


async def _until_none(
    handed: asyncio.Queue[bytes | BaseException | None],
) -> AsyncIterator[bytes]:
    while (piece := await handed.get()) is not None:
        if isinstance(piece, BaseException):
            raise StorageUnavailable("given up")
        yield piece


async def _hand(
    handed: asyncio.Queue[bytes | BaseException | None],
    piece: bytes | None,
    writing: asyncio.Task[None],
) -> None:
    """Hand a piece to a task, as soon as it can take one; raises why it has ended, if it has."""
    handing = asyncio.ensure_future(handed.put(piece))
    try:
        await asyncio.wait((handing, writing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        handing.cancel()
    if writing.done() and piece is not None:
        writing.result()


def _drop_unfinished(folder: Path, before_s: float) -> None:
    for path in folder.rglob("*#*"):  # obstore's names of what is not whole
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < before_s:
                path.unlink()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        first = str(error).partition("\n")[0]  # what follows is for who debugs obstore
        raise StorageUnavailable(redacted(first)) from None
