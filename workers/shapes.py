"""What gives an answer its shape: formats, JSON schemas, grammars, and tools.

Beside tools that the model may call, a format shapes an answer that is no call. vLLM makes such a
grammar for strict functions alone; of others the model could call none.

Source: vLLM 0.32, `parser/abstract_parser.py`.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from vllm.entrypoints.generate.base import protocol
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import DelegatingParser
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from workers import vllm_failures
from workers.grammars import check_grammar, check_parts, check_regex, obeyed
from workers.schemas import NotObeyed, prepared_in_tag


def install() -> None:
    """Let the model call or answer in the format, in the app that is built next; and let that say
    what is wrong with a structural tag, which vLLM does not.
    """
    apply = DelegatingParser._apply_structural_tag
    if not hasattr(apply, "__wrapped__"):
        DelegatingParser._apply_structural_tag = _call_or_answer(apply)
    vllm_failures.replace(protocol.validate_structural_tag_payload, _saying_why)


def _call_or_answer(apply: Any) -> Any:
    @functools.wraps(apply)
    def applied(self: Any, request: Any) -> Any:
        tools = self.tool_parser_cls
        chooses = tools is not None and request.tools and request.tool_choice == "auto"
        if not chooses or _kind(request) not in ("json_object", "json_schema"):
            return apply(self, request)
        if tools.structural_tag_model is None:
            raise VLLMValidationError(
                "This model cannot choose between a call and an answer in a format: send either "
                "'tools' or the format, or set 'tool_choice'.",
                parameter="tool_choice",
            )
        # That of functions that are not strict: their calls have a form, their arguments are free.
        level = tools.default_tool_strict_level or ToolStrictLevel.FUNCTION
        self.tool_strict_level = max(self.tool_strict_level, level)
        return apply(self, request)

    return applied


def _kind(request: Any) -> str | None:
    """The type of an answer's format. `structured_outputs`, which vLLM alone knows, is none: where
    no function is strict, it shapes all that the model writes.
    """
    text = getattr(request, "text", None)
    wanted = getattr(request, "response_format", None) or (text and text.format)
    return wanted.type if wanted else None


def _saying_why(validate: Any) -> Any:
    @functools.wraps(validate)
    def validated(payload: Any, **options: Any) -> None:
        try:
            prepared_in_tag(_decoded(payload), obeyed)
        except NotObeyed as error:
            raise VLLMValidationError(str(error)) from error
        validate(payload, **options)

    return validated


def prepare(params: SamplingParams, backend: str) -> None:
    """Hand the engine only JSON schemas that its backend obeys, and nothing that would end it or
    hold it up.

    Raises:
        VLLMValidationError: it would not; from `NotObeyed`.
    """
    shape = params.structured_outputs
    if shape is None or backend != "xgrammar":
        return
    try:
        if shape.json is not None:
            shape.json = obeyed(_decoded(shape.json))
        if shape.structural_tag is not None:
            tag = prepared_in_tag(_decoded(shape.structural_tag), obeyed)
            check_parts(tag)
            shape.structural_tag = json.dumps(tag, ensure_ascii=False)
        if isinstance(shape.grammar, str):
            check_grammar(shape.grammar)
        if isinstance(shape.regex, str):
            check_regex(shape.regex)
    except NotObeyed as error:
        raise VLLMValidationError(str(error)) from error


def _decoded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise VLLMValidationError("The schema or structural tag is not valid JSON.") from None
