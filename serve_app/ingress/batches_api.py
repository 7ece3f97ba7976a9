"""`/v1/batches`, as OpenAI has it: create, retrieve, list, cancel. Beside that, any duration as
`completion_window`; a `window` of the day; inline `requests`; and `continue_from`, a batch whose
failed and expired lines a new one has.

Source: https://platform.openai.com/docs/api-reference/batch
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from serve_app.batches.record import TIMES, Batch, Batches, BatchFacts, new_batch_id
from serve_app.clock import RedisClock
from serve_app.contract import Reason
from serve_app.errors import RequestRefused, invalid, invalid_value, missing
from serve_app.files.files import File, Files, new_file_id
from serve_app.files.storage import each
from serve_app.ingress.connection_limits import Uploads, check_content_type
from serve_app.ingress.files_api import not_configured
from serve_app.ingress.objects import fields_of, listing, not_found
from serve_app.ingress.objects_api import Readers
from serve_app.ingress.validation.bodies import Validator
from serve_app.ingress.validation.fields import INFERENCE_PATHS, METADATA, Schema, check
from serve_app.ingress.validation.structure import read
from serve_app.policy.classes import BATCH
from serve_app.policy.day_windows import DayWindow, duration_s
from serve_app.policy.tenants import Tenant
from serve_app.requests.idempotency import digest
from serve_app.settings import Settings
from serve_app.settings.limits import RequestLimits
from serve_app.webhooks.events import HEADER, check_url

PATH = "/v1/batches"
_ONE = PATH + "/{batch_id}"
_MOST_INLINE = 1_000
_TEXT: Schema = {"type": ["string", "null"], "maxLength": 200}
_OUTPUT_EXPIRES: Schema = {
    "type": ["object", "null"],
    "required": ["anchor", "seconds"],
    "properties": {
        "anchor": {"type": ["string"], "enum": ["created_at"]},
        "seconds": {"type": ["integer"], "minimum": 3_600, "maximum": 30 * 86_400},
    },
}
_SOURCES = ("input_file_id", "requests", "continue_from")
_FIELDS: dict[str, Schema] = {
    "input_file_id": _TEXT,
    "requests": {
        "type": ["array", "null"],
        "items": {"type": ["object"]},
        "description": f"In place of a file, up to {_MOST_INLINE} of its lines",
    },
    "continue_from": {**_TEXT, "description": "A batch whose failed and expired lines are run"},
    "endpoint": {"type": ["string"], "enum": [*INFERENCE_PATHS]},
    "completion_window": {
        **_TEXT,
        "type": ["string"],
        "description": "1m to 7d, such as 90m, 24h or 2d",
    },
    "window": {
        **_TEXT,
        "description": "When lines may begin, such as '22:00-06:00 Europe/Berlin'",
    },
    "metadata": METADATA,
    "output_expires_after": _OUTPUT_EXPIRES,
}
_CREATE: Schema = {
    "type": ["object"],
    "required": ["endpoint", "completion_window"],
    "properties": _FIELDS,
}
_DESCRIBED = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _CREATE}}}
}
_Id = Annotated[str, Query(max_length=200)]
_Look = Callable[[str, str], Awaitable[Batch | None]]


class _Source(NamedTuple):
    """Where a batch has its lines from."""

    file_id: str
    path: str
    bytes: int
    continued_from: str = ""
    retried_path: str = ""


@dataclass(eq=False)
class BatchCreation:
    """Makes batches of what clients ask, in one ingress."""

    batches: Batches
    files: Files
    clock: RedisClock
    validator: Validator
    settings: Settings

    async def create(self, caller: Tenant, body: bytes, key: str, webhook: str = "") -> Batch:
        """The new batch, or the earlier one of the `Idempotency-Key`. `webhook`: a URL that is told
        of its end.

        Raises:
            RequestRefused: `malformed_json`, `invalid_request`, `key_not_permitted`, `not_found`,
                `idempotency_conflict`; `tenant_limit` as `Batches.create`, and as `Files.add` for
                inline requests, or if the tenant's files have no room for outputs.
        """
        if BATCH not in caller.classes:
            message = f"Requests of the class '{BATCH}' are not permitted to this API key."
            raise RequestRefused(Reason.KEY_NOT_PERMITTED, message)
        if webhook:
            check_url(self.settings.webhooks, webhook)
        limits = self.settings.limits
        asked, inline = await self.validator.apart(_asked, body, limits)
        meaning = msgspec.json.encode(asked, order="deterministic"), *inline
        batch_id, value = new_batch_id(caller.id, key), digest(*meaning) if key else ""
        earlier = await self.batches.get(caller.id, batch_id) if key else None
        if earlier is not None and earlier.facts.value == value:
            return earlier
        now_ms = self.clock.now_ms()
        expires_ms = now_ms + duration_s(asked["completion_window"]) * 1000
        window = _checked_window(asked.get("window") or "", now_ms, expires_ms)
        await self.files.check_room(caller.id, 0)  # outputs are never refused, so no more begin
        source = await self._source(caller.id, asked, inline, now_ms)
        facts = BatchFacts(
            id=batch_id,
            tenant=caller.id,
            key=caller.key_id,
            model=self.settings.model.name,
            endpoint=asked["endpoint"],
            input_file_id=source.file_id,
            input_path=source.path,
            input_bytes=source.bytes,
            created_ms=now_ms,
            expires_ms=expires_ms,
            completion_window=asked["completion_window"],
            metadata=asked.get("metadata"),
            window=window,
            output_expires_s=(asked.get("output_expires_after") or {}).get("seconds", 0),
            continued_from=source.continued_from,
            retried_path=source.retried_path,
            webhook=webhook,
            value=value,
        )
        try:  # how many tokens it takes is known once it is checked; whoever has none left gets 429
            made = await self.batches.create(facts, caller.limits, 1)
        except RequestRefused:
            if inline:
                await self.files.delete(caller.id, source.file_id)
            raise
        if inline and made.facts.input_file_id != source.file_id:  # another POST was faster
            await self.files.delete(caller.id, source.file_id)
        return made

    async def _source(
        self, tenant: str, asked: dict[str, Any], inline: list[bytes], now_ms: int
    ) -> _Source:
        if asked.get("continue_from"):
            return await self._rest(tenant, asked)
        if inline:
            file = await self._stored(tenant, inline, now_ms // 1000)
        else:
            file = await self._file(tenant, asked["input_file_id"], "input_file_id")
            if file.purpose != BATCH:
                what = f"the file was uploaded for '{file.purpose}', not for '{BATCH}'"
                raise invalid_value("input_file_id", what)
        return _Source(file.id, file.path, file.bytes)

    async def _rest(self, tenant: str, asked: dict[str, Any]) -> _Source:
        """The lines of an earlier batch that have no good answer: those of its error file."""
        param, batch_id = "continue_from", asked["continue_from"]
        earlier = await self.batches.get(tenant, batch_id)
        if earlier is None:
            raise not_found("Batch", batch_id, param)
        facts = earlier.facts
        if not earlier.state.over:
            raise invalid_value(param, "the batch is not over; cancel it, or wait")
        if not earlier.error_file_id:
            raise invalid_value(param, "no line of the batch has failed or expired")
        if asked["endpoint"] != facts.endpoint:
            raise invalid_value("endpoint", f"the batch is for '{facts.endpoint}'")
        if asked.get("input_file_id") not in (None, "", facts.input_file_id):
            raise invalid_value("input_file_id", "the batch has another one")
        file = await self._file(tenant, facts.input_file_id, param)
        failed = await self._file(tenant, earlier.error_file_id, param)
        return _Source(file.id, file.path, file.bytes, facts.id, failed.path)

    async def _file(self, tenant: str, file_id: str, param: str) -> File:
        file = await self.files.get(tenant, file_id)
        if file is None:
            raise not_found("File", file_id, param)
        return file

    async def _stored(self, tenant: str, inline: list[bytes], now_s: int) -> File:
        """An input file of inline requests."""
        file_id = new_file_id()
        path = self.files.path(tenant, file_id)
        size = sum(map(len, inline))
        await self.files.check_room(tenant, size)
        await self.files.storage.put(path, each(*inline))
        file = File(file_id, tenant, size, now_s, "requests.jsonl", BATCH, path)
        try:
            return await self.files.add(file)
        except RequestRefused:
            await self.files.storage.delete([path])
            raise


def routes(
    creation: BatchCreation | None, batches: Batches, uploads: Uploads, readers: Readers
) -> APIRouter:
    """`creation`: None if no storage is configured."""
    router = APIRouter(tags=["batches"])

    def configured() -> BatchCreation:
        if creation is None:
            raise not_configured("Batches")
        return creation

    async def found(batch_id: str, request: Request, look: _Look) -> JSONResponse:
        configured()
        batch = await look(request.state.tenant, batch_id)
        if batch is None:
            raise not_found("Batch", batch_id)
        return JSONResponse(batch_object(batch))

    @router.post(PATH, summary="Create a batch", openapi_extra=_DESCRIBED)
    async def create(request: Request) -> JSONResponse:
        its, headers, caller = configured(), request.headers, request.state.caller
        check_content_type(headers.get("content-type", ""))
        with uploads.of(caller.id) as upload:
            body = await upload.body(headers, request.receive)
            key, webhook = headers.get("idempotency-key", ""), headers.get(HEADER, "")
            batch = await its.create(caller, body, key, webhook)
        return JSONResponse(batch_object(batch))

    @router.get(PATH, summary="Your batches, the newest first")
    async def list_batches(
        request: Request, after: _Id = "", limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        configured()

        async def make() -> dict[str, Any]:
            page = await batches.listed(request.state.tenant, after, limit)
            if page is None:
                raise invalid_value("after", f"there is no batch '{after[:80]}'")
            found, more = page
            first, last = (found[0].facts.id, found[-1].facts.id) if found else (None, None)
            return listing([*map(batch_object, found)], first, last, more)

        return readers.json(request, make)

    @router.get(_ONE, summary="A batch")
    async def show(batch_id: str, request: Request) -> JSONResponse:
        return await found(batch_id, request, batches.get)

    @router.post(_ONE + "/cancel", summary="Cancel a batch; what is done is kept")
    async def cancel(batch_id: str, request: Request) -> JSONResponse:
        return await found(batch_id, request, batches.cancel)

    return router


def batch_object(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI describes it; `window` and `continued_from` are ours."""
    facts, used, over = batch.facts, batch.usage, batch.state.over
    errors = [msgspec.to_builtins(one) for one in batch.errors]
    made: dict[str, Any] = {
        "id": facts.id,
        "object": "batch",
        "endpoint": facts.endpoint,
        "model": facts.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": facts.input_file_id,
        "completion_window": facts.completion_window,
        "status": batch.state,
        "output_file_id": (over and batch.output_file_id) or None,
        "error_file_id": (over and batch.error_file_id) or None,
        "created_at": facts.created_ms // 1000,
        "expires_at": facts.expires_ms // 1000,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": {
            "input_tokens": used.prompt,
            "input_tokens_details": {"cached_tokens": used.cached},
            "output_tokens": used.output,
            "output_tokens_details": {"reasoning_tokens": used.reasoning},
            "total_tokens": used.prompt + used.output,
        },
        "metadata": facts.metadata,
        "window": facts.window or None,
        "continued_from": facts.continued_from or None,
    }
    for name in TIMES:
        made[name.replace("_ms", "_at")] = getattr(batch, name) // 1000 or None
    return made


def _asked(body: bytes, limits: RequestLimits) -> tuple[dict[str, Any], list[bytes]]:
    """What a body asks, and its inline requests as lines, with all that they say."""
    asked = read(body, limits)
    check(asked, _CREATE, limits)
    for name in asked.keys() - _FIELDS.keys():
        raise invalid(f"Unknown parameter: '{name[:200]}'.", name[:200])
    asked = {name: value for name, value in asked.items() if value is not None}
    if all(asked.get(name, "") == "" for name in _SOURCES):
        raise missing("input_file_id")
    lines = asked.pop("requests", None)
    if lines is None:
        return asked, []
    if asked.keys() & set(_SOURCES):
        raise invalid_value("requests", "a batch has these, a file or an earlier batch")
    if not 0 < len(lines) <= _MOST_INLINE:
        raise invalid_value("requests", f"there must be 1 to {_MOST_INLINE:,} of them")
    raw = msgspec.json.decode(fields_of(body)["requests"], type=list[msgspec.Raw])
    return asked, [bytes(one).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n" for one in raw]


def _checked_window(text: str, now_ms: int, expires_ms: int) -> str:
    """A window of the day, which opens before the batch expires."""
    if text and DayWindow.parse(text).opens_ms(now_ms) >= expires_ms:
        raise invalid_value("window", "it opens only when the completion_window is over")
    return text
