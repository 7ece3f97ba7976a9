"""The error tree, the HTTP form of each reason, and OpenAI's error body.

A reason is the same word in the response header `x-hermes-reason`, in the metric and in the log.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec

from serve_app.contract import ANTHROPIC, Reason, State
from serve_app.redaction import redacted


class ReasonRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `reasons.toml` says of a reason; its head says what the columns mean."""

    status: int
    advice: str
    type: str = ""
    state: State = State.FAILED
    says: str = "The request failed."
    lasting: bool = False
    of_a_tenant: bool = False
    retries: bool | None = None
    line: Literal["", "later", "again", "resumed"] = ""


REASONS = {
    Reason[name.upper()]: msgspec.convert(row, ReasonRow)
    for name, row in tomllib.loads(Path(__file__).with_name("reasons.toml").read_text()).items()
}
_TYPES = {
    408: "timeout_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""OpenAI's error types, by status; of others it is `invalid_request_error`."""
_OVERLOADED = 529
_ANTHROPICS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
"""The same of Anthropic's."""
_RETRYABLE = {408, 429, 503, 504}


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


class _Refused(RedisUnavailable):
    """Redis refuses `what`, a command and perhaps its key; `answer` is its own words."""

    when = ""

    def __init__(self, what: str, answer: str) -> None:
        super().__init__(f"Redis refuses {what}{self.when}: {answer}")
        self.what, self.answer = redacted(what), redacted(answer)


class RedisRefuses(_Refused):
    """Waiting does not change that Redis refuses a command."""


class RefusedForNow(_Refused):
    """Redis refuses something that it will take later: a command, or `CLIENTS`."""

    CLIENTS = "another client"
    when = " for now"


class AnswerLost(RedisUnavailable):
    """A command was sent and not answered: it is unknown whether Redis has executed it or will."""


class Fenced(HermesError):
    """A newer epoch or the terminal entry owns the journal, so this writer must stop."""


class RequestRefused(HermesError):
    """A request ends with an error answer: a sentence for the caller, and the offending field as
    `param`. The reason determines the HTTP status.

    Args:
        jitter: the part of `retry_after_s` by which some clients are told to come later, so that
            those that were refused together do not retry together. None is told to come earlier.
        more_headers: besides those that the reason has.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        jitter: float = 1.0,
        more_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message
        self.param, self.retry_after_s, self.jitter = param, retry_after_s, jitter
        self.more_headers = more_headers

    @property
    def status(self) -> int:
        return REASONS[self.reason].status

    def status_at(self, path: str) -> int:
        """In the protocol of this path."""
        return _status_at(path, self.reason)

    def headers(self) -> dict[str, str]:
        headers = {**self.more_headers, "x-hermes-reason": str(self.reason)}
        if self.retry_after_s is not None:
            least_s = 1.0 if self.jitter else 0.0
            seconds = max(least_s, self.retry_after_s) * random.uniform(1.0, 1.0 + self.jitter)
            headers["retry-after"] = str(math.ceil(seconds))
            # OpenAI's clients read this one first.
            headers["retry-after-ms"] = str(math.ceil(seconds * 1000))
        if self.reason is Reason.INVALID_API_KEY:
            headers["www-authenticate"] = "Bearer"
        return headers | retry_headers(self.reason)

    def body(self, path: str = "") -> bytes:
        """In the protocol of this path."""
        if path in ANTHROPIC:
            return msgspec.json.encode(anthropics_error(self.reason, self.message))
        return msgspec.json.encode(error_body(self.reason, self.message, self.param))


def written(place: Sequence[str | int]) -> str:
    """A place as `messages[0].content`."""
    text = ""
    for part in place:
        if isinstance(part, str) and not part.isidentifier():
            break  # the client's own name, such as a token of `logit_bias`
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def failed(reason: Reason) -> RequestRefused:
    """A request that was accepted has ended so."""
    return RequestRefused(reason, REASONS[reason].says)


def invalid(message: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(Reason.INVALID_REQUEST, message, param)


def invalid_value(place: str, what: str) -> RequestRefused:
    return invalid(f"Invalid value for '{place}': {what}.", place)


def missing(place: str) -> RequestRefused:
    return invalid(f"Missing required parameter: '{place}'.", place)


def context_exceeded(message: str, param: str | None) -> RequestRefused:
    """More tokens than the context has. The text ends with the code: LangChain looks for it there,
    and `openai` no longer puts the whole body into its exceptions.
    """
    code = Reason.CONTEXT_LENGTH_EXCEEDED
    return RequestRefused(code, f"{message} ({code})", param=param)


def retry_headers(reason: Reason) -> dict[str, str]:
    """What keeps OpenAI's clients from sending again what cannot succeed."""
    row = REASONS[reason]
    again = row.status in _RETRYABLE if row.retries is None else row.retries
    return {} if again else {"x-should-retry": "false"}


def error_body(reason: Reason, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; `code` carries the reason.

    Source: https://platform.openai.com/docs/guides/error-codes
    """
    row = REASONS[reason]
    return {
        "error": {
            "message": message,
            "type": row.type or _TYPES.get(row.status, "invalid_request_error"),
            "param": param,
            "code": str(reason),
        }
    }


def anthropics_error(reason: Reason, message: str) -> dict[str, Any]:
    """Anthropic's error object, also of an event; `code` is ours.

    Source: https://docs.claude.com/en/api/errors
    """
    kind = _ANTHROPICS_TYPES.get(_status_at(ANTHROPIC[0], reason), "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": str(reason)}}


def _status_at(path: str, reason: Reason) -> int:
    """Anthropic's 429 is for what one tenant may; that all are too many is its 529."""
    row = REASONS[reason]
    others = row.status in (429, 503) and not row.of_a_tenant
    return _OVERLOADED if others and path in ANTHROPIC else row.status
