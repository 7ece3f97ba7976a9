"""schemathesis: requests generated from OpenAI's own schema get no 5xx and no answer outside of it.

docs/evidence/openai-schema.md has the lists of vLLM's different answers that are used here.
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
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from serve_app.ingress.validation.fields import INFERENCE_PATHS, TABLE
from serve_app.local.environment import ROOT
from tests.service.support import Running
from tests.tables import Failures

NAME = "openai_openapi_subset.json"
PAGE = (ROOT / "docs" / "evidence" / "openai-schema.md").read_text()
DIFFERENCES = re.findall(r"^\| `(\w+)\.(\S+)` \|", PAGE, re.MULTILINE)
"""What vLLM sends as null where OpenAI's schema has it left out: schema and place in it."""
LEFT_OUT = re.findall(r"^- `(\w+)\.(\S+)\.(\w+)`$", PAGE, re.MULTILINE)
"""What vLLM leaves out where the schema requires it (as null)."""
TOKENS = 12
CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]
EXAMPLES, MORE_EXAMPLES = 25, 120
OF_A_ROUTE = 40
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
    schemas["ModelIdsShared"] = schemas["ModelIdsResponses"] = ours
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
    lengths = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    for key in lengths[2:] if "responses" in path else lengths[:2]:
        if not isinstance(short.get(key), int) or short[key] > TOKENS:
            short[key] = TOKENS
    for key in ("n", "best_of"):
        if isinstance(short.get(key), int | float):
            short[key] = min(short[key], 2)
    path = path if path in INFERENCE_PATHS else f"/v1{path}"
    return {name: value for name, value in short.items() if name in TABLE[path]["properties"]}


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
    assert seen.get(200, 0) >= max(1, examples // 40), f"too few were understood to tell: {seen}"


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


def ids_of(service: Running) -> dict[str, list[str]]:
    """Of a stored response and chat completion, and others, by the name that a path has for it."""
    kept: dict[str, Any] = {"model": service.model, "input": "Hello", "max_output_tokens": 4}
    create = service.sdk.responses.create
    responses = [create(**kept).id, create(**kept, background=True).id]
    chat = service.ask("Hello", 4, store=True)
    requests = [chat.headers["x-request-id"], responses[0].removeprefix("resp_")]
    none = ["none", "req_" + "0" * 32, "%00", "é", "a" * 3_000]
    return {
        "response_id": [*responses, *none],
        "chat_id": [chat.json()["id"], *none],
        "request_id": [*requests, *none],
        "model_id": [service.model, *none],
        "file_id": [service.sdk.files.create(file=b"{}", purpose="user_data").id, *none],
    }


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_route_gets_a_5xx(service: Running, openapi: dict[str, Any]) -> None:
    """OpenAI's responses, and all that the service describes of itself."""
    own = service.http.get("/openapi.json").json()
    theirs = schemathesis.openapi.from_dict(adapted(openapi, service.model))
    ours = schemathesis.openapi.from_dict(own)
    operations = [theirs["/responses"]["POST"]]
    operations += [
        ours[path][method] for path, methods in own["paths"].items() for method in methods
    ]
    ids = ids_of(service)
    with Failures() as failures:
        for operation in operations:
            with failures.of(operation.method, operation.path):
                check_route(service, openapi, operation, ids)
    assert service.ask("Hello", 4).status_code == 200


def check_route(
    service: Running, document: dict[str, Any], operation: Any, ids: dict[str, list[str]]
) -> None:
    base = "/v1" if operation.path == "/responses" else ""
    path = base + operation.path
    previous = st.sampled_from([None, *ids["response_id"]])

    @settings(
        max_examples=OF_A_ROUTE, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(case=operation.as_strategy(), data=st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        for name in case.path_parameters or {}:
            case.path_parameters[name] = data.draw(st.sampled_from(ids[name]))
        if path in INFERENCE_PATHS and isinstance(case.body, dict):
            case.body = shortened(path.removeprefix("/v1"), case.body)
            if case.body.get("previous_response_id"):
                case.body["previous_response_id"] = data.draw(previous)
        # A deadline that has passed is rightly a 504.
        case.headers.pop("x-request-timeout-seconds", None)
        answer = case.call(base_url=f"{service.url}{base}", timeout=240)
        case.validate_response(answer, checks=[not_a_server_error])
        if answer.status_code >= 400:
            check_error(document, answer)
            assert answer.headers["x-should-retry"] == ["false"]

    ask()


def test_the_list_of_models_is_as_the_schema_says(
    service: Running, openapi: dict[str, Any]
) -> None:
    operation = schemathesis.openapi.from_dict(openapi)["/models"]["GET"]
    case = operation.Case()
    answer = case.call(base_url=f"{service.url}/v1", timeout=240)
    assert answer.status_code == 200
    case.validate_response(answer, checks=CHECKS)
