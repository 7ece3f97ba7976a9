"""`/docs` is complete, and loads nothing from elsewhere."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
from fastapi import FastAPI
from fastapi.openapi.models import OpenAPI

from serve_app.ingress import docs_page
from serve_app.ingress.validation.bodies import parse
from serve_app.ingress.validation.fields import INFERENCE_PATHS
from serve_app.policy.classes import PUBLIC_CLASSES


async def get(*paths: str) -> list[httpx.Response]:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for path in ("/healthz", "/readyz"):
        app.get(path)(lambda: None)
    docs_page.add_docs(app, "m")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        return [await http.get(path) for path in paths]


async def test_everything_that_the_page_loads_is_served_here_and_open() -> None:
    (page,) = await get("/docs")
    assert "://" not in page.text, "an address elsewhere"
    loaded = re.findall(r'(?:href|src)="([^"]+)"|url: \'([^\']+)\'', page.text)
    paths = [f"/{href or url}" for href, url in loaded]
    assert len(paths) == 4
    assert set(paths) | {"/docs"} == set(docs_page.OPEN_PATHS)
    for answer in await get(*paths):
        assert answer.status_code == 200
        assert len(answer.content) > 1000


async def test_the_description_has_every_inference_path_with_a_body_that_passes_its_check() -> None:
    (answer,) = await get("/openapi.json")
    document: dict[str, Any] = answer.json()
    OpenAPI.model_validate(document)
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', answer.text))
    assert refs <= set(document["components"]["schemas"])
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{"key": []}]
    for path in INFERENCE_PATHS:
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        jsonschema.Draft202012Validator.check_schema(content["schema"])
        assert set(content["example"]) <= set(content["schema"]["properties"]), path
        assert parse(
            path, httpx.Request("POST", "http://here", json=content["example"]).content, "m"
        ), path


async def test_the_page_names_the_classes_that_a_client_may_choose() -> None:
    (answer,) = await get("/openapi.json")
    parameter = answer.json()["components"]["parameters"]["x-hermes-class"]
    assert parameter["schema"]["enum"] == list(PUBLIC_CLASSES)
