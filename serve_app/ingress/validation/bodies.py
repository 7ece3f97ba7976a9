"""Validates a request as far as possible before an engine sees it. Pure: bytes in, a parsed request
or a refusal out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serve_app.contract import RESPONSES, Reason
from serve_app.errors import RequestRefused, invalid
from serve_app.ingress.validation.effects import check_effects
from serve_app.ingress.validation.fields import CHECKED, PATHS, rewritten, unknown_fields
from serve_app.ingress.validation.limits import check_forbidden, check_limits
from serve_app.ingress.validation.structure import NotJson, read, too_many
from serve_app.ingress.validation.walker import Walker, compiled
from serve_app.settings.limits import RequestLimits

_DEFAULT_LIMITS = RequestLimits()
_SCHEMAS = {path: compiled(schema) for path, schema in CHECKED.items()}
_INT32 = 2**31 - 1
"""The range of the engine's tensors."""
_PROMPTS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/detokenize": "tokens"}
"""Fields that may hold token ids, perhaps very many."""


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
        raise invalid("The body must be a JSON object.")
    _check_model(path, request.get("model"), model)
    ignored = unknown_fields(path, request, limits)
    if ignored or not request.keys().isdisjoint(PATHS[path].get("meaning", ())):
        body = rewritten(path, body, ignored)
    for name in ignored:
        del request[name]
    check_forbidden(request, limits)
    walker = Walker(limits)
    walker.check(request, _SCHEMAS[path])
    check_limits(path, request, limits)
    if (problem := walker.worst(_SCHEMAS[path])) is not None:
        raise problem.refusal()
    check_effects(path, request, limits)
    if (field := _PROMPTS.get(path)) and field in request:
        _check_prompt(request[field], field, chats=path == "/v1/embeddings")
    return Parsed(request, body, ignored)


def _check_model(path: str, name: Any, model: str) -> None:
    if name is None and path.startswith("/v1/") and not path.startswith(RESPONSES):
        raise invalid("You must provide a model parameter.", "model")
    if isinstance(name, str) and name != model:
        raise RequestRefused(
            Reason.MODEL_NOT_FOUND,
            f"The model '{name[:200]}' does not exist; '{model}' is served here.",
            param="model",
        )


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
        raise invalid(f"Invalid value for '{place}': no such token id.", place)


def _no_prompt(place: str) -> RequestRefused:
    message = (
        f"Invalid value for '{place}': it must be a text, a list of texts, or (lists of) token ids."
    )
    return invalid(message, place)
