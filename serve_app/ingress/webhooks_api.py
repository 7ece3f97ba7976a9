"""`/v1/organization/webhooks/dead`: the events that no receiver took, for operators to send
again or to delete.
"""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.ingress.objects import listing, not_found
from serve_app.ingress.objects_api import Readers
from serve_app.policy.tenants import Tenant
from serve_app.webhooks.outbox import Dead, Outbox

log = logging.getLogger("hermes.ingress")

PATH = "/v1/organization/webhooks/dead"
_ONE = PATH + "/{dead_id}"
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


def routes(outbox: Outbox, readers: Readers) -> APIRouter:
    """The routes of one ingress."""
    router = APIRouter(tags=["webhooks"])

    def answer(request: Request, make: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
        request.state.caller.check_admin("Dead webhooks are")
        return readers.json(request, make)

    def change(
        request: Request, dead_id: str, what: str, do: Callable[[str], Awaitable[bool]]
    ) -> Response:
        async def make() -> dict[str, Any]:
            if not _ID.fullmatch(dead_id) or not await do(dead_id):
                raise not_found("Dead webhook", dead_id)
            caller: Tenant = request.state.caller
            its = what, dead_id, caller.id, caller.key_id or "none"
            log.info("admin: webhook.%s id=%s tenant=%s key=%s", *its)
            return {"id": dead_id, "object": f"webhook.{what}", what: True}

        return answer(request, make)

    @router.get(PATH, summary="The events that no receiver took, oldest first, for admins")
    async def list_dead(request: Request) -> Response:
        async def make() -> dict[str, Any]:
            found = [_described(one) for one in await outbox.dead()]
            ids = [one["id"] for one in found] or [None]
            return listing(found, ids[0], ids[-1], False)

        return answer(request, make)

    @router.post(_ONE + "/redrive", summary="Send it again")
    async def redrive(dead_id: str, request: Request) -> Response:
        return change(request, dead_id, "redriven", outbox.again)

    @router.delete(_ONE, summary="Delete it")
    async def drop(dead_id: str, request: Request) -> Response:
        return change(request, dead_id, "deleted", outbox.drop)

    return router


def _described(dead: Dead) -> dict[str, Any]:
    """The URL that a request has named may hold a secret: only its host is shown."""
    unix_s = int(dead.entry_id.partition("-")[0]) / 1000
    when = f"{datetime.datetime.fromtimestamp(unix_s, datetime.UTC):%Y-%m-%d %H:%M:%S}"
    its = dead.delivery
    event = {"event": its.event, "event_id": its.event_id, "subject": its.subject}
    whose = {"receiver": its.where, "tenant": its.tenant, "created_at": its.created_s}
    return {"id": dead.entry_id, "object": "webhook.dead", "when": when, "reason": dead.reason} | (
        event | whose
    )
