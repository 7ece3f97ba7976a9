"""The service's public HTTP API, for commands. What it refuses becomes one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx
import typer

from serve_app.cli.console import USUAL, CommandFailed, in_one_line, running_service
from serve_app.cli.serve_api import host_of
from serve_app.client import EventSplitter, ReconnectingTransport

_KEYS = ("HERMES_API_KEY", "OPENAI_API_KEY")
_SILENCE = httpx.Timeout(60.0, connect=10.0)
"""A service is never silent for longer than its `ingress.heartbeat_s`."""


class ServiceApi:
    """A client of one service (`url`; if it is empty, the one that runs on this machine), with the
    API key of the environment. Use it in a `with`. What asks raises `CommandFailed` if the service
    does not answer, or refuses.
    """

    def __init__(self, url: str) -> None:
        service = None if url else running_service()
        self.url = _address(url or (service.url if service else USUAL))
        # CA certificates take 0.02 s to load; no redirect leads from HTTP to where they are needed.
        inner = httpx.HTTPTransport(verify=self.url.startswith("https:"))
        self._http = httpx.Client(
            base_url=self.url,
            headers=_authorization(),
            transport=ReconnectingTransport(transport=inner),
            timeout=_SILENCE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, method: str, path: str, **params: Any) -> dict[str, Any]:
        """The JSON object that the service answers; empty parameters are left out."""
        given = {name: value for name, value in params.items() if value not in ("", None, [])}
        return self._content(self._send(method, path, params=given))

    def post(self, path: str, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The JSON object that answers a JSON object. `key`: repeated, it is one request."""
        return self._content(self._send("POST", path, json=body, headers={"idempotency-key": key}))

    def upload(self, path: str, fields: Mapping[str, str], file: Path, key: str) -> dict[str, Any]:
        """The same for a form with a file."""
        with file.open("rb") as content:
            form = {"data": fields, "files": {"file": (file.name, content)}}
            headers = {"idempotency-key": key}
            return self._content(self._send("POST", path, headers=headers, **form))

    def download(self, path: str, to: Path) -> None:
        """Write what the service answers to a file, which is there once it is whole."""
        part = to.with_name(f"{to.name}.part")
        with self._failures(), self._http.stream("GET", path) as response:
            if not response.is_success:
                response.read()
                self._content(response)
            with part.open("wb") as written:
                for piece in response.iter_bytes():
                    written.write(piece)
        part.replace(to)

    def readiness(self) -> dict[str, Any]:
        """What `/readyz` says, ready or not."""
        response = self._send("GET", "/readyz")
        found = _object(response)
        return found if "ready" in found else self._content(response)

    def metrics(self) -> str | None:
        """The page `/metrics`; None if this API key does not open it."""
        response = self._send("GET", "/metrics")
        return response.text if response.is_success else None

    def events(self, request_id: str) -> Iterator[tuple[str, str]]:
        """Name and data of each event of an answer, over as many connections as it needs."""
        splitter = EventSplitter()
        path = f"{path_of(request_id)}/events"
        with self._failures(), self._http.stream("GET", path) as response:
            if response.status_code not in (200, 204):
                response.read()
                self._content(response)
            for chunk in response.iter_raw():
                yield from map(_named, splitter.feed(chunk))

    def _send(self, method: str, path: str, **what: Any) -> httpx.Response:
        with self._failures():
            return self._http.request(method, path, **what)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            why = in_one_line(str(error)) or type(error).__name__
            raise CommandFailed(f"{self.url} does not answer: {why}") from None

    def _content(self, response: httpx.Response) -> dict[str, Any]:
        found, status = _object(response), response.status_code
        if found and response.is_success:
            return found
        error = found.get("error")
        if not isinstance(error, dict):
            raise CommandFailed(
                f"{self.url} answers {status} and is no such service: give its address in --url "
                "or HERMES_URL"
            )
        fix = f" Give an API key in {_KEYS[0]}." if status == 401 else ""
        raise CommandFailed(in_one_line(str(error.get("message"))) + fix)


def _object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object in an answer; empty if there is none."""
    try:
        found = response.json()
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def path_of(request_id: str, below: str = "/v1/requests") -> str:
    """The path of a request, or of its dead letter; `typer.BadParameter` if none has such an id."""
    if not re.fullmatch(r"\w[\w.-]*", request_id):
        raise typer.BadParameter(f"no request has the id '{in_one_line(request_id)}'")
    return f"{below}/{quote(request_id, safe='')}"


def _address(url: str) -> str:
    """A URL as a person writes it: without its scheme, or with the `/v1` of OpenAI's clients."""
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    if not host_of(url):
        raise CommandFailed(f"'{in_one_line(url)}' is no address of a service: {USUAL} is one")
    if httpx.URL(url).userinfo:
        raise CommandFailed(f"an address holds no password; the API key belongs in {_KEYS[0]}")
    return url


def _authorization() -> dict[str, str]:
    for name in _KEYS:
        if key := os.environ.get(name, "").strip():
            if not re.fullmatch(r"[!-~]+", key):
                raise CommandFailed(f"{name} holds no API key")
            return {"authorization": f"Bearer {key}"}
    return {}


def _named(event: bytes) -> tuple[str, str]:
    fields = [line.partition(b":")[::2] for line in event.splitlines()]
    name = next((value.strip() for field, value in fields if field == b"event"), b"")
    data = b"\n".join(value.removeprefix(b" ") for field, value in fields if field == b"data")
    return name.decode(errors="replace"), data.decode(errors="replace")
