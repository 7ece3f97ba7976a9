"""`/docs`: a page to read and try the API, and what it shows, `/openapi.json`. Owns the page's script and style sheet.

All of it is served by the service itself, so that it works without a network, and without a key: what it sends to the
API has the key that the reader enters. Swagger UI comes from a package that carries its files; nothing of that is run.
Where the package is missing, a page that needs the network is better than a service that does not start.
"""

from __future__ import annotations

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
from serve_app.ingress.validation import INFERENCE_PATHS, schema
from serve_app.scheduling.order import CLASSES

_PACKAGE = find_spec("fastapi_offline")
_FILES = Path(_PACKAGE.origin or "").parent / "static" if _PACKAGE else None
_ASSETS = {
    "/docs/swagger-ui-bundle.js": "text/javascript",
    "/docs/swagger-ui.css": "text/css",
    "/docs/favicon.png": "image/png",
}
OPEN_PATHS = ("/docs", "/openapi.json", *_ASSETS)
"""What needs no key."""
_KEYLESS = ("/healthz", "/readyz")

_CHAT = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
# Of each path: what it does, a body to try, and what its parser cannot say of it.
_PAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": ("An answer to a conversation", {"messages": _CHAT, "max_tokens": 64, "stream": False}, {}),
    "/v1/completions": (
        "The continuation of a prompt",
        {"prompt": "A lighthouse", "max_tokens": 64, "stream": False},
        {"prompt": {"description": "a text, token ids, or a list of either"}},
    ),
    "/v1/responses": (
        "An answer in the shape of OpenAI's Responses",
        {"input": "Tell me a story about a lighthouse.", "max_output_tokens": 64, "stream": False},
        {},
    ),
    "/v1/embeddings": (
        "Embeddings, where the model makes them",
        {"input": "A lighthouse"},
        {"input": {"description": "a text, token ids, or a list of either"}},
    ),
    "/tokenize": (
        "A prompt's or a conversation's token ids",
        {"prompt": "A lighthouse"},
        {"prompt": {"type": "string"}, "messages": {"type": "array", "items": {"type": "object"}}},
    ),
    "/detokenize": (
        "The text of token ids", {"tokens": [1, 2, 3]}, {"tokens": {"type": "array", "items": {"type": "integer"}}},
    ),
}  # fmt: skip
_HEADERS = {
    "x-session-id": ("whose requests one replica's cache should see", {"type": "string"}),
    "x-hermes-class": ("which waiting line", {"type": "string", "enum": list(CLASSES)}),
    "x-request-timeout-seconds": ("after which it is given up", {"type": "number", "exclusiveMinimum": 0}),
    "Idempotency-Key": ("a POST with the key of an earlier one is that request", {"type": "string"}),
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string", "description": "what is wrong, and what to do"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"], "description": "one word of a closed set"},
            },
        }
    },
}


def add_docs(app: FastAPI, model: str) -> None:
    """The page and its description on an application that was made without them (`docs_url=None, openapi_url=None`)."""
    described: dict[str, Any] = {}

    async def page(_: Request) -> Response:
        own: dict[str, Any] = {  # relative, all of them: whatever a proxy puts before our paths
            "swagger_js_url": "docs/swagger-ui-bundle.js",
            "swagger_css_url": "docs/swagger-ui.css",
            "swagger_favicon_url": "docs/favicon.png",
        }
        shown = {"persistAuthorization": True, "defaultModelsExpandDepth": -1}
        return get_swagger_ui_html(
            openapi_url="openapi.json", title="hermes-serve", swagger_ui_parameters=shown, **(own if _FILES else {})
        )

    async def asset(request: Request) -> Response:
        path = request.scope["path"]
        assert _FILES is not None
        headers = {"cache-control": "public, max-age=86400"}
        return FileResponse(_FILES / Path(path).name, media_type=_ASSETS[path], headers=headers)

    async def openapi(_: Request) -> Response:
        if not described:
            described.update(description(app, model))
        return JSONResponse(described)

    app.router.routes.append(Route("/docs", page))
    app.router.routes.append(Route("/openapi.json", openapi))
    if _FILES is not None:
        app.router.routes.extend(Route(path, asset) for path in _ASSETS)


def description(app: FastAPI, model: str) -> dict[str, Any]:
    """OpenAPI's, of the application's own routes and of those that its plain endpoint serves."""
    document = get_openapi(
        title="hermes-serve",
        version=__version__,
        routes=app.routes,
        description=f"OpenAI's API for the model `{model}`. With a key, if the service wants one: *Authorize*.",
    )
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "an API key"}}
    components.setdefault("schemas", {})["Error"] = _ERROR
    document["security"] = [{"key": []}]
    for path in _KEYLESS:
        document["paths"][path]["get"]["security"] = []
    inference = {path: {"post": _operation(path, model, components["schemas"])} for path in INFERENCE_PATHS}
    document["paths"] = {**inference, **document["paths"]}
    return document


def _operation(path: str, model: str, schemas: dict[str, Any]) -> dict[str, Any]:
    summary, example, more = _PAGES[path]
    body = schema(path)
    schemas.update(body.pop("$defs", {}))
    body["properties"] = {**body["properties"], **more}
    body["required"] = ["model", *(name for name in body.get("required", []) if name != "model")]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in example:
        events = "with `stream`: server-sent events, each with an id"
        answer["text/event-stream"] = {"schema": {"type": "string", "description": events}}
    return {
        "tags": ["inference"],
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "parameters": [
            {"name": name, "in": "header", "description": about, "schema": kind}
            for name, (about, kind) in _HEADERS.items()
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "example": {"model": model, **example}}},
        },
        "responses": {
            "200": {"description": "as OpenAI's, by vLLM's own server", "content": answer},
            "4XX": {"description": "refused; `x-hermes-reason` says why in one word", "content": error},
            "5XX": {"description": "failed, or cannot be accepted now (`Retry-After`)", "content": error},
        },
    }
