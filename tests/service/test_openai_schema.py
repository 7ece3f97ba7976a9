"""schemathesis: requests generated from OpenAI's own schema get no 5xx and no answer outside of it.

docs/compatibility-openai.md is made from the lists of vLLM's different answers that are used here.
"""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from scripts.local.environment import ROOT
from serve_app.ingress.validation.fields import is_known
from tests.service.support import Running

NAME = "openai_openapi_subset.json"
PAGE = (ROOT / "docs" / "compatibility-openai.md").read_text()
DIFFERENCES = re.findall(r"^\| `(\w+)\.(\S+)` \|", PAGE, re.MULTILINE)
"""What vLLM sends as null where OpenAI's schema has it left out: schema and place in it."""
LEFT_OUT = re.findall(r"^- `(\w+)\.(\S+)\.(\w+)`$", PAGE, re.MULTILINE)
"""What vLLM leaves out where the schema requires it (as null)."""
TOKENS = 12
CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]
EXAMPLES, MORE_EXAMPLES = 25, 120
WHOLE_STREAMS = schemathesis.Config.from_dict({"max-stream-events": 100_000})
"""schemathesis leaves a stream after its twentieth event, unless it is told otherwise."""


def folder() -> Path:
    """`traces` below `$HERMES_DATA`."""
    return Path(os.environ.get("HERMES_DATA", ROOT / ".hermes" / "data")) / "traces"


@pytest.fixture(scope="module")
def openapi() -> dict[str, Any]:
    """OpenAI's schema, as published."""
    path = folder() / NAME
    if not path.exists():
        message = f"{path} is absent: scripts/fetch-data brings it (or set HERMES_DATA)"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def holder(document: dict[str, Any], schema: str, place: str) -> tuple[dict[str, Any], str]:
    """The `properties` that contain a place of a schema, and its name there."""
    *parents, key = place.split(".")
    node = document["components"]["schemas"][schema]
    for parent in parents:
        node = node["properties"][parent.removesuffix("[]")]["items"]
    return node["properties"], key


def adapted(openapi: dict[str, Any], model: str) -> dict[str, Any]:
    """The three operations, with our model's name and the known differences."""
    document = copy.deepcopy(openapi)
    schemas = document["components"]["schemas"]
    ours = {"type": "string", "enum": [model]}
    schemas["ModelIdsShared"] = ours
    schemas["CreateCompletionRequest"]["properties"]["model"] = ours
    for schema, place, name in LEFT_OUT:
        owner, key = holder(document, schema, place)
        for kind in owner[key].get("anyOf", [owner[key]]):
            kind["required"] = [
                required for required in kind.get("required", []) if required != name
            ]
    for schema, place in DIFFERENCES:
        owner, key = holder(document, schema, place)
        owner[key] = {"anyOf": [owner[key], {"type": "null"}]}
    return document


def shortened(path: str, body: Any) -> Any:
    """The same request with a short answer, so that many can be asked, and without the fields that
    schemathesis has made up.
    """
    if not isinstance(body, dict):
        return body
    short = {**body}
    for key in ("max_tokens", "max_completion_tokens"):
        if not isinstance(short.get(key), int) or short[key] > TOKENS:
            short[key] = TOKENS
    for key in ("n", "best_of"):
        if isinstance(short.get(key), int | float):
            short[key] = min(short[key], 2)
    return {name: value for name, value in short.items() if is_known(f"/v1{path}", name)}


def check_error(document: dict[str, Any], answer: Any) -> None:
    """OpenAI's error shape."""
    schema = {"$ref": "#/components/schemas/ErrorResponse", "components": document["components"]}
    error = json.loads(answer.content)
    assert answer.headers["x-hermes-reason"]
    jsonschema.validate(error, schema)


@pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(MORE_EXAMPLES, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/chat/completions"), ("POST", "/completions")]
)
@pytest.mark.timeout(1800)
def test_no_request_gets_a_5xx_or_an_answer_outside_the_schema(
    service: Running, openapi: dict[str, Any], method: str, path: str, examples: int
) -> None:
    document = adapted(openapi, service.model)
    operation = schemathesis.openapi.from_dict(document, config=WHOLE_STREAMS)[path][method]
    seen: dict[int, int] = {}

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        case.body = shortened(path, case.body)
        answer = case.call(base_url=f"{service.url}/v1", timeout=240)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        if answer.status_code == 200 and case.body.get("stream"):
            case.validate_response(answer, checks=[not_a_server_error])
            check_stream(document, path, answer.content.decode())
        else:
            case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400:
            check_error(document, answer)

    ask()
    assert seen.get(200, 0) >= examples // 20, f"too few were understood to tell: {seen}"


def check_stream(document: dict[str, Any], path: str, body: str) -> None:
    """Every chunk of a stream has the schema's shape."""
    name = "CreateChatCompletionStreamResponse" if "chat" in path else "CreateCompletionResponse"
    blocks = body.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2].endswith("data: [DONE]")
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    for block in blocks[:-2]:
        chunk = json.loads(block.split("data: ", 1)[1])
        assert "error" not in chunk, chunk
        jsonschema.validate(chunk, schema)


def test_the_list_of_models_is_as_the_schema_says(
    service: Running, openapi: dict[str, Any]
) -> None:
    operation = schemathesis.openapi.from_dict(openapi)["/models"]["GET"]
    case = operation.Case()
    answer = case.call(base_url=f"{service.url}/v1", timeout=240)
    assert answer.status_code == 200
    case.validate_response(answer, checks=CHECKS)


def test_the_known_differences_are_of_the_schema(openapi: dict[str, Any]) -> None:
    for schema, place in DIFFERENCES:
        properties, key = holder(openapi, schema, place)
        assert key in properties
