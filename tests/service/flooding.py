"""Sends as much as one tenant may: `python -m tests.service.flooding PHASE URL KEY MODEL NUMBER`,
as a separate process. Prints the answers' counts as JSON: `{name: {status: count}}`.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
HELD: list[dict[str, Any]] = [{"role": "user", "content": "HELD"}]
"""A fault of the services' simulated engine: such a request stays until it is cancelled."""
BODY_BYTES = 16 << 20
STORED_BYTES = 6 << 20
SEQUENCES = 10
TEXT_WORDS, TEXT_TOKENS = 300, 2_000
ASKED = "asked"
READERS = 1_100
"""More than both ingresses together let one tenant hold."""


class Flood:
    """One tenant's requests, and what came of them."""

    def __init__(self, http: httpx.AsyncClient, key: str, model: str) -> None:
        self._http = http
        self._key = key
        self._model = model
        self._over = asyncio.Event()
        self.answers: dict[str, Counter[str]] = {}

    def _count(self, name: str, answer: httpx.Response) -> None:
        told = f"{answer.status_code} {answer.headers.get('x-hermes-reason', '')}".strip()
        self.answers.setdefault(name, Counter())[told] += 1

    async def cancel(self, pairs: int, at_once: int = 32) -> None:
        """Send requests that never end, and cancel each as soon as it is accepted; every other is
        detached.
        """
        numbers = iter(range(pairs))

        async def one_after_another() -> None:
            for number in numbers:
                body = {"model": self._model, "messages": HELD, "max_tokens": 5, "stream": True}
                headers = {"prefer": "respond-async"} if number % 2 else {}
                async with self._http.stream("POST", CHAT, json=body, headers=headers) as posted:
                    self._count("posted", posted)
                    request_id = posted.headers["x-request-id"]
                    ended = await self._http.delete(f"/v1/requests/{request_id}")
                state = ended.json().get("state", "")
                self.answers.setdefault("deleted", Counter())[f"{ended.status_code} {state}"] += 1

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))

    async def largest(self, seconds: float) -> None:
        """Send the largest requests of each kind that the service accepts, for so long."""
        asyncio.get_running_loop().call_later(seconds, self._over.set)
        many = {"n": SEQUENCES, "max_tokens": 300, "ignore_eos": True, "messages": HELLO}
        probable = {**many, "logprobs": True, "top_logprobs": 20}
        prompts = {"prompt": ["Hello " * 300] * SEQUENCES, "prompt_logprobs": 20, "max_tokens": 16}
        large = [{"role": "user", "content": "x" * (BODY_BYTES - 4_096)}]
        kinds: list[tuple[str, int, str, dict[str, Any]]] = [
            ("answers, streamed", 3, CHAT, {**probable, "stream": True}),
            ("answers, whole", 3, CHAT, probable),
            ("prompts", 2, COMPLETIONS, prompts),
            ("a large body", 6, CHAT, {"messages": large, "max_tokens": 1}),
        ]
        told = await self._http.post(CHAT, json={"model": self._model, **probable, "stream": True})
        self._count("an answer to read", told)
        await asyncio.gather(
            *(
                self._again(name, path, json.dumps({"model": self._model, **fields}).encode())
                for name, at_once, path, fields in kinds
                for _ in range(at_once)
            ),
            self._readers(f"/v1/requests/{told.headers['x-request-id']}/events"),
        )

    async def embeddings(self, seconds: float) -> None:
        """Embed as many and as long texts as one request may have, for so long."""
        asyncio.get_running_loop().call_later(seconds, self._over.set)
        kinds = {
            "texts": ["Hello " * TEXT_WORDS] * SEQUENCES,
            "token ids": [[7] * TEXT_TOKENS] * SEQUENCES,
            "a large body": "x" * (BODY_BYTES - 4_096),
        }
        await asyncio.gather(
            *(
                self._again(name, EMBEDDINGS, json.dumps({"model": self._model, **fields}).encode())
                for name, texts in kinds.items()
                for fields in ({"input": texts}, {"input": texts, "encoding_format": "base64"})
                for _ in range(4)
            )
        )

    async def unread(self, seconds: float) -> None:
        """Ask for a long stored input on many connections, and read none of it, for so long after
        the line `ASKED`.
        """
        asked = {"model": self._model, "input": "x" * STORED_BYTES, "background": True}
        told = await self._http.post(RESPONSES, json=asked)
        self._count("an input to read", told)
        await self._readers(f"{RESPONSES}/{told.json()['id']}/input_items", seconds)

    async def _again(self, name: str, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        while not self._over.is_set():
            answer = await self._http.post(path, content=body, headers=headers)
            self._count(name, answer)
            if answer.status_code == 429:  # an obedient client; the test has others
                await self._pause(int(answer.headers["retry-after"]))

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return

    async def _readers(self, path: str, seconds: float | None = None) -> None:
        """Ask for something long on many connections, and read no more than how it begins."""
        address = urlsplit(str(self._http.base_url))
        head = f"GET {path} HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {self._key}"
        writers, loop = [], asyncio.get_running_loop()
        for _ in range(READERS):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.setblocking(False)
            await loop.sock_connect(connection, (address.hostname, address.port))
            reader, writer = await asyncio.open_connection(sock=connection, limit=1_024)
            writer.write(f"{head}\r\n\r\n".encode())
            status = (await reader.readline()).split()[1].decode()
            self.answers.setdefault("a reader that reads nothing", Counter())[status] += 1
            writers.append(writer)
        if seconds is not None:
            print(ASKED, flush=True)
            loop.call_later(seconds, self._over.set)
        await self._over.wait()
        for writer in writers:
            writer.close()


async def main(phase: str, url: str, key: str, model: str, number: str) -> None:
    """Run one phase."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        flood = Flood(http, key, model)
        phases: dict[str, Callable[[int], Awaitable[None]]] = {
            "cancel": flood.cancel,
            "largest": flood.largest,
            "embeddings": flood.embeddings,
            "unread": flood.unread,
        }
        await phases[phase](int(number))
        print(json.dumps(flood.answers), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:6]))
