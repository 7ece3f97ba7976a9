"""The error tree, the closed set of reasons, and OpenAI's error body.

A reason is the same word in the response header `x-hermes-reason`, in the metric and in the log.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec


class Reason(StrEnum):
    """Why a request was refused or ended without an answer: a closed, low-cardinality set."""

    INVALID_API_KEY = "invalid_api_key"
    KEY_NOT_PERMITTED = "key_not_permitted"
    MALFORMED_JSON = "malformed_json"
    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    QUEUE_FULL = "queue_full"
    STORAGE_FULL = "storage_full"
    TENANT_LIMIT = "tenant_limit"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    JOURNAL_UNAVAILABLE = "journal_unavailable"
    JOURNAL_LOST = "journal_lost"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    CLIENT_DISCONNECTED = "client_disconnected"
    ENGINE_ERROR = "engine_error"
    ATTEMPT_LOST = "attempt_lost"
    POISON = "poison"
    LOOP_HELD = "loop_held"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    INTERNAL = "internal"


LASTING = frozenset({Reason.INVALID_REQUEST, Reason.POISON, Reason.LOOP_HELD})
"""Failures that a repeat would meet again: only these does an `Idempotency-Key` answer with."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a reason looks over HTTP."""

    status: int
    type: str
    retryable: bool = False


_SHAPES: dict[Reason, _Shape] = {
    Reason.INVALID_API_KEY: _Shape(401, "invalid_request_error"),
    Reason.KEY_NOT_PERMITTED: _Shape(403, "invalid_request_error"),
    Reason.MALFORMED_JSON: _Shape(400, "invalid_request_error"),
    Reason.INVALID_REQUEST: _Shape(400, "invalid_request_error"),
    Reason.MODEL_NOT_FOUND: _Shape(404, "invalid_request_error"),
    Reason.NOT_FOUND: _Shape(404, "invalid_request_error"),
    Reason.METHOD_NOT_ALLOWED: _Shape(405, "invalid_request_error"),
    Reason.BODY_TOO_LARGE: _Shape(413, "invalid_request_error"),
    Reason.HEADERS_TOO_LARGE: _Shape(431, "invalid_request_error"),
    Reason.UNSUPPORTED_MEDIA_TYPE: _Shape(415, "invalid_request_error"),
    Reason.QUEUE_FULL: _Shape(429, "rate_limit_error", retryable=True),
    Reason.STORAGE_FULL: _Shape(429, "rate_limit_error", retryable=True),
    Reason.TENANT_LIMIT: _Shape(429, "rate_limit_error", retryable=True),
    Reason.TOO_MANY_CONNECTIONS: _Shape(429, "rate_limit_error", retryable=True),
    Reason.JOURNAL_UNAVAILABLE: _Shape(503, "service_unavailable_error", retryable=True),
    Reason.JOURNAL_LOST: _Shape(410, "invalid_request_error"),
    Reason.DEADLINE: _Shape(504, "timeout_error", retryable=True),
    Reason.CANCELLED: _Shape(499, "request_cancelled"),
    Reason.CLIENT_DISCONNECTED: _Shape(499, "request_cancelled"),
    Reason.ENGINE_ERROR: _Shape(500, "server_error"),
    Reason.ATTEMPT_LOST: _Shape(503, "service_unavailable_error", retryable=True),
    Reason.POISON: _Shape(500, "server_error"),
    Reason.LOOP_HELD: _Shape(400, "invalid_request_error"),
    Reason.IDEMPOTENCY_CONFLICT: _Shape(422, "invalid_request_error"),
    Reason.INTERNAL: _Shape(500, "server_error"),
}


class HermesError(Exception):
    """Root of the project's errors."""


class SettingsError(HermesError):
    """A setting is unknown, malformed or impossible; the message names the key and the fix."""


class JournalUnavailable(HermesError):
    """Redis cannot be reached, or refuses writes for now."""


class AnswerLost(JournalUnavailable):
    """What was sent was not answered: whether Redis acted, or will yet, is not known."""


class Fenced(HermesError):
    """A newer epoch, or the terminal entry, owns the journal: this writer must stop."""


class RequestRefused(HermesError):
    """A request ends with an error answer.

    Args:
        reason: of the closed set; it decides the HTTP status.
        message: one sentence for the caller.
        param: the offending field, as in OpenAI's error body.
        retry_after_s: seconds after which a retry makes sense.
    """

    def __init__(
        self, reason: Reason, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """HTTP status."""
        return _SHAPES[self.reason].status

    def headers(self) -> dict[str, str]:
        """Response headers: the reason, and when to try again."""
        headers = {"x-hermes-reason": str(self.reason)}
        if self.retry_after_s is not None:
            # Never the same for all who are refused at once: they would all come back at once.
            seconds = max(1.0, self.retry_after_s) * random.uniform(1.0, 2.0)
            headers["retry-after"] = str(round(seconds))
            headers["retry-after-ms"] = str(round(seconds * 1000))  # OpenAI's clients look at this one first
        if self.reason is Reason.INVALID_API_KEY:
            headers["www-authenticate"] = "Bearer"
        if not _SHAPES[self.reason].retryable:
            headers["x-should-retry"] = "false"
        return headers

    def body(self) -> bytes:
        """OpenAI's error body as JSON."""
        return msgspec.json.encode(error_body(self.reason, self.message, self.param))


def error_body(reason: Reason, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; `code` carries the reason.

    Source: https://platform.openai.com/docs/guides/error-codes
    """
    return {"error": {"message": message, "type": _SHAPES[reason].type, "param": param, "code": str(reason)}}


def in_openais_shape(body: bytes, reason: Reason) -> bytes:
    """An error of vLLM's server, whose types (`BadRequestError`) and numbers for codes OpenAI's clients do not know.

    What is no such error stays as it is.
    """
    try:
        error = msgspec.json.decode(body)["error"]
        message, param, code = error["message"], error.get("param"), error.get("code")
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return body
    return body if isinstance(code, str) else msgspec.json.encode(error_body(reason, message, param))
