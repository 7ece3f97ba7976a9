"""Shared helpers of the service tests: a running service, its metrics, server-sent events."""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import httpx
import psutil
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from serve_app.cli.serve_api import application_status
from serve_app.local import redis_server
from serve_app.local.service import Service
from tests.waiting import PATIENCE_S, until

T = TypeVar("T")
STORY = "Tell me a story about a lighthouse."
LONG_TOKENS = 3900
CHAT = "/v1/chat/completions"


def asking(
    prompt: str = "Hello", tokens: int = 10, model: str = "hermes-tiny", **more: Any
) -> dict[str, Any]:
    """The body of a chat request."""
    message = {"role": "user", "content": prompt}
    return {"model": model, "messages": [message], "max_tokens": tokens, **more}


def of_tenant(key: str) -> dict[str, str]:
    """The header with an API key."""
    return {"authorization": f"Bearer {key}"}


def openai_client(url: str, key: str, http: httpx.Client | None = None) -> OpenAI:
    """The unmodified SDK, without its retries, which would hide failures."""
    # Its types name `httpx2` alone.
    own: dict[str, Any] = {"http_client": http, "timeout": http.timeout if http else 240}
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, **own)


def text_of_chunks(chunks: Iterable[Any]) -> str:
    """The text of a chat stream of the SDK."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def answers(url: str, key: str = "", model: str = "hermes-tiny") -> bool:
    """Whether a service answers there, with a whole stream."""
    headers = of_tenant(key) if key else {}
    body = asking(model=model, stream=True)
    try:
        asked = httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=60)
    except httpx.TransportError:
        return False
    whole = asked.text.endswith("data: [DONE]\n\n") and '"error"' not in asked.text
    return asked.status_code == 200 and whole


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    id: int
    kind: str
    data: str


def check_whole(found: Sequence[Event]) -> None:
    """Check that the ids are 1..n without a gap, and that the last event is `[DONE]`."""
    assert [event.id for event in found] == list(range(1, len(found) + 1))
    assert found[-1].data == "[DONE]"


def text_of(found: Sequence[Event]) -> str:
    """The text of a whole chat stream."""
    check_whole(found)
    deltas = [json.loads(event.data)["choices"][0]["delta"] for event in found[:-1]]
    return "".join(delta.get("content") or "" for delta in deltas)


def events_of(body: str) -> list[Event]:
    """The events of a complete stream, without signs of life."""
    return [event for block in body.split("\n\n") if (event := _event(block)) is not None]


def _event(block: str) -> Event | None:
    fields = dict(
        line.split(": ", 1)
        for line in block.split("\n")
        if ": " in line and not line.startswith(":")
    )
    if "data" not in fields or (block.startswith(": waiting\n") and "id" not in fields):
        return None
    return Event(int(fields["id"]), fields.get("event", "message"), fields["data"])


class Stream:
    """A streamed answer, read event by event as it arrives, signs of life in between; each with the
    time of its arrival.
    """

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        # Ray's Python proxy puts an id of its own behind ours; HAProxy does not.
        self.request_id = response.headers.get("x-request-id", "").partition(",")[0]
        self.text = ""
        self.arrivals: list[tuple[float, str]] = []
        self._blocks = self._read()

    def blocks(self) -> Iterator[str]:
        """Events and signs of life from where the last reader stopped, until the stream ends."""
        return iter(self._blocks.__next__, None)

    def _read(self) -> Iterator[str]:
        rest = ""
        for chunk in self.response.iter_text():
            self.text += chunk
            rest += chunk
            while "\n\n" in rest:
                block, _, rest = rest.partition("\n\n")
                self.arrivals.append((time.monotonic(), block))
                yield block
        assert rest == "", f"the stream ended inside of an event: {rest!r}"

    def signs_of_life(self, count: int) -> list[tuple[float, str]]:
        """The next `count` blocks, with their times; all of them must be signs of life."""
        found = [block for block, _ in zip(self.blocks(), range(count), strict=False)]
        assert [_event(block) for block in found] == [None] * count, found
        return self.arrivals[-count:]

    def next_events(self, count: int) -> list[Event]:
        """The next `count` events."""
        found: list[Event] = []
        for block in self.blocks():
            event = _event(block)
            if event is not None:
                found.append(event)
            if len(found) == count:
                break
        assert len(found) == count, f"the stream ended after {found}"
        return found

    def rest(self) -> list[Event]:
        """All events to the end."""
        return [event for block in self.blocks() if (event := _event(block)) is not None]


class Metrics:
    """A page of `/metrics`."""

    def __init__(self, page: str) -> None:
        self.families = list(text_string_to_metric_families(page))
        self.samples = [sample for family in self.families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of a name with these labels."""
        return sum(
            s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()
        )


def is_idle(page: Metrics) -> bool:
    """Whether no engine runs or holds a request, by this page."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "hermes_in_flight_requests")
    return all(page.total(name) == 0 for name in names)


@dataclass
class Running:
    """A running service, and ways to access it."""

    service: Service
    keys: Mapping[str, str] = field(default_factory=dict)
    """The API key of each tenant, where the service requires one."""
    tenant: str = "acme"
    """Whose requests they are."""

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return of_tenant(self.keys[self.tenant]) if self.keys else {}

    def client(self, tenant: str = "") -> httpx.Client:
        """A client of a tenant, or one without a key."""
        headers = of_tenant(self.keys[tenant]) if tenant else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=240)

    @property
    def url(self) -> str:
        return self.service.url

    @property
    def model(self) -> str:
        return self.service.model

    @cached_property
    def http(self) -> httpx.Client:
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=240, limits=limits)

    @cached_property
    def sdk(self) -> OpenAI:
        return openai_client(self.url, self.keys.get(self.tenant, "none"))

    @cached_property
    def redis(self) -> Redis:
        """Redis with all permissions, because tests read keys that the service's own user may not
        list.
        """
        return Redis.from_url(
            redis_server.as_operator(self.service.redis_url), protocol=2, socket_timeout=PATIENCE_S
        )

    def journal_key(self, request_id: str) -> str:
        return f"hermes:j:{request_id}"

    def entries(self, stream: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Every entry of a stream in Redis: its id and its fields."""
        found: Any = self.redis.xrange(stream)
        return list(found)

    def close(self) -> None:
        for name in ("http", "sdk", "redis"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()

    # -- asking -----------------------------------------------------------------------------------

    def body(self, prompt: str = STORY, tokens: int = 16, **more: Any) -> dict[str, Any]:
        """A greedy chat request of exactly `tokens` tokens."""
        greedy = {"temperature": 0, "ignore_eos": True}
        return asking(prompt, tokens, self.model, **{**greedy, **more})

    def ask(self, prompt: str = STORY, tokens: int = 16, **more: Any) -> httpx.Response:
        """A chat answer that is not streamed."""
        headers = more.pop("headers", {})
        answer = self.http.post(CHAT, json=self.body(prompt, tokens, **more), headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def text(self, prompt: str, tokens: int = 16) -> str:
        """The greedy text of a prompt. A refused request is repeated, as SDKs do: on a machine that
        is busy, a service with production's limits may not accept the first one.
        """

        def accepted() -> httpx.Response | None:
            answer = self.http.post(CHAT, json=self.body(prompt, tokens))
            return None if answer.status_code == 503 else answer

        answer = until("the service accepts the request", accepted)
        assert answer.status_code == 200, answer.text
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    def stream(self, prompt: str = STORY, tokens: int = 16, **more: Any) -> Any:
        """A streamed chat answer: a context manager of an `httpx.Response`."""
        headers = more.pop("headers", {})
        body = self.body(prompt, tokens, stream=True, **more)
        return self.http.stream("POST", CHAT, json=body, headers=headers)

    def long_body(self, prompt: str = STORY, **more: Any) -> dict[str, Any]:
        """A request that is still running when it is looked at: four answers, as long as the
        context allows.
        """
        return self.body(prompt, LONG_TOKENS, n=4, **{"temperature": 1, **more})

    def long_stream(self, headers: Mapping[str, str] | None = None) -> Any:
        """A `long_body`, streamed: a context manager of an `httpx.Response`."""
        body = self.long_body(stream=True)
        return self.http.stream("POST", CHAT, json=body, headers=headers)

    def state(self, request_id: str) -> dict[str, Any]:
        """`GET /v1/requests/{id}`."""
        return self._asked("GET", request_id)

    def cancel(self, request_id: str) -> dict[str, Any]:
        """`DELETE /v1/requests/{id}`."""
        found = self._asked("DELETE", request_id)
        assert found["ended_at_ms"] is not None, found
        return found

    def _asked(self, method: str, request_id: str) -> dict[str, Any]:
        answer = self.http.request(method, f"/v1/requests/{request_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ended(self, request_id: str) -> dict[str, Any]:
        """`GET /v1/requests/{id}`, once it has ended."""

        def look() -> dict[str, Any] | None:
            found = self.state(request_id)
            return found if found["ended_at_ms"] is not None else None

        return until("the request ends", look)

    def begun(self, user: str) -> str | None:
        """The id of the request whose body names this user, once it has an output."""
        for key in self.redis.scan_iter(match="hermes:b:*"):
            name = str(key.decode().rpartition(":")[2])
            body: Any = self.redis.get(key) or b""
            if user.encode() in body and self.redis.xlen(self.journal_key(name)) > 3:
                return name
        return None

    # -- looking ----------------------------------------------------------------------------------

    def settled(self) -> Metrics:
        """A page that holds all that has happened, once no engine runs or holds a request: every
        process has left two more pages since, and begun the second one behind the first.
        """

        def settled() -> Metrics | None:
            for _ in range(2):
                page = self._renewed()
            return page if is_idle(page) else None

        return until("every engine is idle", settled)

    def _renewed(self) -> Metrics:
        """The pages in Redis, once each is another one, or gone with its process."""

        def left() -> dict[bytes, bytes]:
            keys: Any = sorted(self.redis.scan_iter(match="hermes:metrics:*"))
            pages: Any = self.redis.mget(keys)
            return {key: page for key, page in zip(keys, pages, strict=True) if page}

        old = left()

        def renewed() -> dict[bytes, bytes] | None:
            new = left()
            return None if new.items() & old.items() else new

        pages = until("every process has left another page", renewed).values()
        return Metrics("".join(zlib.decompress(page).decode() for page in pages))

    def metrics(self) -> Metrics:
        headers = of_tenant(self.keys["@metrics"]) if self.keys else {}
        answer = self.http.get("/metrics", headers=headers)
        assert answer.status_code == 200, answer.text
        return Metrics(answer.text)

    @contextmanager
    def freed(self) -> Iterator[None]:
        """Inside of the block one long request is given up: its engine is free before it could have
        ended.
        """
        self.until_idle()
        before = self.metrics().total("vllm:generation_tokens_total")
        yield
        self.until_idle()
        assert self.metrics().total("vllm:generation_tokens_total") - before < 4 * LONG_TOKENS

    def until_idle(self) -> None:
        """Wait until no engine runs or holds a request."""
        until("every engine is idle", lambda: is_idle(self.metrics()))

    @cached_property
    def ingress_urls(self) -> dict[str, str]:
        """`{ingress id: URL}`: under direct ingress every ingress replica has an HTTP port of its
        own.
        """
        urls = {}
        for replica in replicas(self.service.dashboard_url, "Ingress"):
            for connection in psutil.Process(replica["pid"]).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.ip == "127.0.0.1":
                    url = f"http://127.0.0.1:{connection.laddr.port}"
                    told = httpx.get(f"{url}/healthz", timeout=60).json()
                    assert told["ingress"] == replica["replica_id"]
                    urls[replica["replica_id"]] = url
        return urls


def replicas(dashboard_url: str, *names: str) -> list[dict[str, Any]]:
    """What Serve says of the replicas of these deployments, or of all."""
    deployments = application_status(dashboard_url).get("deployments", {})
    return [one for name in names or deployments for one in deployments[name]["replicas"]]


def kill_all(pids: Sequence[int]) -> None:
    """Kill those that still run: Serve would let an ingress without clients drain for 30 s."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def together(calls: Sequence[Callable[[], T]], threads: int = 32) -> list[T]:
    """Run calls concurrently; returns their results in order."""
    with ThreadPoolExecutor(min(threads, len(calls))) as pool:
        return list(pool.map(lambda call: call(), calls))
