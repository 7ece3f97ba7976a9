"""`/docs`, a page to read and try the API, and `/openapi.json`.
Owns the page's script and style sheet.

The service serves all of it, so that it works without a network and without an API key; requests
from the page use the key that the reader enters. The files of Swagger UI come from a package, none
of whose code runs.
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
from serve_app.ingress.validation.bodies import INFERENCE_PATHS, schema
from serve_app.policy.classes import PUBLIC_CLASSES

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

_CHAT = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
# For each path: what it does, a body to try, and what its parser cannot describe.
_PAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        "An answer to a conversation",
        {"messages": _CHAT, "max_tokens": 64, "stream": False},
        {},
    ),
    "/v1/completions": (
        "The continuation of a prompt",
        {"prompt": "A lighthouse", "max_tokens": 64, "stream": False},
        {"prompt": {"description": "a text, token ids, or a list of either"}},
    ),
    "/v1/responses": (
        "A response in OpenAI's Responses format",
        {"input": "Tell me a story about a lighthouse.", "max_output_tokens": 64, "stream": False},
        {},
    ),
    "/v1/responses/input_tokens": (
        "The number of tokens of a response's input",
        {"input": "Tell me a story about a lighthouse."},
        {},
    ),
    "/v1/embeddings": (
        "Embeddings, if the model supports them",
        {"input": "A lighthouse"},
        {"input": {"description": "a text, token ids, or a list of either"}},
    ),
    "/tokenize": (
        "A prompt's or a conversation's token ids",
        {"prompt": "A lighthouse"},
        {"prompt": {"type": "string"}, "messages": {"type": "array", "items": {"type": "object"}}},
    ),
    "/detokenize": (
        "The text of token ids",
        {"tokens": [1, 2, 3]},
        {"tokens": {"type": "array", "items": {"type": "integer"}}},
    ),
}
_HEADERS = {
    "x-session-id": (
        "requests with the same value go to the replica that holds their KV cache",
        {"type": "string"},
    ),
    "x-hermes-class": (
        "the queue in which the request waits",
        {"type": "string", "enum": list(PUBLIC_CLASSES)},
    ),
    "x-request-timeout-seconds": (
        "seconds after which the request expires",
        {"type": "number", "exclusiveMinimum": 0},
    ),
    "Prefer": (
        "`respond-async`: answered at once with 202; the answer is at its `Location`, in /response",
        {"type": "string"},
    ),
    "x-hermes-retention-seconds": (
        "how long the answer of such a request is kept after its end",
        {"type": "number", "exclusiveMinimum": 0},
    ),
    "Idempotency-Key": (
        "a repeated POST with the same key joins the earlier request",
        {"type": "string"},
    ),
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
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "an API key"}
    }
    components.setdefault("schemas", {})["Error"] = _ERROR
    document["security"] = [{"key": []}]
    for path in _KEYLESS:
        document["paths"][path]["get"]["security"] = []
    inference = {
        path: {"post": _operation(path, model, components["schemas"])} for path in INFERENCE_PATHS
    }
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
            "content": {
                "application/json": {"schema": body, "example": {"model": model, **example}}
            },
        },
        "responses": {
            "200": {"description": "as OpenAI's, by vLLM's own server", "content": answer},
            "202": {"description": "accepted; nobody waits for the answer (`Prefer`)"},
            "4XX": {
                "description": "refused; `x-hermes-reason` gives the reason in one word",
                "content": error,
            },
            "5XX": {
                "description": "failed, or cannot be accepted now (`Retry-After`)",
                "content": error,
            },
        },
    }
