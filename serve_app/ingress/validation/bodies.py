"""Validates a request's body as far as possible before an engine sees it: bytes in, a parsed
request or a refusal out. Beyond the table of fields it refuses what would stall an engine or reach
into it, and what would be taken and have no effect. Pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from serve_app.contract import (
    ANTHROPIC,
    CHATS,
    COMPACT,
    COMPLETIONS,
    MESSAGE,
    OF_RESPONSES,
    RESPONSES,
    Reason,
    called,
)
from serve_app.errors import RequestRefused, context_exceeded, invalid, invalid_value, missing
from serve_app.ingress.validation.fields import (
    CHECKED,
    PATHS,
    check,
    check_repeats,
    rewritten,
    unknown_fields,
)
from serve_app.ingress.validation.structure import read, too_many
from serve_app.policy.order import spare_slots
from serve_app.policy.work import prompts_in
from serve_app.settings import Settings
from serve_app.settings.limits import RequestLimits
from serve_app.settings.sections import MODEL_NAME_CHARS

T = TypeVar("T")
_DEFAULT_LIMITS = RequestLimits()
_AT_ONCE_BYTES = 64 * 1024
_EMBEDDINGS = "/v1/embeddings"
_INT32 = 2**31 - 1
"""The range of the engine's tensors."""
_NAME_CHARS = 200
_PROMPTS = {COMPLETIONS: "prompt", _EMBEDDINGS: "input", "/detokenize": "tokens"}
"""Fields that may hold token ids, perhaps very many."""
_OF_THE_ANSWER = {
    CHATS: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_completion_tokens", "max_tokens"),
    RESPONSES: ("max_output_tokens",),
}
"""The fields that limit the answer; the first one that is set counts, as in vLLM."""
_MAY_BE_CUT = {**_OF_THE_ANSWER, COMPACT: ("max_output_tokens",), MESSAGE: ("max_tokens",)}
_USUAL_TOKENS = {COMPLETIONS: 16}
"""Of an answer whose request has no limit, where that is not what the context leaves."""
_WITH_SCHEMAS = (
    "response_format output_config structured_outputs text tools chat_template_kwargs".split()
)
_SCHEMA_WRAPPER_DEPTH = 4
"""Levels of a request around a JSON schema."""
_COUNTED = ("Items", "Length", "Properties", "Contains")
_COUNTS = {f"{most}{of}" for most in ("min", "max") for of in _COUNTED}
_MEDIA = ("image_url", "audio_url", "video_url", "file_url")
_CALLED = ("function", "custom")
"""Types of tools that the model can call here. vLLM shows it no others."""
_OBJECTS = {"text": "", "json_object": "schema", "structural_tag": "format"}
"""By the type of a format, its field that is an object; that of `json_schema` depends on the path.
"""
_OF_A_SCHEMA = {"type", "properties"}


class Parsed(NamedTuple):
    """A valid request."""

    request: Mapping[str, Any]
    """Its fields; of strings longer than a megabyte only the beginning."""
    body: bytes
    """What is journalled and what an engine gets: without the fields that are ignored."""
    ignored: Sequence[str] = ()
    """The names of the fields that are known nowhere, or have no effect here."""


class Validator:
    """Validates the bodies of one ingress's requests: small ones at once, large ones in a thread,
    one at a time; and refuses what no engine's context can hold.

    Validating a large body takes many short steps, and the event loop runs between them. Two such
    threads would compete with each other and with the loop for the interpreter.
    """

    def __init__(self, settings: Settings, count_ignored: Callable[[int], None]) -> None:
        self._count_ignored = count_ignored
        self._model = settings.model
        at_once = settings.workers.max_running_requests
        most = min(settings.limits.max_sequences, at_once - spare_slots(at_once))
        self._limits = settings.limits.model_copy(update={"max_sequences": most})
        self.most_tokens = 0
        """Of a prompt and its answer, in the engine that takes the most; 0 if none says so."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="validator")

    async def validate(self, path: str, body: bytes, most_output: int = 0) -> Parsed:
        """Parse a body and refuse what is invalid, as `parse` does, or what no engine's context can
        hold; count the fields that are ignored.

        Args:
            most_output: tokens that the caller may have in an answer; 0: any number.
        """
        given = (path, body, most_output)
        if len(body) <= _AT_ONCE_BYTES:
            parsed = self.validate_now(*given)
        else:
            parsed = await self.apart(self.validate_now, *given)
        if parsed.ignored:
            self._count_ignored(len(parsed.ignored))
        return parsed

    async def apart(self, step: Callable[..., T], *args: object) -> T:
        """Run a step in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, step, *args)

    def validate_now(self, path: str, body: bytes, most_output: int = 0) -> Parsed:
        """Validate a body in the caller's thread, however large it is, and count nothing."""
        its = self._model
        parsed = parse(path, body, its.name, self._limits, its.aliases, most_output)
        check_context(path, parsed.request, self.most_tokens)
        return parsed

    def stop(self) -> None:
        """End the thread; waiting bodies are no longer validated."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def parse(
    path: str,
    body: bytes,
    model: str,
    limits: RequestLimits = _DEFAULT_LIMITS,
    aliases: Collection[str] = (),
    most_output: int = 0,
) -> Parsed:
    """Parse and validate a body as a JSON object. Refuses it with `malformed_json`,
    `invalid_request` or `model_not_found`, in OpenAI's wording where it has one. The body that it
    returns has the name `model` also where the request has one of the `aliases`, and asks for
    `most_output` tokens where the request asks for more, or does not say.
    """
    if path == "/tokenize" and len(body) > limits.max_tokenize_bytes:
        raise too_many("bytes", limits.max_tokenize_bytes)
    request = read(body, limits)
    if not isinstance(request, dict):
        raise invalid("The body must be a JSON object.")
    name = request.get("model")
    if name is None and path.startswith("/v1/") and not path.startswith(RESPONSES):
        raise invalid("You must provide a model parameter.", "model")
    if is_alias := isinstance(name, str) and name != model:
        check_model(name, model, aliases)
    ignored = unknown_fields(path, request, limits)
    for name in ignored:
        del request[name]
    changed: dict[str, Any] = {"model": model} if is_alias else {}
    if path == COMPACT and request.get("input") is None:
        if not request.get("previous_response_id"):
            raise missing("input")
        request["input"] = changed["input"] = []
    check(request, CHECKED[path], limits)
    _check_limits(path, request, limits)
    _check_effects(path, request, limits)
    cut = _cut_to(most_output, path, request)
    if ignored or changed or cut or not request.keys().isdisjoint(PATHS[path].get("meaning", ())):
        body = rewritten(path, body, ignored, {**changed, **cut})
    request |= cut
    return Parsed(request, body, [*ignored, *_without_effect(path, request)])


def check_model(name: str, model: str, aliases: Collection[str]) -> None:
    """Refuse a name that is not the model's, and none of its aliases."""
    usual = 0 < len(name) <= MODEL_NAME_CHARS and name.isprintable()
    if name != model and not (usual and any(fnmatchcase(name, alias) for alias in aliases)):
        message = f"The model '{name[:_NAME_CHARS]}' does not exist; '{model}' is served here."
        raise RequestRefused(Reason.MODEL_NOT_FOUND, message, param="model")


def _cut_to(most: int, path: str, request: Mapping[str, Any]) -> Mapping[str, int]:
    """The limit of the answer that a request must have instead of its own."""
    names = _MAY_BE_CUT.get(path, ()) if most else ()
    if not names:
        return {}
    for name in names:
        if request.get(name) is not None:
            return {name: most} if request[name] > most else {}
    unsaid = request.keys().isdisjoint(names)
    usual = _USUAL_TOKENS.get(path, 0) if unsaid else 0
    return {} if 0 < usual <= most else {names[-1]: most}


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
            if not (chats and item and type(item[0]) is dict):
                _check_ids(item, f"{field}[{index}]")
    else:
        _check_ids(prompt, field)


def _check_ids(ids: list[Any], place: str) -> None:
    if set(map(type, ids)) - {int}:
        index = next(index for index, item in enumerate(ids) if type(item) is not int)
        raise _no_prompt(f"{place}[{index}]")
    if ids and not (min(ids) >= 0 and max(ids) <= _INT32):
        raise invalid_value(place, "no such token id")


def _no_prompt(place: str) -> RequestRefused:
    what = "it must be a text, a list of texts, or (lists of) token ids"
    return invalid_value(place, what)


def check_context(path: str, request: Mapping[str, Any], most_tokens: int) -> None:
    """Refuse what no engine can answer, with `context_length_exceeded`; the message names the field
    and both numbers.
    """
    for param, what in _too_long(path, request, most_tokens) if most_tokens else ():
        raise context_exceeded(
            f"This model's maximum context length is {most_tokens} tokens, but {what}. Please "
            "reduce it.",
            param,
        )


def _too_long(path: str, request: Mapping[str, Any], most_tokens: int) -> Iterator[tuple[str, str]]:
    set_ = [name for name in _OF_THE_ANSWER.get(path, ()) if isinstance(request.get(name), int)]
    answer: int = request[set_[0]] if set_ else 1
    if answer > most_tokens:
        yield set_[0], f"{set_[0]} is {answer}"
    prompt = request.get("prompt")
    if path != COMPLETIONS or request.get("truncate_prompt_tokens") is not None:
        return
    if not isinstance(prompt, list) or not prompt:
        return
    for ids in [prompt] if isinstance(prompt[0], int) else prompt:
        if isinstance(ids, list) and len(ids) + max(answer, 1) > most_tokens:
            yield "prompt", f"the prompt has {len(ids)} tokens and the answer may have {answer}"


def _check_limits(path: str, request: Mapping[str, Any], limits: RequestLimits) -> None:
    """Refuse what would stall an engine or reach into it."""
    kwargs = request.get("chat_template_kwargs")
    own_template = isinstance(kwargs, dict) and "chat_template" in kwargs
    if own_template and "chat_template" not in limits.allowed_fields:
        place = "chat_template_kwargs.chat_template"
        raise invalid("Custom chat templates are not allowed here.", place)
    if (field := _PROMPTS.get(path)) and field in request:
        _check_prompt(request[field], field, chats=path == _EMBEDDINGS)
    _check_sequences(path, request, limits)
    _check_schemas(request, limits)
    for name in ("messages", "input") if path not in ANTHROPIC else ():
        if isinstance(value := request.get(name), dict | list):
            _check_media(value, name, limits)


def _check_sequences(path: str, request: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check how many answers an engine would write at a time, or how many texts it would embed."""
    prompts = prompts_in(request.get("prompt")) if path == COMPLETIONS else 1
    inputs = request.get("input", request.get("messages"))
    if path == _EMBEDDINGS and prompts_in(inputs) > limits.max_inputs:
        raise too_many("texts", limits.max_inputs, "input")
    count = request.get("n")
    each = count if isinstance(count, int) else 1
    if prompts * each > limits.max_sequences:
        message = f"{prompts} prompts times n={each} are more than {limits.max_sequences} answers."
        raise invalid(message, "n" if each > 1 else "prompt")
    if request.get("use_beam_search"):
        if not limits.max_beams:
            raise invalid("Beam search is not allowed here.", "use_beam_search")
        if each > limits.max_beams:
            raise invalid(f"A beam search may have 'n' up to {limits.max_beams} here.", "n")


def _check_schemas(request: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check JSON schemas wherever a request may contain one, and similar inputs of templates and
    grammars.
    """
    size = 0
    for name in _WITH_SCHEMAS:
        value = request.get(name)
        if isinstance(value, dict | list):
            levels = limits.max_schema_depth + _SCHEMA_WRAPPER_DEPTH
            # The model only reads a tool's counts, or xgrammar obeys them: all cost it as much.
            _check_schema(value, name, limits, levels, counts=name != "tools")
            size += len(msgspec.json.encode(value))
    structured = request.get("structured_outputs")
    inner = structured if isinstance(structured, dict) else {}
    for name in ("json", "structural_tag"):
        if isinstance(text := inner.get(name), str):
            size += len(text)
            if size <= limits.max_schema_bytes:
                place = f"structured_outputs.{name}"
                _check_schema(_decoded(text), place, limits, limits.max_schema_depth)
    if size > limits.max_schema_bytes:
        raise invalid(
            f"The tools and JSON schemas of the request are {size} bytes long; at most "
            f"{limits.max_schema_bytes} are allowed.",
            next(name for name in _WITH_SCHEMAS if name in request),
        )


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None  # the engine's server reports what is wrong with it


def _check_schema(
    value: Any, place: str, limits: RequestLimits, levels: int, counts: bool = True
) -> None:
    if levels <= 0:
        what = "levels of nested lists and objects in a schema"
        raise too_many(what, limits.max_schema_depth, place)
    if isinstance(value, dict):
        if isinstance(pattern := value.get("pattern"), str):
            if len(pattern) > limits.max_regex_chars:
                most = f"longer than {limits.max_regex_chars} characters"
                raise invalid(f"A pattern in '{place}' is {most}.", place)
            check_repeats(pattern, place, limits.max_repeats)
        for name in _COUNTS & value.keys() if counts else ():
            count = value[name]
            # One of vLLM's backends unrolls repeats.
            if isinstance(count, int | float) and count > limits.max_repeats:
                raise too_many(f"repeats ({name})", limits.max_repeats, place)
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        if isinstance(item, dict | list):
            _check_schema(item, place, limits, levels - 1, counts)


def _check_media(value: dict[str, Any] | list[Any], field: str, limits: RequestLimits) -> None:
    """Allow the engine's server to fetch only from the hosts that the settings list."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key in _MEDIA:
            url = item.get("url") if isinstance(item, dict) else item
            if isinstance(url, str) and url:
                _check_url(url, f"{field}.{key}", limits)
        elif isinstance(item, dict | list):
            _check_media(item, field, limits)


def _check_url(url: str, place: str, limits: RequestLimits) -> None:
    if url[:5].lower() != "data:" and (host := _host(url)) not in limits.media_domains:
        source = host[:100] or url[:40]
        advice = "cannot be fetched here; send them as a data: URL"
        raise invalid(f"Media from '{source}' {advice}.", place)


def _host(url: str) -> str:
    """The host of an http(s) URL that all parsers read alike; empty for any other URL."""
    if not url.isascii() or not url.isprintable() or any(char in url for char in " \\@"):
        return ""
    try:
        parts = urlsplit(url)
        return parts.hostname or "" if parts.scheme in ("http", "https") else ""
    except ValueError:
        return ""


def _check_effects(path: str, request: Mapping[str, Any], limits: RequestLimits) -> None:
    """Refuse what would not be obeyed without a word: a choice of tools, and a format or schema
    where nothing reads it. The request has passed the walker.
    """
    if path in (CHATS, *OF_RESPONSES):
        tools = request.get("tools") or []
        _check_functions(tools)
        _check_choice(request.get("tool_choice"), tools, within=path == CHATS)
    if path in OF_RESPONSES and isinstance(request["input"], list):
        for number, item in enumerate(request["input"]):
            if item.get("type") == "additional_tools":
                what = "tools are only read in 'tools' here"
                raise invalid_value(f"input[{number}].type", what)
    if isinstance(text := request.get("text"), dict):
        _check_objects(text, "text", "format")
        _check_format(text.get("format"), "text.format", "schema")
    _check_format(request.get("response_format"), "response_format", "json_schema")
    if path in ANTHROPIC:
        _check_anthropics(request, limits)
    if path == RESPONSES and request.get("background") and request.get("store") is False:
        what = "the response is stored until somebody fetches it; leave out 'store', or this"
        raise invalid_value("background", what)


def _check_anthropics(request: Mapping[str, Any], limits: RequestLimits) -> None:
    """Refuse pictures from elsewhere, and a choice among tools that are not there."""
    _check_sources(request["messages"], "messages", limits)
    choice, tools = request.get("tool_choice") or {}, request.get("tools") or ()
    if choice.get("type") in ("any", "tool") and not tools:
        raise invalid_value("tool_choice", "a call is required, and there are no 'tools'")
    if choice.get("type") == "tool" and choice.get("name") not in [tool["name"] for tool in tools]:
        raise _no_tool("tool_choice.name", str(choice.get("name")))


def _check_sources(content: Any, place: str, limits: RequestLimits) -> None:
    """The arguments of calls, which may have any fields, are not looked into."""
    for item in content if isinstance(content, list) else ():
        if isinstance(item, dict):
            source = item.get("source")
            if isinstance(source, dict) and source.get("type") == "url":
                _check_url(str(source.get("url")), f"{place}.source.url", limits)
            _check_sources(item.get("content"), f"{place}.content", limits)


def _without_effect(path: str, request: Mapping[str, Any]) -> list[str]:
    """What is left out of the fields of a message."""
    thinking = (path in ANTHROPIC and request.get("thinking")) or {}
    return [f"thinking.{name}" for name in ("budget_tokens", "display") if name in thinking]


def _check_functions(tools: Sequence[Any]) -> None:
    """Check that the schema of each function is where a function has it."""
    for number, tool in enumerate(tools):
        if called(tool)[0] != "function":
            continue
        place, function = f"tools[{number}]", tool
        if isinstance(tool.get("function"), dict):
            place, function = f"{place}.function", tool["function"]
        if function.get("parameters") is not None:
            continue
        for name, value in function.items():
            if isinstance(value, dict) and value.keys() & _OF_A_SCHEMA and "output" not in name:
                raise _unknown(place, name, "parameters")


def _check_choice(choice: Any, tools: Sequence[Any], within: bool) -> None:
    """Check that what may or must be called is there. In chats a choice has its fields `within` an
    object of its own.
    """
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        place = "tool_choice.allowed_tools.tools" if within else "tool_choice.tools"
        allowed = choice["allowed_tools"] if within else choice
        there = {called(tool): tool for tool in tools}
        for number, one in enumerate(allowed["tools"]):
            if called(one) not in there:
                raise _no_tool(f"{place}[{number}]", " ".join(filter(None, called(one))))
        choice, tools = allowed["mode"], [there[called(one)] for one in allowed["tools"]]
    elif isinstance(choice, dict):
        name = (choice["function"] if within else choice)["name"]
        if name not in _names(tools):
            raise _no_tool(f"tool_choice{'.function' * within}.name", name)
    if choice == "required" and tools and not any(_names(tools)):
        what = "a call is required, and the model can call none of the 'tools' here"
        raise invalid_value("tool_choice", what)


def _no_tool(place: str, name: str) -> RequestRefused:
    return invalid_value(place, f"'{name[:_NAME_CHARS]}' is not among the 'tools'")


def _names(tools: Sequence[Any]) -> Iterator[str]:
    """What the model can call, by each of its names."""
    for tool in tools:
        kind, name, _ = called(tool)
        if kind in _CALLED:
            yield name
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            for inner in _names(tool["tools"]):
                yield from (inner, f"{name}__{inner}")


def _check_format(wanted: Any, place: str, of_schema: str) -> None:
    """Check that nothing in an answer's format is left out. A `json_schema` has its schema in the
    field `of_schema`, or within that.
    """
    kind = str(wanted.get("type")) if isinstance(wanted, dict) else ""
    field = {**_OBJECTS, "json_schema": of_schema}.get(kind)
    if field is None:
        return
    _check_objects(wanted, place, field)
    schema = wanted.get(field)
    if kind == "json_object" and schema is not None and not isinstance(schema, dict):
        raise invalid_value(f"{place}.schema", "it must be an object")
    if kind == of_schema and isinstance(schema, dict) and schema.get("schema") is None:
        place = f"{place}.{of_schema}.schema"
        raise missing(place)


def _check_objects(holder: Mapping[str, Any], place: str, known: str) -> None:
    """Refuse an object in a field other than the one that is read."""
    for name, value in holder.items():
        if isinstance(value, dict) and name != known:
            raise _unknown(place, name, known)


def _unknown(holder: str, name: str, known: str) -> RequestRefused:
    place = f"{holder}.{name[:_NAME_CHARS]}"
    instead = f" Use '{known}' instead." if known else ""
    return invalid(f"Unknown parameter: '{place}'.{instead}", place)
