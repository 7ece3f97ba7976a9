"""Files of tenants: a record of each in Redis, and its content in a storage.

A record exists only while its object is whole: it is written after the object and deleted before
it. What is left between the two when a process dies is an object without a record, which `sweep`
deletes once it is a day old. `files.lua` has the scripts.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from importlib.resources import files
from typing import Literal

import msgspec

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import Reason
from serve_app.errors import RequestRefused, decoding
from serve_app.files.storage import Storage, StorageUnavailable
from serve_app.loops import repeat
from serve_app.observability.logs import Outage
from serve_app.redis.connection import Script
from serve_app.redis.keyspace import (
    expiring_files_key,
    file_bytes_key,
    file_key,
    file_upload_key,
    files_key,
    files_sweep_key,
)
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import answered
from serve_app.settings import Settings

log = logging.getLogger("hermes.ingress")

SCRIPT = Script(files(__package__).joinpath("files.lua").read_text())
PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
"""For which a client may upload.

Source: https://platform.openai.com/docs/api-reference/files/create
"""
OUTPUT = "batch_output"
_OF_BATCHES = ("batch", OUTPUT)
_FOLDER = "files"
_ID_CHARS = 64
_A_LOOK = 1_000
"""Records that one round trip reads."""


class File(msgspec.Struct, frozen=True):
    """What is known of a file. Times are Unix seconds; `expires_s`: 0 for never."""

    id: str
    tenant: str
    bytes: int
    created_s: int
    filename: str
    purpose: str
    path: str
    expires_s: int = 0


_decode = decoding(msgspec.json.Decoder(File).decode)


def new_file_id() -> str:
    """An id that nobody can guess."""
    return f"file-{secrets.token_hex(16)}"


class Files:
    """The files of all tenants.

    All methods raise `RedisUnavailable`, those that delete also `StorageUnavailable`.
    """

    def __init__(
        self, link: RedisLink, clock: RedisClock, settings: Settings, storage: Storage
    ) -> None:
        self.storage = storage
        self._link, self._clock = link, clock
        self._namespace, self._settings = settings.namespace, settings.files

    @staticmethod
    def path(tenant: str, file_id: str) -> str:
        """Where the storage has a file."""
        return f"{_FOLDER}/{hashlib.sha256(tenant.encode()).hexdigest()[:32]}/{file_id}"

    async def add(self, file: File, key: str = "", value: str = "") -> File:
        """Record a file whose object is whole. A file of a batch expires after
        `files.batch_retention_days`, unless it says when. Repeating it changes nothing.

        Args:
            key: an `Idempotency-Key`, under which the tenant has one file for a day.
            value: what must be equal then, as a digest.

        Returns:
            The file, or the earlier one of the key; the object of the other is the caller's to
            delete.

        Raises:
            RequestRefused: `tenant_limit`, with the numbers, beyond a bound; outputs of batches
                are counted and not refused. `idempotency_conflict`.
        """
        lifetime_s = int(self._settings.batch_retention_days * 86_400)
        if not file.expires_s and file.purpose in _OF_BATCHES:
            file = msgspec.structs.replace(file, expires_s=file.created_s + lifetime_s)
        while True:
            there = await self._add(file, key, value)
            if there.id == file.id or not self._is_over(there):
                return there
            await self._remove(there)

    async def check_room(self, tenant: str, size: int) -> None:
        """Whether a tenant may have another file of so many bytes; raises as `add`."""
        used, count = await self._link.call(
            [
                ("HGET", file_bytes_key(self._namespace), tenant),
                ("ZCARD", files_key(self._namespace, tenant)),
            ]
        )
        bytes_used, number = int(answered(used) or 0), int(answered(count))
        most = self._settings
        if bytes_used + size > most.bytes_per_tenant or number >= most.files_per_tenant:
            raise self._full(size, bytes_used, number)

    async def get(self, tenant: str, file_id: str) -> File | None:
        """A tenant's file; None if there is none, it has expired, or it is another's."""
        if len(file_id) > _ID_CHARS:
            return None
        (found,) = await self._records([file_id])
        if found is None or found.tenant != tenant or self._is_over(found):
            return None
        return found

    async def knows(self, tenant: str, path: str) -> bool:
        """Whether a tenant has a file at this place in the storage: it was not deleted."""
        return await self.get(tenant, path.rpartition("/")[2]) is not None

    async def listed(
        self,
        tenant: str,
        purpose: str = "",
        after: str = "",
        order: Literal["asc", "desc"] = "desc",
        limit: int = 10_000,
    ) -> tuple[list[File], bool] | None:
        """A page of a tenant's files by their creation, and whether there are more; None if there
        is no file `after` which it begins.
        """
        key, reverse = files_key(self._namespace, tenant), ("REV",) if order == "desc" else ()
        begin = 0
        if after:
            ask = "ZREVRANK" if reverse else "ZRANK"
            rank = answered((await self._link.call([(ask, key, after)]))[0])
            if rank is None:
                return None
            begin = rank + 1
        found: list[File] = []
        while True:
            asked = ("ZRANGE", key, begin, begin + _A_LOOK - 1, *reverse)
            ids = answered((await self._link.call([asked], large=True))[0])
            some = await self._records([name.decode() for name in ids])
            here = [one for one in some if one is not None and not self._is_over(one)]
            found += [one for one in here if purpose in ("", one.purpose)]
            if len(found) > limit or len(ids) < _A_LOOK:
                return found[:limit], len(found) > limit
            begin += _A_LOOK

    async def delete(self, tenant: str, file_id: str) -> bool:
        """Delete a tenant's file; False if there is none."""
        file = await self.get(tenant, file_id)
        if file is not None:
            await self._remove(file)
        return file is not None

    # -- what nobody deletes -----------------------------------------------------------------------

    async def keep_swept(self) -> None:
        """`sweep` now and then, at one ingress at a time; never returns."""
        outage = Outage(log, "files: cannot look for those that have expired")
        await repeat(timings.FILES_SWEEP_LOOK_S, self._sweep_if_due, outage)

    async def _sweep_if_due(self) -> None:
        lock = ("SET", files_sweep_key(self._namespace), 1, "NX", "PX", timings.FILES_SWEEP_MS)
        if answered((await self._link.call([lock]))[0]) is not None:
            try:
                await self.sweep()
            except (StorageUnavailable, FileNotFoundError) as error:  # it is for the next
                log.error("the storage of files cannot be searched: %s", error)

    async def sweep(self) -> None:
        """Delete the files that have expired, and what dead processes left in the storage."""
        now_s = self._clock.now_s()
        where = (expiring_files_key(self._namespace), "-inf", now_s)
        over = answered((await self._link.call([("ZRANGEBYSCORE", *where)], large=True))[0])
        for begin in range(0, len(over), _A_LOOK):
            some = [name.decode() for name in over[begin : begin + _A_LOOK]]
            for file in await self._records(some):
                if file is not None:
                    await self._remove(file)
        before_s = now_s - timings.UNKNOWN_OBJECT_S
        paths: list[str] = []
        async for path in self.storage.under(_FOLDER, before_s):
            paths.append(path)
            if len(paths) == _A_LOOK:
                await self._delete_unknown(paths)
                paths = []
        await self._delete_unknown(paths)
        await self.storage.drop_unfinished(before_s)

    async def _delete_unknown(self, paths: Sequence[str]) -> None:
        known = await self._records([path.rpartition("/")[2] for path in paths])
        pairs = zip(paths, known, strict=True)
        await self.storage.delete([path for path, file in pairs if not file or file.path != path])

    # -- Redis -------------------------------------------------------------------------------------

    async def _add(self, file: File, key: str, value: str) -> File:
        most = self._settings
        digest = hashlib.sha256(f"{file.tenant}\n{key}".encode()).hexdigest()
        keys = (*self._keys(file), *([file_upload_key(self._namespace, digest)] if key else ()))
        bounded = file.purpose != OUTPUT
        words = (
            "add",
            file.id,
            file.tenant,
            msgspec.json.encode(file),
            file.bytes,
            self._clock.now_ms(),
            file.expires_s,
            most.bytes_per_tenant if bounded else 0,
            most.files_per_tenant if bounded else 0,
            value,
            timings.FILE_KEY_MS,
        )
        (reply,) = await self._link.call([("EVAL", SCRIPT, len(keys), *keys, *words)])
        match answered(reply):
            case [b"there", record]:
                return _decode(record)
            case [b"full", used, count]:
                raise self._full(file.bytes, used, count)
        raise RequestRefused(
            Reason.IDEMPOTENCY_CONFLICT,
            "This Idempotency-Key was used for a file of another content or purpose.",
        )

    async def _remove(self, file: File) -> None:
        keys = self._keys(file)
        words = ("remove", file.id, file.tenant, file.bytes)
        answered((await self._link.call([("EVAL", SCRIPT, len(keys), *keys, *words)]))[0])
        await self.storage.delete([file.path])

    def _keys(self, file: File) -> tuple[str, ...]:
        name = self._namespace
        mine = file_key(name, file.id), files_key(name, file.tenant)
        return *mine, file_bytes_key(name), expiring_files_key(name)

    async def _records(self, ids: Sequence[str]) -> list[File | None]:
        if not ids:
            return []
        command = ("MGET", *(file_key(self._namespace, file_id) for file_id in ids))
        (found,) = await self._link.call([command], large=len(ids) > 1)
        return [_decode(one) if one is not None else None for one in answered(found)]

    def _is_over(self, file: File) -> bool:
        return 0 < file.expires_s <= self._clock.now_s()

    def _full(self, size: int, used: int, count: int) -> RequestRefused:
        most = self._settings
        return RequestRefused(
            Reason.TENANT_LIMIT,
            f"You have {count:,} files of {used:,} bytes together, and this one has {size:,}; at "
            f"most {most.files_per_tenant:,} files and {most.bytes_per_tenant:,} bytes are kept "
            "for you. Delete some first.",
            more_headers={"x-should-retry": "false"},
        )
