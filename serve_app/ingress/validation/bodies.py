"""Validates a request as far as possible before an engine sees it. Pure: bytes in, a parsed request
or a refusal out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_app.contract import INPUT_TOKENS, RESPONSES, Reason
from serve_app.errors import RequestRefused
from serve_app.field_errors import refusal_of
from serve_app.ingress.validation.effects import check_effects
from serve_app.ingress.validation.fields import MEANING, OF_VLLM, rewritten
from serve_app.ingress.validation.limits import check_limits, unknown_fields
from serve_app.ingress.validation.structure import NotJson, read, too_many
from serve_app.settings.limits import RequestLimits

INFERENCE_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    RESPONSES,
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    INPUT_TOKENS,
)

_DEFAULT_LIMITS = RequestLimits()
_INT32 = 2**31 - 1
"""The range of the engine's tensors."""


class _Loose(BaseModel):
    """Checks only what every engine agrees on; the engine's own server checks the rest."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None


_Count = Annotated[int, Field(ge=0, le=_INT32)]
_CountOrAll = Annotated[int, Field(ge=-1, le=_INT32)]
_Limit = Annotated[int, Field(ge=1, le=_INT32)]
_Ids = Annotated[list[_Count], Field(fail_fast=True)]
_TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
_Texts = Annotated[list[str], Field(fail_fast=True)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
"""What a client notes about its request or a stored answer. OpenAI's bounds."""
_Choice = Literal["none", "auto", "required"]


class _Common(_Loose):
    """Fields of every endpoint, and those of vLLM's own fields whose numbers reach its engine
    unchecked.
    """

    user: str | None = None
    prompt_cache_key: str | None = None
    truncate_prompt_tokens: _CountOrAll | None = None
    cache_salt: str | None = None
    dimensions: _Limit | None = None


class _Sampling(_Common):
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: _CountOrAll | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    max_output_tokens: _Limit | None = None
    min_tokens: _Count | None = None
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=-100, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logprobs: bool | int | None = None
    top_logprobs: _Count | None = None
    prompt_logprobs: _Count | None = None
    logprob_token_ids: _Ids | None = None
    logit_bias: dict[_TokenId, float] | None = None
    stop: str | _Texts | None = None
    stop_token_ids: _Ids | None = None
    allowed_token_ids: _Ids | None = None
    bad_words: _Texts | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    priority: int | None = None
    thinking_token_budget: _CountOrAll | None = None
    stream_interval: _Limit | None = None
    routed_experts_prompt_start: _Count | None = None
    service_tier: str | None = None
    stream_options: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    repetition_detection: dict[str, _Count] | None = None


class _Message(_Loose):
    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class _Function(_Loose):
    name: str


class _Tool(_Loose):
    # vLLM supports no other type, but reads `function` of every tool before it checks the type.
    type: Literal["function"] = "function"
    function: _Function


class _Named(_Loose):
    type: Literal["function"] = "function"
    function: _Function


class _Allowed(_Loose):
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = Field(min_length=1)


class _AllowedInChat(_Loose):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


class _Chat(_Sampling):
    store: bool | None = None
    metadata: Metadata | None = None
    messages: Annotated[list[_Message], Field(fail_fast=True)] = Field(min_length=1)
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: _Choice | _Named | _AllowedInChat | None = None


class _Completion(_Sampling):
    # OpenAI: "defaults to <|endoftext|>"; vLLM and every peer want a prompt. Its type:
    # `_check_prompt`.
    prompt: Any
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None


class _Item(_Loose):
    type: str | None = None
    role: str | None = None


class _NamedInResponse(_Loose):
    type: Literal["function", "custom"]
    name: str


class _AllowedInResponse(_Allowed):
    type: Literal["allowed_tools"]


class _Responses(_Sampling):
    input: str | Annotated[list[_Item], Field(fail_fast=True)]
    max_tool_calls: _Count | None = None
    metadata: Metadata | None = None
    tool_choice: _Choice | _NamedInResponse | _AllowedInResponse | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = Field(None, max_length=200)


_SHAPES: dict[str, type[_Loose]] = {
    "/v1/chat/completions": _Chat,
    "/v1/completions": _Completion,
    RESPONSES: _Responses,
    INPUT_TOKENS: _Responses,
    "/v1/embeddings": _Common,
    "/tokenize": _Common,
}
_PROMPTS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/detokenize": "tokens"}
"""Fields that may hold token ids, perhaps very many. They are not validated by a model, which would
copy them.
"""


def schema(path: str) -> dict[str, Any]:
    """The JSON Schema for the bodies of one of `INFERENCE_PATHS`; the engine's server checks
    more.
    """
    found = _SHAPES.get(path, _Loose).model_json_schema(ref_template="#/components/schemas/{model}")
    fields = {name: found["properties"].get(name, {}) for name in sorted(OF_VLLM[path])}
    return {**found, "properties": fields}


class Parsed(NamedTuple):
    """A valid request.

    Attributes:
        request: its fields; of strings longer than a megabyte only the beginning.
        body: what is journalled and what an engine gets: without the fields that are ignored.
        ignored: the names of the fields that nobody here knows.
    """

    request: Mapping[str, Any]
    body: bytes
    ignored: Sequence[str] = ()


def parse(path: str, body: bytes, model: str, limits: RequestLimits = _DEFAULT_LIMITS) -> Parsed:
    """Parse and validate a body as a JSON object.

    Args:
        path: one of `INFERENCE_PATHS`.
        model: the served model.

    Raises:
        RequestRefused: `malformed_json`, `invalid_request` or `model_not_found`, in OpenAI's
            wording where it has one.
    """
    if path == "/tokenize" and len(body) > limits.max_tokenize_bytes:
        raise too_many("bytes", limits.max_tokenize_bytes)
    try:
        request = read(body, limits)
    except NotJson as error:
        raise RequestRefused(
            Reason.MALFORMED_JSON, f"The body is not valid JSON: {error}."
        ) from None
    if not isinstance(request, dict):
        raise RequestRefused(Reason.INVALID_REQUEST, "The body must be a JSON object.")
    name = request.get("model")
    if name is None and path.startswith("/v1/") and path not in (RESPONSES, INPUT_TOKENS):
        raise RequestRefused(
            Reason.INVALID_REQUEST, "You must provide a model parameter.", param="model"
        )
    if isinstance(name, str) and name != model:
        raise RequestRefused(
            Reason.MODEL_NOT_FOUND,
            f"The model '{name[:200]}' does not exist; '{model}' is served here.",
            param="model",
        )
    ignored = unknown_fields(path, request, limits)
    if ignored or not request.keys().isdisjoint(MEANING.get(path, ())):
        body = rewritten(path, body, ignored)
    for name in ignored:
        del request[name]
    check_limits(path, request, limits)
    try:
        _SHAPES.get(path, _Loose).model_validate(request)
    except ValidationError as error:
        raise refusal_of(error.errors(include_url=False), request) from None
    check_effects(path, request, limits)
    if (field := _PROMPTS.get(path)) and field in request:
        _check_prompt(request[field], field, chats=path == "/v1/embeddings")
    return Parsed(request, body, ignored)


def _check_prompt(prompt: Any, field: str, chats: bool) -> None:
    """Check a prompt: a text, texts, token ids or lists of token ids. With `chats`, messages too,
    which vLLM's own server checks.
    """
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise _no_prompt(field)
    kinds = set(map(type, prompt))
    if not kinds or kinds == {str} or (chats and kinds == {dict}):
        return
    if kinds == {list}:
        for index, item in enumerate(prompt):
            if chats and item and type(item[0]) is dict:
                continue
            _check_ids(item, f"{field}[{index}]")
    else:
        _check_ids(prompt, field)


def _check_ids(ids: list[Any], place: str) -> None:
    kinds = set(map(type, ids))
    if kinds - {int}:
        index = next(index for index, item in enumerate(ids) if type(item) is not int)
        raise _no_prompt(f"{place}[{index}]")
    if ids and not (min(ids) >= 0 and max(ids) <= _INT32):
        raise RequestRefused(
            Reason.INVALID_REQUEST, f"Invalid value for '{place}': no such token id.", param=place
        )


def _no_prompt(place: str) -> RequestRefused:
    message = (
        f"Invalid value for '{place}': it must be a text, a list of texts, or (lists of) token ids."
    )
    return RequestRefused(Reason.INVALID_REQUEST, message, param=place)
