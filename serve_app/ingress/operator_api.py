"""What operators see and do: capacity, usage and dead letters of all tenants. A tenant sees its own
part of the first two, `/v1/capacity` and `/v1/usage`.
"""

from __future__ import annotations

import datetime
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import JSONResponse

from serve_app import timings
from serve_app.admission.admission import Submission
from serve_app.admission.limits import AdmissionLimits
from serve_app.clock import RedisClock
from serve_app.cluster.members import Members
from serve_app.contract import FINAL, EngineReport, Reason
from serve_app.errors import failed, invalid_value
from serve_app.ingress.exchange import Exchanges
from serve_app.ingress.objects import listing, not_found
from serve_app.ingress.objects_api import Readers
from serve_app.journal.entries import RequestFacts
from serve_app.journal.ledger import Row, Whose, sums
from serve_app.policy.classes import BATCH, CLASSES
from serve_app.policy.overload import Overload
from serve_app.policy.tenants import Tenant
from serve_app.policy.work import work_of
from serve_app.redis.link import RedisLink
from serve_app.requests.dead_letters import DeadLetter, DeadLetters, UnreadableLetter

log = logging.getLogger("hermes.ingress")

_HOURS = {"1h": 1, "1d": 24}
_LIMITS = {"1h": (24, 168), "1d": (7, 31)}
"""Of buckets on a page, as OpenAI has them: usual and largest."""
_YEAR_10000_S = 253_402_300_800
_PAGE = "page_"
_DEAD = "/v1/organization/dead_letters"
_ONE_DEAD = _DEAD + "/{request_id}"
_SHOWN_BYTES = 60
"""Longer fields of an entry that nobody can read are shown by their length."""

# -- capacity -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capacity:
    """`/v1/capacity`: what one ingress knows of the load, without asking Redis. Times are seconds
    and at most half a second old; `None` is not known.
    """

    ingress: str
    model: str
    overload: Overload
    limits: AdmissionLimits
    members: Callable[[], Members]

    def of_all(self) -> dict[str, Any]:
        """What waits by class, and what the engines of each model of the namespace have."""
        engines = self.members().engines
        models = {self.model, *(one.model for one in engines if one.model)}
        data = [self._engines(name, engines) for name in sorted(models)]
        return self._answer(classes={name: self._class(name) for name in CLASSES}, data=data)

    def of_tenant(self, caller: Tenant) -> dict[str, Any]:
        """What it has waiting that came to this ingress, and how long its next request waits."""
        waiting = Counter(
            place.request_class for place in self.limits.waiting if place.tenant == caller.id
        )
        classes = {
            name: {
                "waiting": waiting[name],
                "estimated_wait_s": _rounded(self.overload.wait_s(name, caller.id)),
                "breaker": self._breaker(name),
            }
            for name in caller.classes
        }
        return self._answer(tenant=caller.id, classes=classes, limits=caller.limits._asdict())

    def _answer(self, **fields: Any) -> dict[str, Any]:
        return {"object": "capacity", "ingress": self.ingress, "model": self.model, **fields}

    def _class(self, name: str) -> dict[str, Any]:
        depth, flow = self.limits.depths.get(name), self.overload.flow(name)
        return {
            "unclaimed": depth.waiting if depth else None,
            "claimed": depth.claimed if depth else None,
            "oldest_unclaimed_s": _rounded(depth.oldest_s) if depth else None,
            "waiting_cost": round(flow.backlog),
            "drain_cost_per_s": _rounded(self.overload.drain_per_s(name)),
            "estimated_wait_s": _rounded(self.overload.wait_s(name)),
            "breaker": self._breaker(name),
        }

    def _breaker(self, name: str) -> str:
        return "open" if name in self.overload.open else "closed"

    def _engines(self, model: str, reports: tuple[EngineReport, ...]) -> dict[str, Any]:
        """Also of those that do not say what they serve: of an older version, which has one."""
        own = [one for one in reports if (one.model or self.model) == model]
        kv_tokens = sum(one.kv_tokens for one in own)
        used = sum(one.used_tokens for one in own)
        return {
            "model": model,
            "replicas": len(own),
            "sequences_running": sum(one.running for one in own),
            "sequences_waiting": sum(one.waiting for one in own),
            "kv_tokens": kv_tokens,
            "kv_used": _rounded(used / kv_tokens if kv_tokens else None),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def capacity_routes(capacity: Capacity) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/v1/capacity", summary="Waits and limits of your requests; of all, for admins")
    async def shown(request: Request) -> JSONResponse:
        caller: Tenant = request.state.caller
        return JSONResponse(capacity.of_all() if caller.admin else capacity.of_tenant(caller))

    return router


# -- usage ----------------------------------------------------------------------------------------


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


def usage_routes(namespace: str, link: RedisLink, clock: RedisClock, readers: Readers) -> APIRouter:
    """OpenAI's usage. A page reads the rows of all tenants, so whoever asks counts as a reader."""
    router = APIRouter(tags=["usage"])

    async def page(asked: _Asked) -> dict[str, Any]:
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

    @router.get("/v1/usage", summary="What your requests have used, by hour or day")
    @readers.endpoint
    async def own(request: Request) -> dict[str, Any]:
        mine = {"project_ids": [request.state.tenant]}
        return await page(_Asked.of(request).model_copy(update=mine))

    @router.get("/v1/organization/usage/completions", summary="The same of all tenants, for admins")
    @readers.endpoint
    async def all_tenants(request: Request) -> dict[str, Any]:
        own = "; GET /v1/usage has your own"
        request.state.caller.check_admin("The usage of all tenants is", own)
        return await page(_Asked.of(request))

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


# -- dead letters ---------------------------------------------------------------------------------


def dead_letter_routes(
    dead: DeadLetters,
    readers: Readers,
    exchanges: Exchanges,
    again: Callable[[RequestFacts], RequestFacts],
) -> APIRouter:
    """`/v1/organization/dead_letters`: the requests that were given up, for operators to send again
    or to delete. `again`: makes the facts of a request that is sent again from those that it had.
    """
    router = APIRouter(tags=["dead letters"])

    def check(request: Request) -> None:
        request.state.caller.check_admin("Dead letters are")

    def tell(request: Request, what: str) -> None:
        """An operator has changed something."""
        caller: Tenant = request.state.caller
        log.info("admin: %s tenant=%s key=%s", what, caller.id, caller.key_id or "none")

    async def found(request_id: str) -> DeadLetter:
        last = None
        async for letter in dead.each(request_id):
            last = letter
        if not isinstance(last, DeadLetter):
            raise not_found("Dead letter", request_id)
        return last

    @router.get(_DEAD, summary="The requests that were given up, oldest first, for admins")
    @readers.endpoint
    async def list_letters(request: Request) -> dict[str, Any]:
        check(request)
        letters: dict[str, dict[str, Any]] = {}
        unreadable = []
        async for letter in dead.each():
            if isinstance(letter, UnreadableLetter):
                unreadable.append(_described_raw(letter))
            else:  # of a request's letters the last one counts
                letters.pop(letter.request_id, None)
                letters[letter.request_id] = _described(letter)
        ids: list[str | None] = [*letters] or [None]
        page = listing([*letters.values()], ids[0], ids[-1], False)
        return {**page, "unreadable": unreadable}

    @router.get(_ONE_DEAD, summary="One of them, with its body if text=true")
    @readers.endpoint
    async def show(request_id: str, request: Request, text: bool = False) -> dict[str, Any]:
        check(request)
        letter = await found(request_id)
        return _described(letter) | ({"body": _body(letter)} if text else {})

    @router.post(_ONE_DEAD + "/redrive", summary="Send it again as a new request, and delete it")
    @readers.endpoint
    async def redrive(request_id: str, request: Request) -> dict[str, Any]:
        check(request)
        letter = await found(request_id)
        if not letter.body:
            raise failed(Reason.JOURNAL_LOST)
        work = work_of(letter.line.path, letter.body, msgspec.json.decode(letter.body))
        # Until it is deleted, a letter that is sent again twice is one request.
        key = f"dead-letter-{letter.entry_id}"
        submission = Submission(again(letter.facts), letter.line, letter.body, work, key)
        new_id, *_ = await exchanges.submit_detached(submission)
        await dead.remove(request_id)
        tell(request, f"dead_letter.redriven request={request_id} as={new_id}")
        return {"id": request_id, "object": "dead_letter.redriven", "request_id": new_id}

    @router.delete(_ONE_DEAD, summary="Delete it")
    @readers.endpoint
    async def drop(request_id: str, request: Request) -> dict[str, Any]:
        check(request)
        await found(request_id)
        await dead.remove(request_id)
        tell(request, f"dead_letter.deleted request={request_id}")
        return {"id": request_id, "object": "dead_letter.deleted", "deleted": True}

    return router


def _described(letter: DeadLetter) -> dict[str, Any]:
    _, request_id, reason, attempts, line, facts, body = letter
    its = {"when": _when(letter), "reason": reason, "attempts": attempts}
    kept = {"line": line, "facts": facts, "bytes": len(body)}
    return {"id": request_id, "object": "dead_letter", **its, **kept}


def _described_raw(letter: UnreadableLetter) -> dict[str, Any]:
    fields = {
        name.decode(errors="replace"): value.decode(errors="replace")
        if len(value) <= _SHOWN_BYTES
        else f"<{len(value)} bytes>"
        for name, value in letter.fields.items()
    }
    return {"when": _when(letter), "source": letter.source, "fields": fields}


def _body(letter: DeadLetter) -> Any:
    try:
        return msgspec.json.decode(letter.body)
    except msgspec.DecodeError:
        return letter.body.decode(errors="replace")


def _when(letter: DeadLetter | UnreadableLetter) -> str:
    """When the request was given up, in UTC by Redis's clock."""
    unix_s = int(letter.entry_id.partition("-")[0]) / 1000
    return f"{datetime.datetime.fromtimestamp(unix_s, datetime.UTC):%Y-%m-%d %H:%M:%S}"
