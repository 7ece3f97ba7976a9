"""`/docs`, a page to read and try the API, and `/openapi.json`.
Owns the page's script and style sheet.

The service serves all of it, so that it works without a network and without an API key; requests
from the page use the key that the reader enters. The files of Swagger UI come from a package, none
of whose code runs.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from serve_app import __version__
from serve_app.ingress.validation.fields import PATHS, documented

_PACKAGE = find_spec("fastapi_offline")
assert _PACKAGE is not None, "fastapi-offline is not installed"
_FILES = Path(_PACKAGE.origin or "").parent / "static"
_ASSETS = {
    "/docs/swagger-ui-bundle.js": "text/javascript",
    "/docs/swagger-ui.css": "text/css",
    "/docs/favicon.png": "image/png",
}
OPEN_PATHS = ("/docs", "/openapi.json", *_ASSETS)
"""Paths that need no API key."""


def add_docs(app: FastAPI, model: str) -> None:
    """Add the page and its description to an application created without them (`docs_url=None,
    openapi_url=None`).
    """
    described: list[Response] = []

    async def page(request: Request) -> Response:
        # All relative, because a proxy may put a prefix before our paths.
        here = "../" if request.scope.get("raw_path", b"").endswith(b"/") else ""
        shown = {"persistAuthorization": True, "defaultModelsExpandDepth": -1}
        return get_swagger_ui_html(
            openapi_url=f"{here}openapi.json",
            title="hermes-serve",
            swagger_js_url=f"{here}docs/swagger-ui-bundle.js",
            swagger_css_url=f"{here}docs/swagger-ui.css",
            swagger_favicon_url=f"{here}docs/favicon.png",
            swagger_ui_parameters=shown,
        )

    async def asset(request: Request) -> Response:
        path = request.scope["path"]
        headers = {"cache-control": "public, max-age=86400"}
        return FileResponse(_FILES / Path(path).name, media_type=_ASSETS[path], headers=headers)

    async def openapi(_: Request) -> Response:
        if not described:  # all readers have the same bytes
            described.append(JSONResponse(description(app, model)))
        return described[0]

    app.router.routes.append(Route("/docs", page))
    app.router.routes.append(Route("/openapi.json", openapi))
    app.router.routes.extend(Route(path, asset) for path in _ASSETS)


_KEYLESS = ("/healthz", "/readyz")
_COMPONENTS = json.loads(Path(__file__).with_name("openapi.json").read_text())
"""The parts of the description that all inference paths share."""


def description(app: FastAPI, model: str) -> dict[str, Any]:
    """OpenAPI's description of the application's own routes and of the paths that its plain ASGI
    endpoint serves.
    """
    document = get_openapi(
        title="hermes-serve",
        version=__version__,
        routes=app.routes,
        description=f"OpenAI's API for the model `{model}`. If the service requires an API key, "
        "enter it under *Authorize*.",
    )
    components = document.setdefault("components", {})
    for kind, parts in _COMPONENTS.items():
        components.setdefault(kind, {}).update(parts)
    document["security"] = [{"key": []}]
    for path in _KEYLESS:
        document["paths"][path]["get"]["security"] = []
    inference = {path: {"post": _operation(path, model)} for path in PATHS}
    document["paths"] = {**inference, **document["paths"]}
    return document


def _operation(path: str, model: str) -> dict[str, Any]:
    example = {"model": model, **PATHS[path]["example"]}
    body = {"application/json": {"schema": documented(path), "example": example}}
    return {
        "tags": ["inference"],
        "summary": PATHS[path]["summary"],
        "operationId": path.strip("/").replace("/", "_"),
        "parameters": [_part("parameters", name) for name in _COMPONENTS["parameters"]],
        "requestBody": {"required": True, "content": body},
        "responses": {name: _part("responses", name) for name in _COMPONENTS["responses"]},
    }


def _part(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}
