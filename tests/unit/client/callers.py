"""Both transports behind one interface: each test runs with the blocking and the asynchronous
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx
import openai

from serve_app.client import AsyncReconnectingTransport, ReconnectingTransport
from tests.unit.client.service import BODY, CHAT, ID


@dataclass
class Got:
    """What a client with plain httpx received."""

    status: int
    headers: httpx.Headers
    chunks: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


class Scripted(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Gives these answers in turn, without a network and its times: for each request, the chunks of
    a stream and the error that ends it, or the error alone.
    """

    def __init__(self, *answers: list[bytes | Exception] | Exception) -> None:
        self._answers = iter(answers)
        self.asked: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        headers = {"content-type": "text/event-stream", "x-request-id": ID}
        headers["transfer-encoding"] = "chunked"
        return httpx.Response(200, headers=headers, stream=_Parts(answer))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


class _Parts(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes | Exception]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part


def _asked(service: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"method": "POST", "url": service + CHAT, "content": BODY} | request


def _sdk(url: str, http: httpx.Client | httpx.AsyncClient) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": "k", "http_client": http, "max_retries": 0}


class Blocking:
    """The transport for `httpx.Client`."""

    @staticmethod
    def fetch(
        service: str,
        give_up_after_s: float = 10.0,
        timeout: Any = 10.0,
        inner: Any = None,
        most: int | None = None,
        **request: Any,
    ) -> Got:
        """Send a request and read its answer as a stream. `most`: close it after so many chunks."""
        transport = ReconnectingTransport(give_up_after_s=give_up_after_s, transport=inner)
        with (
            httpx.Client(transport=transport, timeout=timeout) as http,
            http.stream(**_asked(service, request)) as response,
        ):
            chunks = list(islice(response.iter_raw(), most))
            return Got(response.status_code, response.headers, chunks)

    @staticmethod
    def once(*parts: bytes) -> Iterator[bytes]:
        """A request body that can be read only once."""
        yield from parts

    @staticmethod
    def chat(urls: list[str], **request: Any) -> list[Any]:
        """The SDK's result for the answer of each of these services."""
        found: list[Any] = []
        with httpx.Client(transport=ReconnectingTransport(give_up_after_s=10.0)) as http:
            for url in urls:
                completions = openai.OpenAI(**_sdk(url, http)).chat.completions
                result = completions.create(model="m", messages=[], **request)
                streamed = request.get("stream")
                found.append([one.model_dump() for one in (result if streamed else [result])])
        return found


class Asyncio:
    """The transport for `httpx.AsyncClient`."""

    @staticmethod
    def fetch(
        service: str,
        give_up_after_s: float = 10.0,
        timeout: Any = 10.0,
        inner: Any = None,
        most: int | None = None,
        **request: Any,
    ) -> Got:
        async def main() -> Got:
            transport = AsyncReconnectingTransport(give_up_after_s=give_up_after_s, transport=inner)
            async with (
                httpx.AsyncClient(transport=transport, timeout=timeout) as http,
                http.stream(**_asked(service, request)) as response,
            ):
                chunks: list[bytes] = []
                async for part in response.aiter_raw():
                    chunks.append(part)
                    if len(chunks) == most:
                        break
                return Got(response.status_code, response.headers, chunks)

        return asyncio.run(main())

    @staticmethod
    async def once(*parts: bytes) -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    @staticmethod
    def chat(urls: list[str], **request: Any) -> list[Any]:
        async def main() -> list[Any]:
            found: list[Any] = []
            transport = AsyncReconnectingTransport(give_up_after_s=10.0)
            async with httpx.AsyncClient(transport=transport) as http:
                for url in urls:
                    completions = openai.AsyncOpenAI(**_sdk(url, http)).chat.completions
                    result = await completions.create(model="m", messages=[], **request)
                    parts = [one async for one in result] if request.get("stream") else [result]
                    found.append([one.model_dump() for one in parts])
            return found

        return asyncio.run(main())


Kind = type[Blocking] | type[Asyncio]
