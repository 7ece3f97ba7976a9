"""No body can block the loop, exhaust the memory or occupy an engine: its limits, and the cost of
checking them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.pages import docstrings
from serve_app.contract import ANTHROPIC, MESSAGE, Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.validation.bodies import Validator, check_context, parse
from serve_app.ingress.validation.fields import INFERENCE_PATHS, TABLE
from serve_app.ingress.validation.structure import read
from serve_app.settings import Settings
from serve_app.settings.limits import HARMFUL_FIELDS, RequestLimits
from tests.tables import each

MODEL = "hermes-tiny"
CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = INFERENCE_PATHS[:4]
LIMITS = RequestLimits()
HELLO = [{"role": "user", "content": "hello"}]


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = [value]
    return value


def schema(levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(levels // 2):
        value = {"type": "object", "properties": {"a": value}}
    return value


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def said(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


def image(url: Any) -> dict[str, Any]:
    return said({"type": "image_url", "image_url": url})


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"json_schema": {"schema": schema}}}


TEMPLATE = "chat_template"
INPUT_IMAGE = {"type": "input_image", "image_url": "http://10.0.0.1/"}


def refused(
    path: str, body: bytes | dict[str, Any], limits: RequestLimits = LIMITS
) -> RequestRefused:
    raw = body if isinstance(body, bytes) else json.dumps({"model": MODEL, **body}).encode()
    with pytest.raises(RequestRefused) as caught:
        parse(path, raw, MODEL, limits)
    assert (caught.value.reason, caught.value.status) == (Reason.INVALID_REQUEST, 400)
    assert len(caught.value.message) < 500
    return caught.value


@each("path", INFERENCE_PATHS)
@each("number", ["9" * 5_000, "1e400", "-1e400"])
def test_a_number_that_cannot_be_represented_is_refused_in_these_words(
    path: str, number: str
) -> None:
    assert "cannot be represented" in refused(path, f'{{"a": [{number}]}}'.encode()).message


@each("number", [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**400])
@each(
    "place",
    ["prediction", "tools", "response_format", "structured_outputs", "messages"],
)
def test_a_schema_and_what_only_vllm_reads_may_have_any_number(number: int, place: str) -> None:
    limits = {"type": "integer", "maximum": number}
    value = {
        "tools": [tool(limits)],
        "structured_outputs": {"json": limits},
        "messages": [{"role": "user", "content": "x", "own": number}],
    }.get(place, limits)
    body = {"model": MODEL, "messages": HELLO, place: value}
    assert parse(CHAT, json.dumps(body).encode(), MODEL, LIMITS).request == body


def source(**fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", **fields}}


ROWS: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGE, {"messages": HELLO * 2_049}, "messages"),
    (MESSAGE, {"messages": []}, "messages"),
    (MESSAGE, {"max_tokens": None}, "max_tokens"),
    (MESSAGE, {"max_tokens": 0}, "max_tokens"),
    (MESSAGE, {"stop_sequences": ["x"] * 17}, "stop_sequences"),
    (MESSAGE, {"stop_sequences": ["x" * 1_025]}, "stop_sequences"),
    (MESSAGE, {"system": 3}, "system"),
    (MESSAGE, {"tools": [{"name": "f", "input_schema": {}}] * 513}, "tools"),
    (MESSAGE, {"tools": [{"name": "f", "input_schema": schema(70)}]}, "tools"),
    (MESSAGE, {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    (MESSAGE, {"tools": [{"type": "web_search_20250305", "name": "f"}]}, "tools[0].type"),
    (MESSAGE, {"output_config": {"format": {"schema": schema(70)}}}, "output_config"),
    (MESSAGE, {"output_config": {"format": {"schema": {"x": "y" * 270_000}}}}, "output_config"),
    (MESSAGE, {"n": 2}, "n"),
    (MESSAGE, {"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    (MESSAGE, said(source(url="http://10.0.0.1/x.png")), "messages.content.source.url"),
    (MESSAGE, said(source(url=3)), "messages.content.source.url"),
    (
        MESSAGE,
        said({"type": "tool_result", "content": [source(url="http://10.0.0.1/x.png")]}),
        "messages.content.content.source.url",
    ),
    (CHAT, {"messages": HELLO * 2_049}, "messages"),
    (CHAT, {"tools": [tool({})] * 513}, "tools"),
    (CHAT, {"stop": ["x"] * 17}, "stop"),
    (CHAT, {"stop": ["x" * 1_025]}, "stop"),
    (CHAT, {"stop_token_ids": list(range(129))}, "stop_token_ids"),
    (CHAT, {"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
    (CHAT, {"n": 10**400}, "n"),
    (CHAT, {"temperature": 10**400}, "temperature"),
    (CHAT, {"repetition_detection": {"min_count": 2**31}}, "repetition_detection.min_count"),
    (CHAT, {"logit_bias": {str(n): 1 for n in range(1_025)}}, "logit_bias"),
    (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias"),
    *(
        (path, {"metadata": metadata, **needed}, place)
        for path, needed in ((CHAT, {}), (RESPONSES, {"input": "x"}))
        for metadata, place in (
            ({"run": 7}, "metadata.run"),
            ({"run": None}, "metadata.run"),
            ({"run": {}}, "metadata.run"),
            ({"run": "x" * 513}, "metadata.run"),
            ({"x" * 65: ""}, f"metadata.{'x' * 65}"),
            ({str(n): "" for n in range(17)}, "metadata"),
        )
    ),
    (CHAT, {"structured_outputs": True}, "structured_outputs"),
    (CHAT, {"allowed_token_ids": list(range(1_025))}, "allowed_token_ids"),
    (CHAT, {"logprobs": True, "logprob_token_ids": list(range(129))}, "logprob_token_ids"),
    (CHAT, {"bad_words": ["x"] * 129}, "bad_words"),
    (CHAT, {"bad_words": ["x" * 257]}, "bad_words"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": ["x"] * 257}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 129, "n": 2}, "n"),
    (COMPLETIONS, {"prompt": "x", "best_of": 129}, "best_of"),
    (COMPLETIONS, {"prompt": [[1], [True]]}, "prompt[1][0]"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [[2**31]]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (EMBEDDINGS, {"input": ["x"] * 2_049}, "input"),
    (EMBEDDINGS, {"input": "x", "dimensions": 2**31}, "dimensions"),
    ("/detokenize", {"tokens": [2**31]}, "tokens"),
    (RESPONSES, {"input": HELLO * 2_049}, "input"),
    (RESPONSES, {"input": "x", "text": {"format": {"schema": schema(60)}}}, "text"),
    (CHAT, {"use_beam_search": True, "n": 9}, "n"),
    (CHAT, {"max_tokens": 2**31}, "max_tokens"),
    (CHAT, {"min_tokens": -1}, "min_tokens"),
    (CHAT, {"top_k": 2**31}, "top_k"),
    (CHAT, {"min_p": 1.5}, "min_p"),
    (CHAT, {"repetition_penalty": 1e300}, "repetition_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens"),
    (CHAT, {"stream_interval": 2**31}, "stream_interval"),
    (CHAT, {"priority": -5}, "priority"),
    (CHAT, {"user": "x" * 513}, "user"),
    (CHAT, {"cache_salt": "x" * 513}, "cache_salt"),
    (CHAT, structured(choice=["x"] * 513), "structured_outputs.choice"),
    (CHAT, structured(choice=["x" * 1_025]), "structured_outputs.choice"),
    (CHAT, structured(json=json.dumps(schema(60))), "structured_outputs.json"),
    (CHAT, structured(json="x" * 262_145), "structured_outputs"),
    (CHAT, structured(json='{"items": {"maxItems": 1e9}}'), "structured_outputs.json"),
    (CHAT, structured(regex="x" * 2_049), "structured_outputs.regex"),
    (CHAT, structured(regex="a{1,10001}"), "structured_outputs.regex"),
    (CHAT, structured(grammar="x" * 16_385), "structured_outputs.grammar"),
    (CHAT, structured(grammar='root ::= "a"{ 99999 }'), "structured_outputs.grammar"),
    (CHAT, structured(grammar='root ::= "a"{' + "9" * 10_000 + ",}"), "structured_outputs.grammar"),
    (CHAT, structured(structural_tag="x" * 16_385), "structured_outputs.structural_tag"),
    (CHAT, structured(structural_tag='{"maxLength": 10001}'), "structured_outputs.structural_tag"),
    (CHAT, response_format(schema(60)), "response_format"),
    (CHAT, response_format({"pattern": "x" * 2_049}), "response_format"),
    (CHAT, response_format({"pattern": "a{99999}"}), "response_format"),
    (CHAT, {"tools": [tool(schema(60))]}, "tools"),
    (CHAT, {"tools": [tool({"description": "x" * 200_000})] * 2}, "tools"),
    (CHAT, {"chat_template_kwargs": nested(60)}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {TEMPLATE: "{{ 1 }}"}}, f"chat_template_kwargs.{TEMPLATE}"),
    (CHAT, image({"url": "http://169.254.169.254/latest"}), "messages.image_url"),
    (CHAT, image("https://example.com/a.png"), "messages.image_url"),
    (CHAT, said({"video_url": {"url": "http://[::1]/"}}), "messages.video_url"),
    (RESPONSES, {"input": said(INPUT_IMAGE)["messages"]}, "input.image_url"),
    ("/tokenize", image("http://localhost/"), "messages.image_url"),
]


@each("most, slots, allowed", [(256, 128, 112), (64, 128, 64), (256, 4, 4)])
async def test_no_request_has_more_answers_than_one_engine_has_slots_for_all(
    most: int, slots: int, allowed: int
) -> None:
    settings = Settings.model_validate(
        {"limits": {"max_sequences": most}, "workers": {"max_running_requests": slots}}
    )
    validator = Validator(settings, lambda _: None)

    def body(count: int, **more: Any) -> bytes:
        return json.dumps({"model": MODEL, "prompt": ["x"] * count, **more}).encode()

    await validator.validate(COMPLETIONS, body(allowed))
    await validator.validate(COMPLETIONS, body(allowed // 2, n=2))
    await validator.validate(
        EMBEDDINGS, json.dumps({"model": MODEL, "input": ["x"] * 2_048}).encode()
    )
    for too_many in (body(allowed + 1), body(allowed // 2 + 1, n=2)):
        with pytest.raises(RequestRefused, match=f"are more than {allowed} answers"):
            await validator.validate(COMPLETIONS, too_many)
    validator.stop()


@each("path, fields, param", ROWS)
def test_what_would_hurt_an_engine_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str
) -> None:
    prompts: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "x"}}
    base = whole(path) if path == MESSAGE else prompts.get(path, {})
    assert refused(path, base | fields).param == param


def test_a_tool_may_allow_long_texts() -> None:
    """Claude Code's do; nothing is repeated for them."""
    long = tool({"type": "string", "maxLength": 2**31 - 1})
    body = {"model": MODEL, "messages": HELLO, "tools": [long], "tool_choice": "required"}
    assert parse(CHAT, json.dumps(body).encode(), MODEL).request == body


def whole(path: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": HELLO, "prompt": "x", "input": "x", "tokens": [1]}
    known, required = TABLE[path]["properties"], TABLE[path]["required"]
    limit = {"max_tokens": 1} if "max_tokens" in required else {}
    return limit | {name: value for name, value in body.items() if name in known}


def test_the_description_names_every_field_that_reaches_into_the_engine() -> None:
    named = docstrings(RequestLimits)["allowed_fields"].rpartition(": ")[2]
    assert named == ", ".join(HARMFUL_FIELDS)


@each("path", INFERENCE_PATHS)
@each("field", HARMFUL_FIELDS)
def test_what_reaches_into_the_engine_is_closed_and_can_be_opened(path: str, field: str) -> None:
    body = {**whole(path), field: {"a": 1}}
    assert refused(path, body).param == field
    assert parse(path, json.dumps(body).encode(), MODEL, RequestLimits(allowed_fields=[field]))
    assert parse(path, json.dumps({**body, field: None}).encode(), MODEL)


@each("path", INFERENCE_PATHS)
def test_what_nobody_knows_is_left_out_or_refused_if_a_setting_says_so(path: str) -> None:
    plain = {**whole(path), **({} if path in ANTHROPIC else {"user": "é"})}
    for name in ("client_metadata", "hermes_prior_token_ids", "\0", "x" * 300, "chat_id", "é"):
        for value in ({"a": [1.0, "é"]}, None, "x" * 900_000):
            body = json.dumps({name: value, **plain}, ensure_ascii=False).encode()
            request, kept, ignored = parse(path, body, MODEL)
            assert (request, json.loads(kept), ignored) == (plain, plain, [name])
        raw = json.dumps({**whole(path), name: 1}).encode()
        assert parse(path, raw, MODEL, RequestLimits(allowed_fields=[name])).body == raw
        refusal = refused(path, raw, RequestLimits(refuse_unknown_fields=True))
        assert (refusal.param, refusal.message) == (
            name[:200],
            f"Unknown parameter: '{name[:200]}'.",
        )
    many = {**whole(path), **{f"own_field_{number}": 1 for number in range(101)}}
    assert "more than 100 fields that are not known" in refused(path, many).message


@each(
    "path, name, hint",
    [
        (CHAT, "temprature", "Did you mean 'temperature'?"),
        (CHAT, "temperatuer", "Did you mean 'temperature'?"),
        (CHAT, "maxTokens", "Did you mean 'max_tokens'?"),
        (CHAT, "tool", "Did you mean 'tools'?"),
        (RESPONSES, "instruction", "Did you mean 'instructions'?"),
        (EMBEDDINGS, "inputs", "Did you mean 'input'?"),
        ("/detokenize", "token", "Did you mean 'tokens'?"),
        (CHAT, "guided_json", "Use 'structured_outputs' instead."),
        (CHAT, "guided_own", "Use 'structured_outputs' instead."),
        (CHAT, "max_output_tokens", ""),
        (CHAT, "instructions", ""),
        (RESPONSES, "max_tokens", ""),
        (RESPONSES, "messages", ""),
        (COMPLETIONS, "tools", ""),
        (COMPLETIONS, "early_stopping", ""),
        (EMBEDDINGS, "normalize", ""),
        ("/tokenize", "max_tokens", ""),
    ],
)
def test_what_would_count_elsewhere_is_refused_by_name(path: str, name: str, hint: str) -> None:
    refusal = refused(path, {**whole(path), name: 1})
    assert refusal.param == name
    assert refusal.message == f"Unknown parameter: '{name}'. {hint}".rstrip()
    assert refused(path, {**whole(path), name: 1}, RequestLimits(refuse_unknown_fields=True))
    assert parse(path, json.dumps({**whole(path), name: None}).encode(), MODEL)
    own = RequestLimits(allowed_fields=[name])
    assert parse(path, json.dumps({**whole(path), name: 1}).encode(), MODEL, own)


@each(
    "sent, limit",
    [
        ({"max_completion_tokens": 7}, 7),
        ({"max_completion_tokens": 0}, 0),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_completion_tokens": None}, None),
    ],
)
def test_a_completion_may_have_its_limit_under_the_name_of_chats(
    sent: dict[str, Any], limit: int | None
) -> None:
    request, body, ignored = parse(
        COMPLETIONS, json.dumps({**whole(COMPLETIONS), **sent}).encode(), MODEL
    )
    expected = {} if limit is None else {"max_tokens": limit}
    assert json.loads(body) == {**whole(COMPLETIONS), **expected}
    assert not ignored
    with pytest.raises(RequestRefused, match="max_completion_tokens is 99"):
        check_context(COMPLETIONS, {**request, "max_completion_tokens": 99}, 50)


@each(
    "url, passes",
    [
        ("https://media.example/a.png", True),
        ("HTTPS://MEDIA.EXAMPLE/a.png", True),
        ("data:image/png;base64,aGVsbG8=", True),
        ("https://media.example.evil/a.png", False),
        ("https://evil@media.example/a.png", False),
        ("https://evil\\@media.example/", False),
        ("https://evil/\nhttps://media.example/", False),
        ("ftp://media.example/", False),
        ("//media.example/", False),
        ("https://[media.example/", False),
        ("https://mediа.example/", False),  # a Cyrillic letter
    ],
)
def test_media_are_fetched_from_named_hosts_only(url: str, passes: bool) -> None:
    limits = RequestLimits(media_domains=["media.example"])
    for value in (url, {"url": url}):
        body = json.dumps({"model": MODEL, **image(value)}).encode()
        if passes:
            assert parse(CHAT, body, MODEL, limits)
        else:
            assert refused(CHAT, body, limits).param == "messages.image_url"


def test_the_address_of_a_citation_is_no_medium() -> None:
    cited = [{"url_citation": {"url": "http://a/"}}]
    quoted = {"role": "assistant", "content": "x", "annotations": cited}
    assert parse(CHAT, json.dumps({"model": MODEL, "messages": [quoted, *HELLO]}).encode(), MODEL)


@pytest.mark.parametrize("levels", [100, 101, 900])
def test_depth_is_bounded(levels: int) -> None:
    body = json.dumps(nested(levels)).encode()
    if levels <= 100:
        assert read(body, LIMITS) == nested(levels)
    else:
        with pytest.raises(RequestRefused, match="more than 100 levels"):
            read(body, LIMITS)


def test_a_text_to_tokenize_is_shorter_than_others() -> None:
    longest = json.dumps({"prompt": "x" * ((1 << 20) - 14)}).encode()
    assert len(longest) == 1 << 20
    assert parse("/tokenize", longest, MODEL)
    assert "1048576 bytes" in refused("/tokenize", longest + b" ").message


@each(
    "path, asked, param",
    [
        (CHAT, {"max_tokens": 101}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 101, "max_tokens": 5}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "a text", "max_tokens": 101}, "max_tokens"),
        (RESPONSES, {"max_output_tokens": 101}, "max_output_tokens"),
        (COMPLETIONS, {"prompt": [7] * 100, "max_tokens": 0}, "prompt"),
        (COMPLETIONS, {"prompt": [[7], [7] * 100]}, "prompt"),
        (COMPLETIONS, {"prompt": [7] * 60, "max_tokens": 41}, "prompt"),
    ],
)
def test_what_is_longer_than_any_engines_context_is_refused_before_it_waits(
    path: str, asked: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_context(path, asked, 100)
    assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert caught.value.status == 400
    assert caught.value.param == param
    assert b'"code":"context_length_exceeded"' in caught.value.body()
    assert "100 tokens" in caught.value.message
    assert caught.value.message.endswith("(context_length_exceeded)")
    check_context(path, asked, 101)
    check_context(path, asked, 0)


@each(
    "path, asked",
    [
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 101}),
        (COMPLETIONS, {"prompt": "many words " * 1000, "max_tokens": 100}),
        (COMPLETIONS, {"prompt": [7] * 60, "max_tokens": 40}),
        (COMPLETIONS, {"prompt": [7] * 99}),
        (COMPLETIONS, {"prompt": [7] * 500, "truncate_prompt_tokens": 50}),
        (COMPLETIONS, {"prompt": ["a", "b"] * 100}),
        ("/v1/embeddings", {"input": [7] * 500, "max_tokens": 500}),
    ],
)
def test_what_vllm_answers_is_not_refused_as_too_long(path: str, asked: dict[str, Any]) -> None:
    check_context(path, asked, 100)
