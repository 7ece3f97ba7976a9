"""What can be known of a request before any engine sees it. Pure: bytes in, a parsed request or a refusal out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_app.errors import Reason, RequestRefused

INFERENCE_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)

_decode = msgspec.json.Decoder().decode
# What pydantic puts into the place of an error for a branch of a union; others hold brackets.
_UNION_BRANCHES = ("str", "int", "bool", "float")


class _Loose(BaseModel):
    """Only what every engine agrees on; the engine's own server checks the rest."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None


class _Sampling(_Loose):
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=128)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logprobs: bool | int | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    stream_options: dict[str, Any] | None = None


class _Message(_Loose):
    role: str
    content: str | list[dict[str, Any]] | None = None


class _Function(_Loose):
    name: str


class _Tool(_Loose):
    # vLLM serves no other type, and looks for `function` in every tool before it checks that.
    type: Literal["function"] = "function"
    function: _Function


class _Chat(_Sampling):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[_Tool] | None = None


class _Completion(_Sampling):
    # OpenAI: "defaults to <|endoftext|>"; vLLM and every peer want a prompt.
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)


class _Responses(_Sampling):
    input: str | list[Any]
    max_output_tokens: int | None = Field(None, ge=1)


_SHAPES: dict[str, type[_Loose]] = {
    "/v1/chat/completions": _Chat,
    "/v1/completions": _Completion,
    "/v1/responses": _Responses,
}


def check_headers(headers: list[tuple[bytes, bytes]], limit_bytes: int) -> None:
    """Refuse headers that are longer than the limit in all.

    Raises:
        RequestRefused: `headers_too_large`.
    """
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limit_bytes:
        raise RequestRefused(
            Reason.HEADERS_TOO_LARGE, f"The request headers are {size} bytes long; at most {limit_bytes} are allowed."
        )


def check_content_type(content_type: str) -> None:
    """Only JSON is understood.

    Raises:
        RequestRefused: `unsupported_media_type`.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRefused(
            Reason.UNSUPPORTED_MEDIA_TYPE,
            f"The Content-Type is {kind or 'missing'}; send the request as application/json.",
        )


def parse(path: str, body: bytes, model: str) -> Mapping[str, Any]:
    """The body as a checked JSON object.

    Args:
        path: one of `INFERENCE_PATHS`.
        model: the one model that is served.

    Raises:
        RequestRefused: `malformed_json`, `invalid_request` or `model_not_found`, in OpenAI's words where it has them.
    """
    try:
        request = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(Reason.MALFORMED_JSON, f"The body is not valid JSON: {error}.") from None
    if not isinstance(request, dict):
        raise RequestRefused(Reason.INVALID_REQUEST, "The body must be a JSON object.")
    name = request.get("model")
    if name is None and path.startswith("/v1/"):
        raise RequestRefused(Reason.INVALID_REQUEST, "You must provide a model parameter.", param="model")
    if isinstance(name, str) and name != model:
        raise RequestRefused(
            Reason.MODEL_NOT_FOUND, f"The model '{name[:200]}' does not exist; '{model}' is served here.", param="model"
        )
    shape = _SHAPES.get(path, _Loose)
    try:
        shape.model_validate(request)
    except ValidationError as error:
        raise _refusal(error) from None
    return request


def _refusal(error: ValidationError) -> RequestRefused:
    # The deepest: of a union's branches, the one that fits best.
    first = max(error.errors(include_url=False, include_input=False), key=lambda item: len(item["loc"]))
    place = ""
    for part in first["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_BRANCHES:
            place += f".{part}" if place else part
    message = f"Invalid value for '{place}': {first['msg']}."
    if first["type"] == "missing":
        message = f"Missing required parameter: '{place}'."
    if first["type"] == "too_short":
        message = f"Invalid '{place}': empty array. Expected an array with at least one element."
    return RequestRefused(Reason.INVALID_REQUEST, message, param=place or None)
