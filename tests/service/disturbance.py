"""Streams in flight, a fault in the service, and what must hold afterwards, whatever the
fault was.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import httpx

from scripts.chaos_testing.parts import Parts
from scripts.chaos_testing.traffic import PROMPTS, Client, Told
from serve_app.cli.serve_api import application_status
from serve_app.local import processes
from tests.service.support import Running, check_whole, events_of, replicas, together
from tests.waiting import until
from workers.simulated_engine import text_of

Strike = Callable[[Parts, list[Told]], Awaitable[None]]


def simulated_text(prompt: str, tokens: int) -> str:
    """The text that the simulated engine produces."""
    words = text_of(
        json.dumps([{"role": "user", "content": prompt}], separators=(",", ":")).encode()
    )
    return "".join(next(words) for _ in range(tokens))


def real_text(service: Running) -> Callable[[str, int], str]:
    """The text that the real engine produces; call it before the disturbance."""
    return cache(service.text)


class Towards(httpx.AsyncBaseTransport):
    """Every request goes on a new connection to where `target` says, as with a load balancer or a
    Kubernetes Service.
    """

    def __init__(self, target: Callable[[], httpx.URL]) -> None:
        self._target = target
        self._transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        target = self._target()
        request.url = request.url.copy_with(host=target.host, port=target.port)
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        await self._transport.aclose()


def under(
    service: Running,
    strike: Strike,
    expected: Callable[[str, int], str],
    tokens: int,
    count: int = 8,
    give_up_s: float = 400,
    transport: httpx.AsyncBaseTransport | None = None,
    silent_s: float = 60,
    at_once: bool = False,
) -> list[Told]:
    """Start `count` streams (every fourth is not streamed), strike in the middle, stay with all to
    their end.

    Asserts that every accepted request has ended, none failed, every text equals the undisturbed
    one, and no event came twice or is missing.

    Args:
        transport: of the clients, where they do not all come by way of `service.url`.
        silent_s: after this long without a byte, a client takes its connection for broken.
        at_once: strike at the first event of any stream, because a real engine waits for nobody.
    """
    told = [Told(PROMPTS[n % len(PROMPTS)], tokens, streamed=n % 4 != 3) for n in range(count)]
    together([partial(expected, one.prompt, tokens) for one in told], count)

    async def run() -> None:
        way = transport or Towards(partial(httpx.URL, service.url))
        timeout = httpx.Timeout(silent_s, pool=None)
        async with httpx.AsyncClient(
            base_url=service.url, headers=service.headers, timeout=timeout, transport=way
        ) as http:
            client = Client(http, service.model, give_up_s=give_up_s)
            asking = [asyncio.create_task(client.ask(one)) for one in told]
            begun, events = (any, 1) if at_once else (all, 5)
            while not begun(one.last_id >= events for one in told if one.streamed):
                assert not any(one.failure for one in told), [one.failure for one in told]
                await asyncio.sleep(0.02)
            await strike(Parts(service.service), told)
            await asyncio.gather(*asking)

    asyncio.run(asyncio.wait_for(run(), give_up_s))
    for one in told:
        assert not one.wrong, (one.request_id, one.wrong)
        assert not one.failure, (one.request_id, one.failure)
        assert one.done
        assert one.text == expected(one.prompt, tokens), one.request_id
        state = service.state(one.request_id)
        assert (state["state"], state["usage"]["output_tokens"]) == ("completed", tokens), state
        one.state = state
        again = service.http.get(f"/v1/requests/{one.request_id}/events").text
        if one.streamed:
            check_whole(events_of(again))
        else:
            assert [event.id for event in events_of(again)] == [1]
    return told


def on_disk(service: Running) -> None:
    """Wait until Redis's append-only file holds what was accepted before this call. It belongs
    before a kill of Redis and nowhere else: with `everysec`, a slow disk keeps two seconds of it
    in memory, and requests may end meanwhile.
    """

    def file() -> dict[str, int]:
        found: dict[str, int] = service.redis.info("persistence")
        return found

    found = file()
    accepted_bytes = found["aof_current_size"] + found["aof_buffer_length"]

    def written() -> bool:
        found = file()  # a rewrite makes it shorter, so the length alone would not do
        return found["aof_current_size"] >= accepted_bytes or not found["aof_buffer_length"]

    until("Redis has written what it had accepted", written)


class TooLate(AssertionError):
    """The engines were faster than the fault."""


class Victims:
    """Finds the process whose death disturbs most of the requests that run.

    Asking Serve which process a replica is takes longer than a fast engine needs for an answer, so
    it is asked beforehand.
    """

    def __init__(self, service: Running, kind: str = "worker") -> None:
        self._service = service
        parts = Parts(service.service)
        self._parts = parts
        self._pids: dict[str, int] = {}
        for replica in replicas(service.service.dashboard_url, "Worker"):
            family = [replica["pid"], *processes.descendants(replica["pid"])]
            for pid in parts.pids(kind):  # one that Serve still stops has none any more
                if pid in family:
                    self._pids[replica["replica_id"]] = pid

    async def busiest(self, told: list[Told]) -> int:
        """The process of the replica with most of the requests that have not ended."""
        with self._standing_still():
            return await asyncio.to_thread(self._busiest, told)

    async def kill_busiest(self, told: list[Told]) -> None:
        """Kill it before it can end any of the requests."""
        with self._standing_still():
            self._parts.kill(await asyncio.to_thread(self._busiest, told))

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """No request ends meanwhile."""
        for pid in self._pids.values():
            self._parts.send(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in self._pids.values():
                self._parts.send(pid, signal.SIGCONT)

    def _busiest(self, told: list[Told]) -> int:
        ids = [one.request_id for one in told if one.request_id and not one.done]
        states = [self._service.state(request_id) for request_id in ids]
        running = Counter(state["replica"] for state in states if state["ended_at_ms"] is None)
        if not running:
            raise TooLate(f"every request has ended before the fault: {states}")
        (name, _), *_ = running.most_common(1)
        return self._pids[name]


def attempts(told: list[Told]) -> list[int]:
    """Number of attempts of each request."""
    return [int(one.state["attempts"]) for one in told]


@dataclass(frozen=True)
class Readiness:
    """What `/readyz` answered, or why it did not; true if that is enough."""

    told: object
    enough: bool = False

    def __bool__(self) -> bool:
        return self.enough


def whole_again(service: Running, workers: int, within_s: float = 480) -> None:
    """Wait until every replica is back and serves, and Serve replaces none any more. Of an update,
    ingresses are replaced last, each after a drain of 30 s.
    """

    def look() -> Readiness:
        try:
            found = service.http.get("/readyz", timeout=30).json()
            found["serve"] = application_status(service.service.dashboard_url).get("status")
        except (httpx.TransportError, OSError, ValueError) as error:
            return Readiness(error)
        enough = found.get("workers", 0) >= workers and found.get("ingresses", 0) >= 2
        settled = found["serve"] == "RUNNING"
        return Readiness(found, bool(found.get("ready")) and enough and settled)

    until("every replica is back", look, within_s)
    service.__dict__.pop("ingress_urls", None)  # an ingress that was replaced listens elsewhere
