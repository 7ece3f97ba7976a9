"""What gives an answer its shape: formats, JSON schemas, grammars, regular expressions, and tools.

xgrammar is given only what it obeys (`schemas.py`), and no small grammar that ends an engine's
process or makes each of its steps take seconds: both are found in the form in which xgrammar writes
what it has read. Beside tools that the model may call, a format shapes an answer that is no call;
vLLM makes such a grammar for strict functions alone, and of others the model could call none.

Source: vLLM 0.32, `parser/abstract_parser.py`; xgrammar 0.2.8.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vllm.entrypoints.generate.base import protocol
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import DelegatingParser
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.v1.structured_output.utils import grammar_is_likely_lark
from xgrammar import Grammar

from workers.engine_plugin import replace, wrap
from workers.schemas import NotObeyed, prepared, prepared_in_tag

_TERM = r"([\w.-]+)(?:\{(\d+), (-?\d+)\})?"
"""Another rule, or its repetition."""
_SAME = re.compile(rf"\(\({_TERM}\)\)(?: \(=.*)?")
"""The body of a rule that is nothing but that."""
_AGAIN = re.compile(rf"\((?:\"\" \| )?\({_TERM} ([\w.-]+)\)(?: \| \(\1(?:\{{\2, \3\}})?\))?\)")
"""The same without end: its last part is the rule's own name."""
_LOOP = re.compile(r"\(\(\[.*\]\*\)\)")
_REPEATED = re.compile(r"([\w.-]+)\{\d+, (-?\d+)\}")
_MOST_TIMES = 12
"""How often a repetition may be repeated with nothing between. xgrammar follows all ways to divide
what is written among them: a step of `(.{0,4}){0,3}` takes 0.1 s with a vocabulary of 128,000
tokens, of `(.{0,4}){0,5}` 0.8 s, of `(.{0,8}){0,8}` 1.8 s and more with each token.
"""
_ENDLESS = 3
"""For how many times one without end counts: `(.{0,4})*` takes about as long as `(.{0,4}){0,3}`."""
_MOST_NESTED = 48
"""Rules in a row that are nothing but the next."""
_KEPT, _KEPT_CHARS = 512, 4_096
"""How many schemas are remembered, and up to which length."""
_REPEATS = ("repeat", "plus", "star")
"""The formats of structural tags that repeat others."""


def install() -> None:
    """Let the model call or answer in the format, in the app that is built next; and let that say
    what is wrong with a structural tag, which vLLM does not.
    """
    wrap(DelegatingParser, "_apply_structural_tag", _call_or_answer)
    replace(protocol.validate_structural_tag_payload, _saying_why)


def _call_or_answer(apply: Any, self: Any, request: Any) -> Any:
    tools = self.tool_parser_cls
    chooses = tools is not None and request.tools and request.tool_choice == "auto"
    # `structured_outputs`, which vLLM alone knows, is no format: where no function is strict, it
    # shapes all that the model writes.
    text = getattr(request, "text", None)
    wanted = getattr(request, "response_format", None) or (text and text.format)
    if chooses and wanted and wanted.type in ("json_object", "json_schema"):
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


def _saying_why(validate: Any, payload: Any, **options: Any) -> None:
    try:
        prepared_in_tag(_decoded(payload), obeyed)
    except NotObeyed as error:
        raise VLLMValidationError(str(error)) from error
    validate(payload, **options)


def prepare(params: SamplingParams, backend: str) -> None:
    """Hand the engine only JSON schemas that its backend obeys, and nothing that would end it or
    hold it up.
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


def obeyed(schema: Any) -> Any:
    """A JSON schema as xgrammar is given it (`schemas.prepared`), which can compile it.

    Raises:
        NotObeyed: it cannot, its answers would not obey it, or an engine would not survive it.
    """
    text = json.dumps(schema, ensure_ascii=False)
    try:
        # An agent sends the schemas of its tools with every turn.
        return _made(text) if len(text) <= _KEPT_CHARS else _made.__wrapped__(text)
    except NotObeyed as error:
        error.schema = schema
        raise


@functools.lru_cache(maxsize=_KEPT)
def _made(text: str) -> Any:
    made = prepared(json.loads(text))
    check_parts(made)
    try:
        Grammar.from_json_schema(json.dumps(made))
    except Exception as error:  # of whatever type
        for keyword, part in _parts(made):
            try:
                Grammar.from_regex(part)
            except Exception as wrong:
                raise NotObeyed(f"Invalid '{keyword}' in the JSON schema: {wrong}") from None
        raise NotObeyed(f"Invalid JSON schema: {error}") from None
    return made


def check_grammar(text: str) -> None:
    """Refuse what an engine would not survive, or what would hold it up. A text that xgrammar
    cannot read is left to vLLM, which reads it, too.
    """
    lark = grammar_is_likely_lark(text)
    _check("grammar", Grammar.from_lark if lark else Grammar.from_ebnf, text)


def check_regex(text: str) -> None:
    """The same of a regular expression."""
    _check("regex", Grammar.from_regex, text)


def check_parts(shape: Any) -> None:
    """The same of all expressions and grammars in a JSON schema or a structural tag."""
    for keyword, text in _parts(shape):
        if keyword == "tag":
            _check("structural tag", Grammar.from_structural_tag, text)
        elif keyword == "grammar":
            check_grammar(text)
        else:
            _check(keyword, Grammar.from_regex, text)


def _parts(shape: Any) -> Iterator[tuple[str, str]]:
    if isinstance(shape, list):
        for one in shape:
            yield from _parts(one)
    if not isinstance(shape, Mapping):
        return
    if shape.get("type") in _REPEATS:
        yield "tag", json.dumps({"type": "structural_tag", "format": shape})
    if isinstance(patterns := shape.get("patternProperties"), Mapping):
        yield from (("pattern", text) for text in patterns)
    for key, value in shape.items():
        if key in ("pattern", "grammar") and isinstance(value, str):
            yield key, value
        yield from _parts(value)


class _Same(NamedTuple):
    """A rule that is nothing but another one, so many times."""

    rule: str
    varies: bool
    most: int


def _check(what: str, read: Any, text: str) -> None:
    try:
        rules = [rule.partition(" ::= ")[::2] for rule in str(read(text)).split("\n")]
    except Exception:  # of whatever type
        return
    same: dict[str, _Same] = {}
    repeated: list[tuple[int, _Same]] = []
    for name, body in rules:
        repeated += [(_times(most), _Same(of, False, 1)) for of, most in _REPEATED.findall(body)]
        again = _AGAIN.fullmatch(body)
        if again and again[4] == name:
            term = _term(*again.group(1, 2, 3))
            repeated.append((_ENDLESS, term))
            same[name] = _Same(term.rule, True, _ENDLESS * term.most)
        elif found := _SAME.fullmatch(body):
            same[name] = _term(*found.groups())
        elif _LOOP.fullmatch(body):
            same[name] = _Same("", True, 1)
    _check_ends(same)
    for times, (of, varies, most) in repeated:
        depth = 0
        while of in same and depth < _MOST_NESTED and not (varies and times * most > _MOST_TIMES):
            of, one_varies, most_of_one = same[of]
            varies, most, depth = varies or one_varies, most * most_of_one, depth + 1
        if depth == _MOST_NESTED or (varies and times > 1 and times * most > _MOST_TIMES):
            raise NotObeyed(
                f"The {what} repeats what is nothing but a repetition more than {_MOST_TIMES} "
                "times. Put a fixed character between, or repeat once."
            )


def _term(rule: str, least: str | None, most: str | None) -> _Same:
    return _Same(rule, least != most, _times(most or "1"))


def _times(most: str) -> int:
    return _ENDLESS if most == "-1" else max(1, int(most))


def _check_ends(same: Mapping[str, _Same]) -> None:
    """Refuse a rule that is nothing but itself, or repetitions of itself, such as
    `root ::= (root){0,20}`: xgrammar crashes while it compiles it.
    """
    known: set[str] = set()
    for name in same:
        through: set[str] = set()
        while name in same and name not in known:
            known.add(name)
            through.add(name)
            name = same[name].rule
        if name in through:
            raise NotObeyed(f"The rule '{name[:80]}' of the grammar never ends: it is only itself.")
