"""Streams in mid-flight, something that befalls the service, and what must hold afterwards, whatever it was."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache

import httpx

from scripts.disorder.parts import Parts
from scripts.disorder.traffic import Client, Told
from scripts.local.service import application_status
from tests.service.support import Running, until
from workers.simulated_engine import text_of

PROMPTS = (
    "Tell me a story about a lighthouse.", "Count to ten.", "Explain fencing to a child.",
    "Write a poem about the sea.", "Say hello in three languages.", "Why is the sky blue?", "How do I bake bread?",
    "Describe your week.",
)  # fmt: skip

Strike = Callable[[Parts, list[Told]], Awaitable[None]]


def simulated_text(prompt: str, tokens: int) -> str:
    """What the simulated engine says."""
    words = text_of(json.dumps([{"role": "user", "content": prompt}], separators=(",", ":")).encode())
    return "".join(next(words) for _ in range(tokens))


@cache
def _real_text(service_key: str, prompt: str, tokens: int) -> str:
    return _services[service_key].text(prompt, tokens)


_services: dict[str, Running] = {}


def real_text(service: Running) -> Callable[[str, int], str]:
    """What the real engine says, undisturbed: ask before the disturbance."""
    _services[service.url] = service
    return lambda prompt, tokens: _real_text(service.url, prompt, tokens)


def under(
    service: Running, strike: Strike, expected: Callable[[str, int], str], tokens: int, count: int = 8,
    give_up_s: float = 180, transport: httpx.AsyncBaseTransport | None = None,
) -> list[Told]:  # fmt: skip
    """Start `count` streams (every fourth is not streamed), strike in the middle, stay with all to their end.

    Asserts that every accepted request has ended, none failed, every text equals the undisturbed one, and no event
    came twice or is missing.

    Args:
        transport: of the clients, where they do not all come by way of `service.url`.
    """
    told = [Told(PROMPTS[n % len(PROMPTS)], tokens, streamed=n % 4 != 3) for n in range(count)]
    for one in told:
        expected(one.prompt, tokens)
    asyncio.run(asyncio.wait_for(_run(service, strike, told, transport, give_up_s), give_up_s))
    for one in told:
        assert not one.wrong, (one.request_id, one.wrong)
        assert not one.failure, (one.request_id, one.failure)
        assert one.done
        assert one.text == expected(one.prompt, tokens), one.request_id
        state = service.state(one.request_id)
        assert (state["state"], state["output_tokens"]) == ("completed", tokens), state
        one.state = state
        again = httpx.get(f"{service.url}/v1/requests/{one.request_id}/events", timeout=30).text
        ids = [int(line[4:]) for line in again.split("\n") if line.startswith("id: ")]
        assert ids == list(range(1, len(ids) + 1))
    return told


async def _run(
    service: Running, strike: Strike, told: list[Told], transport: httpx.AsyncBaseTransport | None, give_up_s: float
) -> None:
    transport = transport or httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))
    timeout = httpx.Timeout(6, pool=None)
    async with httpx.AsyncClient(base_url=service.url, timeout=timeout, transport=transport) as http:
        asking = [asyncio.create_task(Client(http, service.model, give_up_s=give_up_s).ask(one)) for one in told]
        while not all(one.last_id >= 5 for one in told if one.streamed):
            assert not any(one.failure for one in told), [one.failure for one in told]
            await asyncio.sleep(0.02)
        await strike(Parts(service.service), told)
        await asyncio.gather(*asking)


async def busiest(service: Running, parts: Parts, told: list[Told], kind: str = "worker") -> int:
    """The process of a kind that belongs to the replica with most of these requests."""
    return await asyncio.to_thread(_busiest, service, parts, told, kind)


def _busiest(service: Running, parts: Parts, told: list[Told], kind: str) -> int:
    replicas = Counter(service.state(one.request_id)["replica"] for one in told if one.request_id)
    (name, _), *_ = replicas.most_common(1)
    deployed = application_status(service.service.dashboard_url)["deployments"]["Worker"]["replicas"]
    pid: int = next(replica["pid"] for replica in deployed if replica["replica_id"] == name)
    return next(found for found in parts.pids(kind) if found in parts.family(pid))


def attempts(told: list[Told]) -> list[int]:
    """Of every request."""
    return [int(one.state["attempts"]) for one in told]


def whole_again(service: Running, workers: int, within_s: float = 240) -> None:
    """Until every replica is back and serves."""

    def back() -> bool:
        try:
            found = service.http.get("/readyz", timeout=5).json()
        except (httpx.TransportError, ValueError):
            return False
        return bool(found.get("ready")) and found["workers"] >= workers and found["ingresses"] >= 2

    until("every replica is back", back, within_s)
    service.__dict__.pop("ingress_urls", None)  # an ingress that was replaced listens elsewhere


def seconds_until(condition: Callable[[], bool], within_s: float) -> float:
    """How long it took."""
    began_s = time.monotonic()
    until("it holds", condition, within_s)
    return time.monotonic() - began_s
