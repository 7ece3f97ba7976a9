"""Whose fault a failure of vLLM's server is, and what the client is told: decided where the
exception is. vLLM's own answer has types, numeric codes and words that OpenAI's clients do not
know, and its status does not tell a request that cannot be served from a defect.

vLLM makes all errors with one function, `create_error_response`, or in the handlers of its app;
`install` puts itself in front of both. It also refuses what vLLM would cut: an answer that has no
room in the context.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import msgspec

from serve_app.contract import ANTHROPIC, MESSAGE, Reason, called
from serve_app.errors import RequestRefused, context_exceeded, failed, invalid, missing, written
from serve_app.observability.logs import about
from workers.attempt import Attempt, current
from workers.engine_plugin import replace
from workers.request_body import as_vllm_takes
from workers.schemas import NotObeyed

log = logging.getLogger("hermes.worker")

asked: ContextVar[tuple[str, bytes]] = ContextVar("hermes_asked", default=("", b""))
"""Path and body of the request that the running task serves."""

_READ = ("messages", "input", "prompt", "tokens")
"""The fields that the model reads: a request has one of them."""
_NO_FIELD = {"input_tokens", "input_text", "type"}
"""What vLLM calls a field although it is a part of what the model reads."""
_TOO_LONG = re.compile(r"maximum (?:context|model) length[^0-9]*(\d*)|exceeds the max_model_len")
_NOISE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+: |Check failed: .* is false: |: \{'json': .*")
"""Where and when xgrammar's code failed, and an object of Python's."""
_SAYS_NOTHING = re.compile(r"Invalid .*specification\.$")
_PYTHON = re.compile(r"NoneType|object has no|object is not|<class |pydantic|Traceback")
_SHAPES = ("structured_outputs", "response_format", "output_config", "text", "tools")
_OF_SHAPE = re.compile(r"schema|grammar|regex|structured|structural", re.IGNORECASE)
"""Fields that give the answer a shape, and what vLLM then speaks of."""
_OF_WHAT_IS_READ = re.compile(r"prompt|conversation|multimodal|vocabulary")
_WORDS = {"None": "null", "True": "true", "False": "false"}
_MAX_PLACE_CHARS = 200
_KINDS = ("type", "role")
"""Fields that tell the branches of a union from each other."""
_OF_TYPE = re.compile("([a-z]+)(?:_attributes)?_(?:type|parsing|from_float)")
"""The types of pydantic's errors by which a value is of another type than it must be."""
_MUST_BE = {
    **dict.fromkeys(("dict", "model", "dataclass"), "an object"),
    **dict.fromkeys(("list", "iterable", "tuple", "set"), "an array"),
    **{"string": "a string", "int": "an integer", "float": "a number", "bool": "true or false"},
}
_OPAQUE = "The model's server cannot process the request as it is."


def install() -> None:
    from vllm.entrypoints.serve.exception_handling import error_response, register
    from vllm.entrypoints.serve.utils import api_utils

    replace(error_response.create_error_response, _noting)
    replace(register.validation_exception_handler, _handling)
    replace(register.http_exception_handler, _handling)
    replace(api_utils.get_max_tokens, _refusing_the_sum)


def note(error: BaseException) -> None:
    """The request that the running task serves fails by this."""
    attempt = current.get()
    if isinstance(error, RuntimeError) and error.__context__ is not None:
        error = error.__context__  # of Starlette, when a stream has begun
    if attempt is not None and attempt.failure is None and not attempt.lost:
        path, body = asked.get()
        attempt.failure = failure_of(error, path, body, attempt)


def failure_of(error: BaseException, path: str, body: bytes, attempt: Attempt) -> RequestRefused:
    """An exception of vLLM's server as the client is told it.

    Before an engine has written anything, in this attempt or an earlier one, only the request can
    be the reason, unless the exception's class says otherwise.
    """
    from vllm.exceptions import (
        GracefulHTTPError,
        VLLMClientError,
        VLLMNotFoundError,
        VLLMServerError,
    )

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, NotObeyed):
        cause = cause.__cause__
    if cause is not None:
        return _of_schema(cause, body)
    if isinstance(error, VLLMNotFoundError):
        its = getattr(error, "parameter", None)
        return RequestRefused(Reason.NOT_FOUND, _cleaned(error), param=its)
    extra = about(attempt.request_id, attempt.facts.tenant, trace=attempt.facts.trace)
    told = isinstance(error, VLLMClientError)
    servers = isinstance(error, VLLMServerError | GracefulHTTPError | OSError | MemoryError)
    if not told and (servers or attempt.output_tokens or attempt.recorded.outputs):
        log.error("request %s failed in vLLM's server: %r", attempt.request_id, error, extra=extra)
        return failed(Reason.ENGINE_ERROR)
    if callable(errors := getattr(error, "errors", None)):  # of pydantic and FastAPI
        return _of_fields(errors(), path, body)
    if not told and not isinstance(error, ValueError | NotImplementedError):
        log.error(
            "request %s is not understood by vLLM: %r", attempt.request_id, error, extra=extra
        )
        return invalid(_OPAQUE, _read(msgspec.json.decode(body)))
    return _mistake(error, path, body)


def _mistake(error: BaseException, path: str, body: bytes) -> RequestRefused:
    message, param = _cleaned(error), getattr(error, "parameter", None)
    request = msgspec.json.decode(body)
    if _PYTHON.search(message):
        message, param = _OPAQUE, param or _read(request)
    param = param or _named_in(message, request)
    too_long = param != "truncate_prompt_tokens" and _TOO_LONG.search(message)
    if param in _NO_FIELD or (too_long and not param):
        param = _read(request)
    if too_long:
        if path in ANTHROPIC and too_long[1]:
            message = _in_anthropics_words(int(too_long[1]) - 1, body)
        return context_exceeded(message, param)
    return invalid(message, param)


def _in_anthropics_words(most: int, body: bytes) -> str:
    """Agents look for them, and shorten by the difference. vLLM stops counting at the limit."""
    tokens = max(most + 1, len(body) // 4)
    return f"prompt is too long: {tokens} tokens > {most} maximum"


def _of_schema(error: NotObeyed, body: bytes) -> RequestRefused:
    """What the engine's answers would not obey, by the function or field that has it."""
    message, request = _cleaned(error), msgspec.json.decode(body)
    param = next((name for name in _SHAPES if name in request), None)  # as text in another
    parts = (one for name in _SHAPES for one in _parts(request.get(name), [name]))
    if error.schema is not None:
        place = next((place for place, part in parts if part == error.schema), None)
        if place and place[0] == "tools":
            message = f"Function '{called(request['tools'][place[1]])[1]}': {message}"
        param = written(place) if place else param
    return invalid(message, param)


def _named_in(message: str, request: Mapping[str, Any]) -> str | None:
    """The field of the request that vLLM's sentence begins with or is about."""
    begins = re.match(r"\W?(\w+)", message)
    if begins and begins[1] in request:
        return begins[1]
    if _OF_SHAPE.search(message):
        return next((name for name in _SHAPES if name in request), None)
    return _read(request) if _OF_WHAT_IS_READ.search(message) else None


def _read(request: Mapping[str, Any]) -> str:
    return next((name for name in _READ if request.get(name) is not None), _READ[0])


def _cleaned(error: BaseException) -> str:
    """Without field and value, which vLLM appends, and with the cause, if the words say nothing."""
    words, cause = str(error.args[0]) if error.args else str(error), error
    while _SAYS_NOTHING.search(words) and cause.__cause__ is not None:
        cause = cause.__cause__
    return _in_one_line(words if cause is error else f"{words[:-1]}: {cause}") or _OPAQUE


def _in_one_line(text: str) -> str:
    text = _NOISE.sub("", " ".join(text.split()))
    return re.sub("|".join(rf"\b{word}\b" for word in _WORDS), lambda it: _WORDS[it[0]], text)


def _of_fields(errors: Any, path: str, body: bytes) -> RequestRefused:
    """Pydantic's: of the request, or of a part of it that vLLM reads later."""
    request = msgspec.json.decode(body)
    found = [{**one, "loc": [x for x in one["loc"] if x != "body"]} for one in errors]
    its = _read(request)
    if found[0]["loc"][:1] != [its]:
        taken = msgspec.json.decode(as_vllm_takes(path, body, ""))
        read = _parts(taken.get(its), [its])
        before = next((place for place, part in read if _is_of(found[0], part)), [])
        found = [{**one, "loc": [*before, *one["loc"]]} for one in found]
    return refusal_of(found, request, its)


def _parts(value: Any, place: list[str | int]) -> Iterator[tuple[list[str | int], Any]]:
    """All lists and objects in a field, each with its place."""
    items = value if isinstance(value, list) else ()
    for name, part in value.items() if isinstance(value, dict) else enumerate(items):
        if isinstance(part, dict | list):
            yield from _parts(part, [*place, name])
    yield place, value


def _is_of(error: Mapping[str, Any], part: Any) -> bool:
    """Whether vLLM has found an error when it read this part by itself."""
    found = part
    for step in error["loc"]:
        inside = isinstance(step, int) and isinstance(found, list) and step < len(found)
        if inside or (isinstance(found, dict) and step in found):
            found = found[step]
    return bool(found == error["input"]) and (error["type"] == "missing") == (found is part)


def _noting(
    create: Any,
    message: Any,
    err_type: str = "BadRequestError",
    status_code: Any = 400,
    param: Any = None,
) -> Any:
    """vLLM's server answers some errors without an exception."""
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError, VLLMServerError

    error = message
    if not isinstance(error, Exception):
        servers = status_code >= 500 and status_code != 501
        kind = VLLMServerError if servers else VLLMClientError
        error = (VLLMNotFoundError if status_code == 404 else kind)(message)
        error.parameter = param
    note(error)
    return create(message, err_type, status_code, param)


async def _handling(handler: Any, request: Any, error: Exception) -> Any:
    note(error)
    return await handler(request, error)


def _refusing_the_sum(
    get: Any, max_model_len: int, max_tokens: int | None, input_length: int, *args: Any, **more: Any
) -> Any:
    """vLLM shortens the answer to what has room; OpenAI refuses, and agents then cut their
    history. Agents of Anthropic's ask for more than there is: to them the answer is shortened.
    """
    from vllm.exceptions import VLLMValidationError

    asked_for = 1 if max_tokens is None or asked.get()[0] == MESSAGE else max_tokens
    truncated = more.get("truncate_prompt_tokens") is not None
    if input_length + asked_for > max_model_len and not truncated:
        raise VLLMValidationError(
            f"This model's maximum context length is {max_model_len} tokens, but "
            f"{input_length + asked_for} were requested: {input_length} in the prompt and "
            f"{asked_for} for the answer. Please reduce either.",
            parameter="input_tokens",
        )
    return get(max_model_len, max_tokens, input_length, *args, **more)


# -- what pydantic finds, in words and places of Python ------------------------------------------

Error = Mapping[str, Any]


def refusal_of(errors: Sequence[Error], body: Any, root: str | None = None) -> RequestRefused:
    """The refusal of a request. Of a union's branches those count whose type or role is that of the
    request, and of their errors the deepest. `body` tells the request's fields from the names of
    pydantic's branches; if the errors' places do not begin at the request, `root` has them.
    """

    def depth(error: Error) -> int:
        return len(_place(error, body))

    others = [error for error in errors if _is_of_another_branch(error)]
    branches = {tuple(error["loc"][:-1]) for error in others}
    fitting = [
        error
        for error in errors
        if not any(tuple(error["loc"][:end]) in branches for end in range(len(error["loc"]) + 1))
    ]
    some = max((fitting, others), key=lambda some: max(map(depth, some), default=-1))
    deepest = _place(max(some, key=depth), body)
    here = [error for error in some if _place(error, body) == deepest]
    place = written(deepest)[:_MAX_PLACE_CHARS] or root
    return invalid(_sentence(here, place), place)


def _is_of_another_branch(error: Error) -> bool:
    """Whether it only says that a branch of a union is for another type or role."""
    *branch, name = error["loc"] or ("",)
    # pydantic's wrappers have one name in all branches.
    named = bool(branch) and not str(branch[-1]).startswith("function-")
    return error["type"] == "literal_error" and name in _KINDS and named


def _place(error: Error, body: Any) -> list[str | int]:
    """The fields of the request in pydantic's location; the last of it may be missing there."""
    place: list[str | int] = []
    for number, part in enumerate(loc := error["loc"]):
        inside = isinstance(part, int) and isinstance(body, list) and part < len(body)
        if inside or (isinstance(body, dict) and isinstance(part, str) and part in body):
            place.append(part)
            body = body[part]
        elif error["type"] == "missing" and number == len(loc) - 1:
            place.append(part)
    return place


def _sentence(errors: Sequence[Error], place: str | None) -> str:
    # Of a branch for another kind of value the other branches' errors say more.
    more = [error for error in errors if _must_be(error) is None]
    if more and more[0]["type"] == "missing" and place:
        return missing(place).message
    what = "it must be " + " or ".join(dict.fromkeys(filter(None, map(_must_be, errors))))
    if more:
        found = {_in_our_words(error["msg"]) for error in more}
        what = "it has none of the forms that are allowed here" if len(found) > 1 else found.pop()
    return f"Invalid value for '{place}': {what}." if place else f"Invalid request: {what}."


def _must_be(error: Error) -> str | None:
    """Of what type or which constant the value must be, if that is what is wrong."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    found = _OF_TYPE.fullmatch(error["type"])
    return _MUST_BE.get(found[1]) if found else None


def _in_our_words(text: str) -> str:
    text = text.removeprefix("Value error, ").rstrip(".")
    return re.sub("^[A-Z][a-z]+ (?=should)", "it ", text)
