"""`/v1/organization/dead_letters`: the requests that were given up, for operators to send
again or to delete.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.admission.admission import Submission
from serve_app.ingress.exchange import Exchanges
from serve_app.ingress.objects import listing, not_found
from serve_app.ingress.objects_api import Readers
from serve_app.journal.entries import RequestFacts
from serve_app.policy.tenants import Tenant
from serve_app.policy.work import work_of
from serve_app.request_queue import DeadLetter, DeadLetters, UnreadableLetter

log = logging.getLogger("hermes.ingress")

PATH = "/v1/organization/dead_letters"
_ONE = PATH + "/{request_id}"
_SHOWN_BYTES = 60
"""Longer fields of an entry that nobody can read are shown by their length."""


def routes(
    dead: DeadLetters,
    readers: Readers,
    exchanges: Exchanges,
    again: Callable[[RequestFacts], RequestFacts],
) -> APIRouter:
    """`again`: makes the facts of a request that is sent again from those that it had."""
    router = APIRouter(tags=["dead letters"])

    def answer(request: Request, make: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
        request.state.caller.check_admin("Dead letters are")
        return readers.json(request, make)

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

    @router.get(PATH, summary="The requests that were given up, oldest first, for admins")
    async def list_letters(request: Request) -> Response:
        async def make() -> dict[str, Any]:
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

        return answer(request, make)

    @router.get(_ONE, summary="One of them, with its body if text=true")
    async def show(request_id: str, request: Request, text: bool = False) -> Response:
        async def make() -> dict[str, Any]:
            letter = await found(request_id)
            return _described(letter) | ({"body": _body(letter)} if text else {})

        return answer(request, make)

    @router.post(_ONE + "/redrive", summary="Send it again as a new request, and delete it")
    async def redrive(request_id: str, request: Request) -> Response:
        async def make() -> dict[str, Any]:
            letter = await found(request_id)
            work = work_of(letter.line.path, letter.body, msgspec.json.decode(letter.body))
            # Until it is deleted, a letter that is sent again twice is one request.
            key = f"dead-letter-{letter.entry_id}"
            submission = Submission(again(letter.facts), letter.line, letter.body, work, key)
            new_id, *_ = await exchanges.submit_detached(submission)
            await dead.remove(request_id)
            tell(request, f"dead_letter.redriven request={request_id} as={new_id}")
            return {"id": request_id, "object": "dead_letter.redriven", "request_id": new_id}

        return answer(request, make)

    @router.delete(_ONE, summary="Delete it")
    async def drop(request_id: str, request: Request) -> Response:
        async def make() -> dict[str, Any]:
            await found(request_id)
            await dead.remove(request_id)
            tell(request, f"dead_letter.deleted request={request_id}")
            return {"id": request_id, "object": "dead_letter.deleted", "deleted": True}

        return answer(request, make)

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
