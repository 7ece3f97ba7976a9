"""What requests have used, in OpenAI's shape: `/v1/usage` and
`/v1/organization/usage/completions`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import Response

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import FINAL
from serve_app.errors import invalid_value
from serve_app.ingress.objects_api import Readers
from serve_app.journal.usage import Row, Whose, sums
from serve_app.policy.classes import BATCH
from serve_app.redis.link import RedisLink

_HOURS = {"1h": 1, "1d": 24}
_LIMITS = {"1h": (24, 168), "1d": (7, 31)}
"""Of buckets on a page, as OpenAI has them: usual and largest."""
_YEAR_10000_S = 253_402_300_800
_PAGE = "page_"


class _Asked(BaseModel):
    """What a caller wants to know: OpenAI's parameters. Times are Unix seconds."""

    start_time: int | None = Field(None, ge=0, lt=_YEAR_10000_S)
    end_time: int | None = Field(None, ge=0, lt=_YEAR_10000_S)
    bucket_width: Literal["1h", "1d"] = "1d"
    """OpenAI's `1m` is finer than the ledger."""
    group_by: list[Literal["project_id", "api_key_id", "model", "batch", "class"]] = []
    project_ids: list[str] = Field([], max_length=100)
    api_key_ids: list[str] = Field([], max_length=100)
    models: list[str] = Field([], max_length=100)
    batch: bool | None = None
    limit: int | None = Field(None, ge=1)
    page: str = Field("", max_length=64)

    @classmethod
    def of(cls, request: Request) -> _Asked:
        """The parameters of a request; a list may be written with `[]`, as OpenAI's SDKs do."""
        values: dict[str, Any] = {}
        for key, value in request.query_params.multi_items():
            name = key.removesuffix("[]")
            field = cls.model_fields.get(name)
            if field is not None and field.default == []:
                values.setdefault(name, []).append(value)
            else:
                values[name] = value
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None

    def group(self, whose: Whose) -> Hashable | None:
        """Names and values that a row is grouped by; None if it is not wanted."""
        known = {
            "project_id": whose.tenant,
            "api_key_id": whose.key or None,
            "model": whose.model,
            "batch": whose.request_class == BATCH,
            "class": whose.request_class,
        }
        wanted: tuple[tuple[Sequence[object], str], ...] = (
            (self.project_ids, "project_id"),
            (self.api_key_ids, "api_key_id"),
            (self.models, "model"),
            ([] if self.batch is None else [self.batch], "batch"),
        )
        if any(values and known[name] not in values for values, name in wanted):
            return None
        return tuple((name, known[name]) for name in self.group_by)


def routes(namespace: str, link: RedisLink, clock: RedisClock, readers: Readers) -> APIRouter:
    """The endpoints. A page reads the rows of all tenants, so whoever asks counts as a reader."""
    router = APIRouter(tags=["usage"])

    def page(request: Request, asked: _Asked) -> Response:
        usual, most = _LIMITS[asked.bucket_width]
        if asked.limit is not None and asked.limit > most:
            raise invalid_value("limit", f"it must be at most {most} for this bucket_width")
        now_s, hours = clock.now_ms() // 1000, _HOURS[asked.bucket_width]
        end_s = now_s + 1 if asked.end_time is None else min(asked.end_time, now_s + 1)
        start_s = end_s - 86_400 if asked.start_time is None else asked.start_time
        first = _begin(asked.page, start_s) // (hours * timings.HOUR_S) * hours
        buckets = range(first, -(-end_s // timings.HOUR_S), hours)
        shown = buckets[: asked.limit or usual]
        more = len(shown) < len(buckets)

        async def make() -> dict[str, Any]:
            found = await sums(link, namespace, shown, asked.group)
            return {
                "object": "page",
                "data": [
                    {
                        "object": "bucket",
                        "start_time": hour * timings.HOUR_S,
                        "end_time": (hour + hours) * timings.HOUR_S,
                        "results": [_result(row, group) for group, row in rows.items()],
                    }
                    for hour, rows in zip(shown, found, strict=True)
                ],
                "has_more": more,
                "next_page": f"{_PAGE}{shown[-1] + hours}" if more else None,
            }

        return readers.json(request, make)

    @router.get("/v1/usage", summary="What your requests have used, by hour or day")
    async def own(request: Request) -> Response:
        mine = {"project_ids": [request.state.tenant]}
        return page(request, _Asked.of(request).model_copy(update=mine))

    @router.get("/v1/organization/usage/completions", summary="The same of all tenants, for admins")
    async def all_tenants(request: Request) -> Response:
        own = "; GET /v1/usage has your own"
        request.state.caller.check_admin("The usage of all tenants is", own)
        return page(request, _Asked.of(request))

    return router


def _begin(page: str, start_s: int) -> int:
    """Where a page begins, in Unix seconds."""
    if not page:
        return start_s
    hour = page.removeprefix(_PAGE)
    if hour == page or not hour.isdecimal() or int(hour) * timings.HOUR_S >= _YEAR_10000_S:
        raise invalid_value("page", "it must be the next_page of an earlier answer")
    return int(hour) * timings.HOUR_S


def _result(row: Row, group: Any) -> dict[str, Any]:
    """OpenAI's fields, and behind them our own."""
    usage = row.usage
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": usage.prompt,
        "input_cached_tokens": usage.cached,
        "output_tokens": usage.output,
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "num_model_requests": row.requests,
        **dict.fromkeys(("project_id", "user_id", "api_key_id", "model", "batch")),
        **dict(group),
        "output_reasoning_tokens": usage.reasoning,
        "recomputed_tokens": usage.recomputed,
        "attempts": row.attempts,
        "queued_ms": row.queued_ms,
        "running_ms": row.running_ms,
        "states": dict(zip(FINAL, row.states, strict=True)),
    }
