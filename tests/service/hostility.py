"""Sends what a malicious client would send: `python -m tests.service.hostility URL KEY MODEL
PHASE`, as a separate process.

Every flood is limited in number and time. Prints the answers' counts as JSON: `{name: {status:
count}}`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import httpx

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MIB = 1 << 20
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 2, **fields}


def _schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}


def bodies(model: str) -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body of each request that is meant to hurt; every one of them must be refused
    with 4xx.
    """

    def raw(text: str) -> bytes:
        return text.replace("MODEL", json.dumps(model)).encode()

    digits = "9" * 4_300
    yield (
        "a number of thousands of digits",
        CHAT,
        raw(
            f'{{"model": MODEL, "messages": [{{"role": "user", "content": "x"}}], "max_tokens": '
            f"{digits}}}"
        ),
    )
    yield (
        "a million wrong items",
        COMPLETIONS,
        raw(f'{{"model": MODEL, "prompt": [{"null," * 600_000}null]}}'),
    )
    yield "a long list", COMPLETIONS, raw(f'{{"model": MODEL, "prompt": [{"1," * 6_000_000}1]}}')
    yield "many small lists", CHAT, raw(f'{{"model": MODEL, "messages": [{"[]," * 4_000_000}[]]}}')
    yield "depth", CHAT, raw(f'{{"model": MODEL, "messages": {"[" * 500_000}{"]" * 500_000}}}')
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "stops": (CHAT, _chat(stop=["x"] * 1_000_000)),
        "answers times prompts": (
            COMPLETIONS,
            {"prompt": ["x"] * 1_000, "n": 128, "max_tokens": 1},
        ),
        "biases": (CHAT, _chat(logit_bias={str(number): 1 for number in range(2_000)})),
        "stop tokens": (CHAT, _chat(stop_token_ids=list(range(1_000)), min_tokens=1)),
        "log probabilities": (CHAT, _chat(logprobs=True, top_logprobs=100_000)),
        "a deep schema": (CHAT, _chat(response_format=_schema(90))),
        "a long expression": (CHAT, _chat(structured_outputs={"regex": "(a|b)*" * 100_000})),
        "a grammar": (
            CHAT,
            _chat(structured_outputs={"grammar": "root ::= " + '"a" | ' * 100_000 + '"b"'}),
        ),
        "best of many": (COMPLETIONS, {"prompt": "x", "best_of": 100_000, "max_tokens": 1}),
        "a template of its own": (
            CHAT,
            _chat(chat_template="{% for i in range(10**9) %}x{% endfor %}"),
        ),
        "an address inside": (
            CHAT,
            _chat(
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image_url",
                                "image_url": {"url": "http://169.254.169.254/latest/meta-data"},
                            }
                        ],
                    }
                ]
            ),
        ),
        "inputs": (EMBEDDINGS, {"input": ["x"] * 100_000}),
    }
    for name, (path, fields) in requests.items():
        yield name, path, json.dumps({"model": model, **fields}).encode()


class Hostile:
    """One tenant's floods on a service."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model
        self.answers: dict[str, Counter[str]] = {}

    def _count(self, name: str, answer: httpx.Response | None) -> None:
        told = (
            "broken"
            if answer is None
            else f"{answer.status_code} {answer.headers.get('x-hermes-reason', '')}"
        )
        self.answers.setdefault(name, Counter())[told.strip()] += 1

    async def _send(
        self, name: str, call: Callable[[], Awaitable[httpx.Response]]
    ) -> httpx.Response | None:
        try:
            answer = await call()
        except httpx.TransportError:
            self._count(name, None)
            return None
        self._count(name, answer)
        return answer

    async def bodies(self) -> None:
        """Send each body three times, two at a time."""
        gate = asyncio.Semaphore(2)

        async def send(name: str, path: str, body: bytes) -> None:
            async with gate:
                headers = {"content-type": "application/json"}
                await self._send(name, lambda: self._http.post(path, content=body, headers=headers))

        for name, path, body in bodies(self._model):
            await asyncio.gather(*(send(name, path, body) for _ in range(3)))

    async def readers_that_do_not_read(self, count: int = 200) -> None:
        """Open many readers of one long answer at once; each reads the head and nothing more."""
        body = {"model": self._model, "messages": HELLO, "max_tokens": 200, "ignore_eos": True}
        done = await self._send(
            "an answer", lambda: self._http.post(CHAT, json={**body, "stream": False})
        )
        assert done is not None
        url = f"/v1/requests/{done.headers['x-request-id']}/events"

        async def hold() -> None:
            try:
                async with self._http.stream("GET", url) as answer:
                    self._count("a reader that does not read", answer)
                    await asyncio.sleep(5)
            except httpx.TransportError:
                self._count("a reader that does not read", None)

        await asyncio.gather(*(hold() for _ in range(count)))

    async def pages(self, count: int = 100) -> None:
        """Request metrics, models and a nonexistent request, many times."""
        for path in ("/metrics", "/v1/models", "/v1/requests/req_nothing"):
            await asyncio.gather(
                *(self._send(path, partial(self._http.get, path)) for _ in range(count))
            )

    async def impatience(self, count: int = 60) -> None:
        """Send requests and disconnect at once, some with the same idempotency key."""
        for number in range(count):
            headers = {"idempotency-key": "the same"} if number % 2 else {}
            body = {"model": self._model, "messages": HELLO, "max_tokens": 500, "stream": True}
            try:
                async with asyncio.timeout(0.02 * (number % 4)):
                    await self._http.post(CHAT, json=body, headers=headers)
            except (httpx.TransportError, TimeoutError):
                self._count("left", None)

    async def fill(self, running: int, waiting_bytes: int) -> None:
        """Take every place in the engines, then let big bodies wait, then look at one of them again
        and again.

        Holds all of it for as long as standard input is open.
        """
        long = {
            "model": self._model,
            "messages": HELLO,
            "max_tokens": 4_000,
            "ignore_eos": True,
            "stream": True,
        }
        big = {**long, "messages": [{"role": "user", "content": "x" * waiting_bytes}]}
        begun: list[str] = []

        async def hold(name: str, body: dict[str, Any]) -> None:
            try:
                async with self._http.stream("POST", CHAT, json=body) as answer:
                    self._count(name, answer)
                    if answer.status_code == 200:
                        begun.append(answer.headers["x-request-id"])
                        async for _ in answer.aiter_raw():
                            pass
            except httpx.TransportError:
                self._count(f"{name}, in the end", None)

        holding = [asyncio.create_task(hold("a place", long)) for _ in range(running)]
        while sum(self.answers.get("a place", Counter()).values()) < running:
            await asyncio.sleep(0.1)
        for _ in range(40):
            holding.append(asyncio.create_task(hold("a big body that waits", big)))
            await asyncio.sleep(0.2)
        await asyncio.sleep(3)
        for request_id in begun[-1:] * 60:
            await self._send("a look", partial(self._http.get, f"/v1/requests/{request_id}"))
        print(json.dumps(self.answers), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)


async def main(url: str, key: str, model: str, phase: str) -> None:
    """Run one phase."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=240, limits=limits) as http:
        hostile = Hostile(http, model)
        if phase == "fill":
            await hostile.fill(running=200, waiting_bytes=15 * MIB)
            return
        await hostile.bodies()
        await hostile.readers_that_do_not_read()
        await hostile.pages()
        await hostile.impatience()
        print(json.dumps(hostile.answers), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
