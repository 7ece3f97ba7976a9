"""Whatever is sent as a JSON schema, a regular expression or a grammar: the answer obeys it, or it
is a 400 in OpenAI's shape. No engine dies of it, and none keeps another request waiting.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.service.support import Running, replicas

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

SCHEMAS, EXPRESSIONS = 200, 120
TOKENS = 100
WITHIN_S = 60.0
PROMPT = "Answer with JSON."
NO_SPACES = {"9": -99, "10": -99, "13": -99, "32": -99}
"""JSON allows white space without end between its parts, and the tiny model likes it."""

COUNTS = st.sampled_from([0, 1, 2, 3, 128, 129, 5_000, 10_001, -1, 1.5, "1", None, True, 2**70])
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 1.5, "", "wat", [], {}, [[]], [None], "😀\0", 10**30]
)
NAMES = st.sampled_from(["a", "b", "c", "", 'q"', "é😀", "a b", "__proto__", "$ref", "\\"])
VALUES = st.one_of(
    ODD, st.integers(-9, 9), st.text(max_size=4), st.lists(st.integers(0, 3), max_size=2)
)
TYPES = ["string", "integer", "number", "array", "object", "boolean", "null"]
PATTERNS = st.sampled_from(
    [
        *("^a+$", "x|y", "(x{0,20}){0,50}", "(a+)+$", "^(a?){9}$", "[^a-z]{2}", "(", "[", "a{2,1}"),
        *("^\\d{3}-\\d{4}$", "\\p{L}+", "(?!a)", "(?<n>a)", "\\bx", "a{99999}", "^.{0,128}$", "é+"),
        *("(.*){0,50}", "((((a|b){1,9}){1,9}){1,9}){1,9}", "\\1", "^$", "", '^"$', "[\\s\\S]{0,5}"),
    ]
)
FORMATS = st.sampled_from(
    ["date", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "regex", "wat", ""]
)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def typed(name: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(name)}, optional=fields)


NUMBERS = {
    name: st.one_of(st.integers(-20, 20), st.sampled_from([0.5, 1e300, True, "1", 2**64]))
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
}
LEAVES = st.one_of(
    st.booleans(),
    ODD,
    st.sampled_from([{"type": name} for name in TYPES]),
    typed("string", minLength=COUNTS),
    typed("string", maxLength=st.integers(0, 200)),
    typed("string", minLength=COUNTS, maxLength=COUNTS, pattern=PATTERNS, format=FORMATS),
    st.builds(lambda text: {"type": "string", "pattern": text}, PATTERNS),
    st.builds(lambda text: {"type": "string", "format": text}, FORMATS),
    typed("integer", **NUMBERS),
    typed("number", **NUMBERS, multipleOf=st.sampled_from([2, 0.1, 0, -1])),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, max_size=4)),
    st.builds(lambda n: {"enum": [f"{number}é" for number in range(n)]}, st.integers(500, 5_000)),
    st.builds(
        lambda place: {"$ref": place},
        st.sampled_from(["#", "#/$defs/d", "#/definitions/e", "#/$defs/none", "http://x/y", "", 3]),
    ),
    st.builds(
        lambda names: {"type": names}, st.lists(st.sampled_from([*TYPES, "wat"]), max_size=3)
    ),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=3)
    return st.one_of(
        typed("array", items=inner, minItems=COUNTS, maxItems=st.integers(0, 3)),
        typed("array", prefixItems=several, items=inner, uniqueItems=st.booleans()),
        typed("array", items=several, contains=inner),
        st.builds(
            lambda properties, closed: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": closed,
            },
            named,
            st.one_of(st.just(False), inner),
        ),
        typed(
            "object",
            properties=named,
            required=st.one_of(st.booleans(), st.lists(NAMES, max_size=2)),
            additionalProperties=inner,
            patternProperties=st.dictionaries(PATTERNS, inner, max_size=2),
            propertyNames=inner,
            minProperties=COUNTS,
            maxProperties=COUNTS,
        ),
        some(anyOf=several),
        some(oneOf=several, discriminator=ODD),
        some(allOf=several, title=ODD, description=ODD, default=ODD),
        some(**{"not": inner, "if": inner, "then": inner, "dependentRequired": ODD}),
    )


JSON_SCHEMAS = st.builds(
    lambda schema, d, e: (
        {**schema, "$defs": {"d": d}, "definitions": {"e": e}}
        if isinstance(schema, dict)
        else schema
    ),
    st.recursive(LEAVES, larger, max_leaves=8),
    st.recursive(LEAVES, larger, max_leaves=3),
    LEAVES,
)
FORMS = ["format", "strict format", "tool", "strict tool", "response", "response tool", "json"]

ATOMS = ["x", ".", "[a-z]", "\\d", '[^"]', "é", "(?:ab|c)", "\\s", "", "\\", "[", "*", "\\u4e00"]
REGEXES = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.builds(
            lambda text, count: f"({text}){count}",
            inner,
            st.sampled_from(["*", "+", "?", "{0,20}", "{2}", "{50}", "{1,}", "{0,9999}", "{3,1}"]),
        ),
        st.builds(lambda one, other: one + other, inner, inner),
        st.builds(lambda one, other: f"{one}|{other}", inner, inner),
    ),
    max_leaves=6,
)
EBNF = st.builds(
    lambda one, other: f"root ::= {one}\na ::= {other}\n",
    *[
        st.recursive(
            st.sampled_from(['"x"', "[a-z]", "a", "root", '""', "[^a]", "none", "(", '"é\\n"']),
            lambda inner: st.one_of(
                st.builds(
                    lambda text, count: f"({text}){count}",
                    inner,
                    st.sampled_from(["*", "+", "?", "{0,20}", "{2}", "{50}", "{0,9999}"]),
                ),
                st.builds(lambda one, other: f"{one} {other}", inner, inner),
                st.builds(lambda one, other: f"{one} | {other}", inner, inner),
            ),
            max_leaves=5,
        )
    ]
    * 2,
)
EXPRESSIONS_SENT = st.one_of(
    REGEXES.map(lambda text: {"regex": text}),
    EBNF.map(lambda text: {"grammar": text}),
    st.lists(st.text(max_size=5), max_size=5).map(lambda texts: {"choice": texts}),
    st.builds(
        lambda name, value: {name: value},
        st.sampled_from(["json", "regex", "choice", "grammar", "json_object", "structural_tag"]),
        ODD,
    ),
)


def request(form: str, schema: Any) -> tuple[str, dict[str, Any]]:
    """A path and a body that has the answer obey a schema."""
    chat = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": TOKENS,
        "temperature": 1,
        "logit_bias": NO_SPACES,
    }
    response = {"input": PROMPT, "max_output_tokens": TOKENS, "store": False, "temperature": 1}
    strict = {"strict": True} if "strict" in form else {}
    function = {"name": "f", "parameters": schema, **strict}
    more: dict[str, Any]
    match form.removeprefix("strict "):
        case "format":
            shape = {"name": "n", "schema": schema, **strict}
            more = {"response_format": {"type": "json_schema", "json_schema": shape}}
        case "tool":
            more = {
                "tools": [{"type": "function", "function": function}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            }
        case "response":
            text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
            return "/v1/responses", {**response, "text": text}
        case "response tool":
            tool = {"type": "function", **function, "strict": True}
            return "/v1/responses", {**response, "tools": [tool], "tool_choice": "required"}
        case _:
            more = {"structured_outputs": {"json": schema}}
    return "/v1/chat/completions", {**chat, **more}


def written(answer: dict[str, Any]) -> list[str]:
    """What a whole answer has of text or arguments; nothing if it was cut off."""
    if "choices" in answer:
        (choice,) = answer["choices"]
        if choice["finish_reason"] not in ("stop", "tool_calls"):
            return []
        calls = choice["message"].get("tool_calls") or []
        return [call["function"]["arguments"] for call in calls] or [choice["message"]["content"]]
    if answer["status"] != "completed":
        return []
    found = [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
    for item in answer["output"]:
        found += [part["text"] for part in item.get("content") or [] if "text" in part]
    return found


class Asked:
    """Asks a service, and counts what it answered."""

    def __init__(self, service: Running) -> None:
        self._service = service
        self.seen: dict[int, int] = {}

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, or None for a refusal. After it, a plain request is answered, too."""
        sent = self._service.http.post(
            path, json={"model": self._service.model, **body}, timeout=WITHIN_S
        )
        self.seen[sent.status_code] = self.seen.get(sent.status_code, 0) + 1
        plain = {"model": self._service.model, "prompt": "Hello", "max_tokens": 1}
        after = self._service.http.post("/v1/completions", json=plain, timeout=WITHIN_S)
        assert after.status_code == 200, after.text
        if sent.status_code == 200:
            answer: dict[str, Any] = sent.json()
            return answer
        assert sent.status_code == 400, (body, sent.text)
        error = sent.json()["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
        assert sent.headers["x-should-retry"] == "false"
        return None


def engines(service: Running) -> set[str]:
    """The replicas of engines that Serve has; another takes the place of one that dies."""
    return {one["replica_id"] for one in replicas(service.service.dashboard_url, "Worker")}


def told(schema: Any, text: str) -> None:
    """The text obeys the schema, if that is one."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except (jsonschema.SchemaError, re.error):
        return
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


bounded = settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def test_a_json_schema_is_obeyed_or_refused(service: Running) -> None:
    before, asked = engines(service), Asked(service)

    @settings(bounded, max_examples=SCHEMAS)
    @given(schema=JSON_SCHEMAS, form=st.sampled_from(FORMS))
    def ask(schema: Any, form: str) -> None:
        answer = asked.answer(*request(form, schema))
        for text in written(answer) if answer and isinstance(schema, dict) else ():
            if form != "tool":  # not strict: what vLLM makes of it
                try:
                    told(schema, text)
                except (ValueError, jsonschema.ValidationError) as error:
                    pytest.fail(f"{form}: {json.dumps(schema)}: {answer}: {error!r:.200}")

    ask()
    assert asked.seen.get(200, 0) >= SCHEMAS // 10, asked.seen
    assert engines(service) == before


def test_so_is_an_expression(service: Running) -> None:
    before, asked = engines(service), Asked(service)

    @settings(bounded, max_examples=EXPRESSIONS)
    @given(shape=EXPRESSIONS_SENT)
    def ask(shape: dict[str, Any]) -> None:
        messages = [{"role": "user", "content": PROMPT}]
        body = {"messages": messages, "max_tokens": TOKENS, "temperature": 1}
        answer = asked.answer("/v1/chat/completions", {**body, "structured_outputs": shape})
        for text in written(answer) if answer else ():
            if shape.get("choice"):
                assert text in shape["choice"]
            elif isinstance(shape.get("regex"), str) and shape["regex"]:
                assert re.fullmatch(shape["regex"], text, re.ASCII | re.DOTALL), (shape, text)

    ask()
    assert asked.seen.get(200, 0) >= EXPRESSIONS // 10, asked.seen
    assert engines(service) == before
