"""The error tree, the HTTP form of each reason, and OpenAI's error body.

A reason is the same word in the response header `x-hermes-reason`, in the metric and in the log.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import msgspec

from serve_app.contract import Reason
from serve_app.redaction import redacted

LASTING = frozenset(
    {
        Reason.INVALID_REQUEST,
        Reason.CONTEXT_LENGTH_EXCEEDED,
        Reason.NOT_FOUND,
        Reason.POISON,
        Reason.EVENT_LOOP_BLOCKED,
        Reason.ANSWER_TOO_LARGE,
    }
)
"""Failures that a repeat would meet again. Only these are returned to a repeat with the same
`Idempotency-Key`; after any other failure the repeat is a new request.
"""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The HTTP form of a reason."""

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
    Reason.UPLOAD_TIMEOUT: _Shape(408, "timeout_error", retryable=True),
    Reason.UNSUPPORTED_MEDIA_TYPE: _Shape(415, "invalid_request_error"),
    Reason.QUEUE_FULL: _Shape(429, "rate_limit_error", retryable=True),
    Reason.STORAGE_FULL: _Shape(429, "rate_limit_error", retryable=True),
    Reason.RESULTS_FULL: _Shape(429, "rate_limit_error", retryable=True),
    Reason.CONTEXT_LENGTH_EXCEEDED: _Shape(400, "invalid_request_error"),
    Reason.TENANT_LIMIT: _Shape(429, "rate_limit_error", retryable=True),
    Reason.TOO_MANY_CONNECTIONS: _Shape(429, "rate_limit_error", retryable=True),
    Reason.JOURNAL_UNAVAILABLE: _Shape(503, "service_unavailable_error", retryable=True),
    Reason.PREVIOUS_RESPONSE_NOT_FOUND: _Shape(400, "invalid_request_error"),
    Reason.JOURNAL_LOST: _Shape(410, "invalid_request_error"),
    Reason.DEADLINE: _Shape(504, "timeout_error", retryable=True),
    Reason.CANCELLED: _Shape(499, "request_cancelled"),
    Reason.CLIENT_DISCONNECTED: _Shape(499, "request_cancelled"),
    Reason.ENGINE_ERROR: _Shape(500, "server_error"),
    Reason.ATTEMPT_LOST: _Shape(503, "service_unavailable_error", retryable=True),
    Reason.POISON: _Shape(500, "server_error"),
    Reason.EVENT_LOOP_BLOCKED: _Shape(400, "invalid_request_error"),
    Reason.ANSWER_TOO_LARGE: _Shape(400, "invalid_request_error"),
    Reason.IDEMPOTENCY_CONFLICT: _Shape(422, "invalid_request_error"),
    Reason.INTERNAL: _Shape(500, "server_error"),
}


ADVICE: dict[Reason, str] = {
    Reason.INVALID_API_KEY: "The API key is missing or unknown: send a valid one.",
    Reason.KEY_NOT_PERMITTED: "The API key is valid but may not do this: use one of a tenant that "
    "may.",
    Reason.MALFORMED_JSON: "The body is not valid JSON: correct it.",
    Reason.INVALID_REQUEST: "A field is wrong or beyond a limit: correct the field that `param` "
    "names.",
    Reason.MODEL_NOT_FOUND: "The model is not served here: use one that `GET /v1/models` lists.",
    Reason.NOT_FOUND: "The path, request or response does not exist or has expired: check the id.",
    Reason.METHOD_NOT_ALLOWED: "The path takes other methods: use one that `Allow` names.",
    Reason.BODY_TOO_LARGE: "The body exceeds `ingress.max_body_bytes`: send less.",
    Reason.HEADERS_TOO_LARGE: "The headers exceed `ingress.max_header_bytes`: send fewer or "
    "shorter ones.",
    Reason.UPLOAD_TIMEOUT: "The body did not arrive in time: send the request again.",
    Reason.UNSUPPORTED_MEDIA_TYPE: "Send the body as `application/json`, and without "
    "`Content-Encoding`.",
    Reason.QUEUE_FULL: "As many requests of this class wait as may: retry after `Retry-After`.",
    Reason.STORAGE_FULL: "Redis has no memory for more requests: retry after `Retry-After`.",
    Reason.RESULTS_FULL: "Retained answers fill their share: delete old ones, or retry after "
    "`Retry-After`.",
    Reason.TENANT_LIMIT: "The tenant's share of the queue, or of an ingress's connections and "
    "buffers, is used up (the message says which): send fewer requests at a time, and retry.",
    Reason.CONTEXT_LENGTH_EXCEEDED: "Prompt and answer exceed the model's context: shorten the "
    "prompt or `max_tokens`.",
    Reason.TOO_MANY_CONNECTIONS: "The ingress serves as many connections as it may: retry after "
    "`Retry-After`.",
    Reason.JOURNAL_UNAVAILABLE: "Redis cannot be used now: retry after `Retry-After`, with the "
    "same `Idempotency-Key`.",
    Reason.PREVIOUS_RESPONSE_NOT_FOUND: "The previous response does not exist or has expired: send "
    "the whole conversation.",
    Reason.JOURNAL_LOST: "Redis lost a part of the request's journal: send it as a new request.",
    Reason.DEADLINE: "The deadline passed first: retry, or set a later one "
    "(`x-request-timeout-seconds`).",
    Reason.CANCELLED: "The request was cancelled by its client: nothing to do.",
    Reason.CLIENT_DISCONNECTED: "The client disconnected and did not come back in time: send the "
    "request again.",
    Reason.ENGINE_ERROR: "The engine failed on this request: report it to the operator.",
    Reason.ATTEMPT_LOST: "An engine died and no other could resume the answer: send the request "
    "again.",
    Reason.POISON: "Several engines that ran this request have died: do not send it again.",
    Reason.EVENT_LOOP_BLOCKED: "The request blocked all others of its worker: make it smaller or "
    "simpler.",
    Reason.ANSWER_TOO_LARGE: "The answer exceeds `journal.max_answer_bytes`: ask for less at a "
    "time.",
    Reason.IDEMPOTENCY_CONFLICT: "The `Idempotency-Key` belongs to a request with another body: "
    "use a new key.",
    Reason.INTERNAL: "The service failed on this request: report it to the operator.",
}
"""What has happened and what the client should do, for docs/errors.md."""


class HermesError(Exception):
    """Base class of all errors of this project."""


class Unreadable(HermesError, ValueError):
    """Something in Redis is not as any version of ours writes it. Only decoders raise this, so it
    is no defect of the code that has asked.
    """


P = ParamSpec("P")
T = TypeVar("T")


def decoding(decode: Callable[P, T]) -> Callable[P, T]:
    """A decoder of what is in Redis: whatever it raises becomes `Unreadable`."""

    @wraps(decode)
    def decoded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return decode(*args, **kwargs)
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            raise Unreadable(f"{decode.__qualname__}: {error!r}") from error

    return decoded


class SettingsError(HermesError):
    """A setting is unknown, malformed or impossible; the message names the setting and the fix."""


class RedisUnavailable(HermesError):
    """Redis cannot be reached, or answers with an error; the message holds no credential."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class RedisRefuses(RedisUnavailable):
    """Redis refuses a command, and waiting does not change that.

    Args:
        what: the command, and perhaps its key.
        answer: Redis's own words.
    """

    def __init__(self, what: str, answer: str) -> None:
        super().__init__(f"Redis refuses {what}: {answer}")
        self.what, self.answer = redacted(what), redacted(answer)


class RefusedForNow(RedisUnavailable):
    """Redis answers, and refuses something that it will take later.

    Args:
        what: the command, or `CLIENTS`.
        answer: Redis's own words, such as "MISCONF …".
    """

    CLIENTS = "another client"

    def __init__(self, what: str, answer: str) -> None:
        super().__init__(f"Redis refuses {what} for now: {answer}")
        self.what, self.answer = redacted(what), redacted(answer)


class AnswerLost(RedisUnavailable):
    """A command was sent and not answered: it is unknown whether Redis has executed it or will."""


class Fenced(HermesError):
    """A newer epoch or the terminal entry owns the journal, so this writer must stop."""


class RequestRefused(HermesError):
    """A request ends with an error answer.

    Args:
        reason: one of the closed set; it determines the HTTP status.
        message: one sentence for the caller.
        param: the offending field, as in OpenAI's error body.
        retry_after_s: after how many seconds a retry makes sense.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return _SHAPES[self.reason].status

    def headers(self) -> dict[str, str]:
        """Response headers: the reason, and when to retry."""
        headers = {"x-hermes-reason": str(self.reason)}
        if self.retry_after_s is not None:
            # Jittered, so that clients that were refused together do not retry together.
            seconds = max(1.0, self.retry_after_s) * random.uniform(1.0, 2.0)
            headers["retry-after"] = str(round(seconds))
            headers["retry-after-ms"] = str(
                round(seconds * 1000)
            )  # OpenAI's clients read this one first
        if self.reason is Reason.INVALID_API_KEY:
            headers["www-authenticate"] = "Bearer"
        return headers | retry_headers(self.reason)

    def body(self) -> bytes:
        return msgspec.json.encode(error_body(self.reason, self.message, self.param))


def context_exceeded(message: str, param: str | None) -> RequestRefused:
    """More tokens than the context has. The text ends with the code: LangChain looks for it there,
    and `openai` no longer puts the whole body into its exceptions.
    """
    code = Reason.CONTEXT_LENGTH_EXCEEDED
    return RequestRefused(code, f"{message} ({code})", param=param)


def retry_headers(reason: Reason) -> dict[str, str]:
    """What keeps OpenAI's clients from sending again what cannot succeed."""
    return {} if _SHAPES[reason].retryable else {"x-should-retry": "false"}


def error_body(reason: Reason, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; `code` carries the reason.

    Source: https://platform.openai.com/docs/guides/error-codes
    """
    return {
        "error": {
            "message": message,
            "type": _SHAPES[reason].type,
            "param": param,
            "code": str(reason),
        }
    }
