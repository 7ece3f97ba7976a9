"""`/v1/files`, as OpenAI has it: upload, list, retrieve, content, delete.

An upload goes into the storage piece by piece; what is malformed or refused leaves nothing there.

Source: https://platform.openai.com/docs/api-reference/files
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import Reason
from serve_app.errors import RequestRefused, error_body, invalid_value, retry_headers
from serve_app.files.files import OUTPUT, PURPOSES, File, Files, new_file_id
from serve_app.ingress.connection_limits import ConnectionLimits, Uploads, check_content_encoding
from serve_app.ingress.forms import FRAME_BYTES, Form, too_large
from serve_app.ingress.objects import listing, not_found
from serve_app.ingress.objects_api import Readers

PATH = "/v1/files"
_EXPIRES = range(timings.FILE_EXPIRES_LEAST_S, timings.FILE_EXPIRES_MOST_S + 1)
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_MAX_KEY_CHARS = 1024
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_Id = Annotated[str, Query(max_length=200)]
_FORM = {
    "required": ["file", "purpose"],
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        _ANCHOR: {"type": "string", "enum": ["created_at"]},
        _SECONDS: {
            "type": "integer",
            "minimum": _EXPIRES[0],
            "maximum": _EXPIRES[-1],
            "description": "Seconds until the file is deleted",
        },
    },
}
_DESCRIBED = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
}


def not_configured(what: str) -> RequestRefused:
    """`what`: that is refused, in the plural."""
    return RequestRefused(
        Reason.NOT_CONFIGURED,
        f"{what} need a storage, and this service has none: set files.storage to a folder that all "
        "ingresses share, or to s3://bucket/prefix.",
    )


def file_object(file: File) -> dict[str, Any]:
    """A file as OpenAI describes it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s or None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


@dataclass(eq=False)
class _Upload:
    """What becomes of one upload."""

    files: Files
    uploads: Uploads
    tenant: str
    form: Form

    async def stored(self, receive: Receive, now_s: int, key: str) -> File:
        """Receive, check and record a file; raises as what it calls."""
        file_id = new_file_id()
        path = self.files.path(self.tenant, file_id)
        digest = hashlib.sha256()
        size = await self.files.storage.put(path, self._content(receive, digest))
        purpose, expires_s = _asked(self.form.fields)
        name = self.form.filename or "file"
        expires_at_s = now_s + expires_s if expires_s else 0
        file = File(file_id, self.tenant, size, now_s, name, purpose, path, expires_at_s)
        digest.update(f"\n{name}\n{purpose}\n{expires_s}".encode())
        try:
            there = await self.files.add(file, key, digest.hexdigest() if key else "")
        except RequestRefused:
            await self.files.storage.delete([path])
            raise
        if there.id != file_id:  # it was uploaded before under the same key
            await self.files.storage.delete([path])
        return there

    async def _content(self, receive: Receive, digest: Any) -> AsyncIterator[bytes]:
        """The content of the file; whatever is wrong with the form is raised before its end."""
        loop = asyncio.get_running_loop()
        until_s, size, more = loop.time() + timings.FILE_UPLOAD_S, 0, True
        while more:
            piece, more = await self.uploads.next_piece(receive)
            if loop.time() > until_s:
                raise self.uploads.never_came(timings.FILE_UPLOAD_S)
            size += len(piece)
            if size > self.form.most_bytes + FRAME_BYTES:
                raise too_large(self.form.most_bytes)
            for content in self.form.feed(piece):
                digest.update(content)
                yield content
        self.form.finish()
        _asked(self.form.fields)


def routes(
    files: Files | None,
    uploads: Uploads,
    limits: ConnectionLimits,
    readers: Readers,
    clock: RedisClock,
    max_bytes: int,
) -> APIRouter:
    """`files`: None if no storage is configured. `max_bytes`: of one file."""
    router = APIRouter(tags=["files"])

    def configured() -> Files:
        if files is None:
            raise not_configured("Files")
        return files

    async def found(file_id: str, request: Request) -> File:
        file = await configured().get(request.state.tenant, file_id)
        if file is None:
            raise not_found("File", file_id)
        return file

    @router.post(PATH, summary="Upload a file", openapi_extra=_DESCRIBED)
    async def create(request: Request) -> JSONResponse:
        its, tenant, headers = configured(), request.state.tenant, request.headers
        check_content_encoding(headers.get("content-encoding", ""))
        form = Form(headers.get("content-type", ""), max_bytes)
        key = headers.get("idempotency-key", "")
        if len(key) > _MAX_KEY_CHARS:
            raise invalid_value("Idempotency-Key", f"it has more than {_MAX_KEY_CHARS} characters")
        announced = headers.get("content-length", "0")
        size = int(announced[:18]) if announced.isascii() and announced.isdigit() else 0
        if size > max_bytes + FRAME_BYTES:
            raise too_large(max_bytes)
        await its.check_room(tenant, max(0, size - FRAME_BYTES))
        with limits.file_uploads.hold(tenant):
            upload = _Upload(its, uploads, tenant, form)
            file = await upload.stored(request.receive, int(clock.now_s()), key)
        return JSONResponse(file_object(file))

    @router.get(PATH, summary="Your files")
    async def list_files(
        request: Request,
        purpose: _Id = "",
        after: _Id = "",
        order: Literal["asc", "desc"] = "desc",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    ) -> Response:
        its = configured()
        if purpose and purpose not in (*PURPOSES, OUTPUT):
            raise invalid_value("purpose", f"it must be one of {', '.join((*PURPOSES, OUTPUT))}")

        async def make() -> bytes:
            page = await its.listed(request.state.tenant, purpose, after, order, limit)
            if page is None:
                raise invalid_value("after", f"there is no file '{after[:80]}'")
            return await asyncio.to_thread(_page, *page)

        return readers.json(request, make)

    @router.get(PATH + "/{file_id}", summary="What is known of a file")
    async def show(file_id: str, request: Request) -> JSONResponse:
        return JSONResponse(file_object(await found(file_id, request)))

    @router.get(PATH + "/{file_id}/content", summary="What is in a file, or a Range of it")
    async def content(file_id: str, request: Request) -> Response:
        file = await found(file_id, request)
        headers = {
            "content-type": "application/octet-stream",
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename)}",
            "accept-ranges": "bytes",
        }
        part = _part(request.headers.get("range", ""), file.bytes)
        status, (begin, end) = (200, (0, file.bytes)) if part is None else (206, part)
        if part is not None:
            if begin >= end:
                return _no_such_part(file.bytes)
            headers["content-range"] = f"bytes {begin}-{end - 1}/{file.bytes}"
        headers["content-length"] = str(end - begin)
        if request.state.head:
            return Response(status_code=status, headers=headers)
        storage = configured().storage
        try:
            await storage.size(file.path)
        except FileNotFoundError:  # it was deleted just now
            raise not_found("File", file_id) from None
        return readers.pieces(request, storage.get(file.path, begin, end), status, headers)

    @router.delete(PATH + "/{file_id}", summary="Delete a file")
    async def delete(file_id: str, request: Request) -> JSONResponse:
        if not await configured().delete(request.state.tenant, file_id):
            raise not_found("File", file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return router


def _page(files: list[File], more: bool) -> bytes:
    first, last = (files[0].id, files[-1].id) if files else (None, None)
    return msgspec.json.encode(listing([file_object(file) for file in files], first, last, more))


def _asked(fields: dict[str, str]) -> tuple[str, int]:
    """The purpose of an upload, and in how many seconds it expires; 0 if it does not say."""
    purpose = fields.get("purpose", "")
    if purpose not in PURPOSES:
        raise invalid_value("purpose", f"it must be one of {', '.join(PURPOSES)}")
    if not any(name.startswith("expires_after") for name in fields):
        return purpose, 0
    if fields.get(_ANCHOR) != "created_at":
        raise invalid_value(_ANCHOR, "it must be 'created_at'")
    text = fields.get(_SECONDS, "")
    seconds = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if seconds not in _EXPIRES:
        raise invalid_value(_SECONDS, f"it must be {_EXPIRES[0]} to {_EXPIRES[-1]}")
    return purpose, seconds


def _part(asked: str, size: int) -> tuple[int, int] | None:
    """The first byte of a `Range`, and the one behind its last, which is not above the first if
    there are no such bytes; None for all, as for what is no range or several.
    """
    match = _RANGE.fullmatch(asked.strip())
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size


def _no_such_part(size: int) -> Response:
    body = error_body(Reason.INVALID_REQUEST, f"The file has {size} bytes.", "range")
    reason = {"x-hermes-reason": Reason.INVALID_REQUEST, **retry_headers(Reason.INVALID_REQUEST)}
    return JSONResponse(body, 416, {"content-range": f"bytes */{size}", **reason})
