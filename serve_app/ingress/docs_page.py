"""`/docs`, a page to read and try the API, and `/openapi.json`, its content (`api_description`).
Owns the page's script and style sheet.

The service serves all of it, so that it works without a network and without an API key; requests
from the page use the key that the reader enters. The files of Swagger UI come from a package, none
of whose code runs. If the package is missing, the page loads them from the network instead of
failing at start.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from serve_app.ingress.api_description import description

_PACKAGE = find_spec("fastapi_offline")
_FILES = Path(_PACKAGE.origin or "").parent / "static" if _PACKAGE else None
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
    described: dict[str, Any] = {}

    async def page(request: Request) -> Response:
        # All relative, because a proxy may put a prefix before our paths.
        here = "../" if request.scope.get("raw_path", b"").endswith(b"/") else ""
        own: dict[str, Any] = {
            "swagger_js_url": f"{here}docs/swagger-ui-bundle.js",
            "swagger_css_url": f"{here}docs/swagger-ui.css",
            "swagger_favicon_url": f"{here}docs/favicon.png",
        }
        shown = {"persistAuthorization": True, "defaultModelsExpandDepth": -1}
        return get_swagger_ui_html(
            openapi_url=f"{here}openapi.json",
            title="hermes-serve",
            swagger_ui_parameters=shown,
            **(own if _FILES else {}),
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
