"""Answers, counts and logs refused requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from starlette.responses import Response

from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable, RequestRefused, Unreadable
from serve_app.journal.ending import MESSAGES
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry

log = logging.getLogger("hermes.ingress")


def refusal_answer(
    refusal: RequestRefused, more_headers: Mapping[str, str] | None = None
) -> Response:
    headers = {**(more_headers or {}), **refusal.headers()}
    return Response(refusal.body(), refusal.status, headers, "application/json")


def note_refusal(telemetry: Telemetry, refusal: RequestRefused, tenant: str) -> None:
    telemetry.refused(refusal.reason)
    log.info(
        "request refused: %s: %s",
        refusal.reason,
        refusal.message,
        extra=about("", tenant, refusal.reason),
    )


def internal() -> RequestRefused:
    return RequestRefused(Reason.INTERNAL, "The service failed on this request.")


def refusal_of(error: RequestRefused | RedisUnavailable | Unreadable) -> RequestRefused:
    """The refusal of a query about a request, also while Redis cannot be reached, and if what it
    holds of the request cannot be decoded.
    """
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, Unreadable):
        log.error("a journal cannot be read: %s", error)
        return RequestRefused(Reason.JOURNAL_LOST, MESSAGES[Reason.JOURNAL_LOST])
    return RequestRefused(
        Reason.JOURNAL_UNAVAILABLE,
        "The journal cannot be reached at the moment; please try again.",
        retry_after_s=1,
    )
