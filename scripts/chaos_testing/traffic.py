"""Strict clients: they check every event's number, compare every text, and survive every
disconnect. Each prompt has one text, so a mix-up shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

GIVE_UP_S = 120.0
_RETRY_S = 0.1
_LOOK_S = 0.5
_CHATS = "/v1/chat/completions"
_PASSING = ("journal_unavailable", "storage_full", "queue_full")

PROMPTS = [
    "Tell me a story about a lighthouse.",
    "Count to ten.",
    "Explain fencing to a child.",
    "Write a poem about the sea.",
    "Say hello in three languages.",
    "Why is the sky blue?",
    "How do I bake bread?",
    "Describe your week.",
]


@dataclass
class Told:
    """What one client has seen of its request."""

    prompt: str
    tokens: int
    streamed: bool
    key: str = field(default_factory=lambda: f"chaos-{uuid.uuid4().hex}")
    request_id: str = ""
    accepted: bool = False
    last_id: int = 0
    text: str = ""
    done: bool = False
    breaks: int = 0
    failure: str = ""
    """The reason of an explicit failure."""
    wrong: str = ""
    """A violation: an event twice, or missing; or no end by the service's own account."""
    twice: bool = False
    arrivals_s: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether its client has nothing more to do for it."""
        return bool(self.done or self.failure or self.wrong)


class Unfit(Exception):
    """The service does not answer as it should before any fault."""


class Client:
    """Sends requests one after another, and follows each to its end."""

    def __init__(self, http: httpx.AsyncClient, model: str, give_up_s: float = GIVE_UP_S) -> None:
        self._give_up_s = give_up_s
        self._http = http
        self._model = model

    async def ask(self, told: Told) -> None:
        """Run one request to its end, over as many connections as necessary."""
        deadline_s = time.monotonic() + self._give_up_s
        while not told.over:
            try:
                if told.last_id:
                    await self._events(told)
                elif told.streamed:
                    await self._stream(told)
                else:
                    await self._whole(told)
            except httpx.TransportError as error:
                told.breaks += 1
                broken: Exception = error
            else:
                broken = ConnectionError("the stream ended early")
            if not told.over:
                if time.monotonic() > deadline_s:
                    told.failure = f"client gave up: {broken!r}"
                await asyncio.sleep(_RETRY_S)

    async def texts(self, lengths: Sequence[int], at_once: bool) -> dict[tuple[str, int], str]:
        """The text of every prompt in each of these numbers of tokens.

        Raises:
            Unfit: a stream was not whole.
        """
        asked = [Told(prompt, tokens, streamed=True) for prompt in PROMPTS for tokens in lengths]
        for some in [asked] if at_once else [[one] for one in asked]:
            await asyncio.gather(*map(self.ask, some))
        for told in asked:
            if not told.done:
                raise Unfit(f"before any fault: {told.failure or told.wrong}")
        return {(told.prompt, told.tokens): told.text for told in asked}

    async def read_again(self, told: Told) -> None:
        """Read all events of a request by its ID, over as many connections as necessary."""
        while not told.over:
            with contextlib.suppress(httpx.TransportError):
                await self._events(told)
            await asyncio.sleep(0 if told.done else _RETRY_S)

    def _body(self, told: Told) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": told.prompt}],
            "max_tokens": told.tokens,
            "temperature": 0,
            "stream": told.streamed,
            "ignore_eos": True,
        }

    async def _stream(self, told: Told) -> None:
        headers = {"idempotency-key": told.key}
        async with self._http.stream(
            "POST", _CHATS, json=self._body(told), headers=headers
        ) as response:
            await self._read(told, response)

    async def _events(self, told: Told) -> None:
        headers = {"last-event-id": str(told.last_id)}
        url = f"/v1/requests/{told.request_id}/events"
        async with self._http.stream("GET", url, headers=headers) as response:
            await self._read(told, response)

    async def _whole(self, told: Told) -> None:
        answer = await self._http.post(
            _CHATS, json=self._body(told), headers={"idempotency-key": told.key}
        )
        if not self._accepted(told, answer):
            return
        told.text = answer.json()["choices"][0]["message"]["content"]
        told.done = True

    def _accepted(self, told: Told, answer: httpx.Response) -> bool:
        # Ray's Python proxy, HAProxy's fallback while no ingress is alive, adds an id of its
        # own.
        request_id = answer.headers.get("x-request-id", "").partition(",")[0]
        if request_id.startswith("req_"):
            told.request_id = request_id
        if answer.status_code == 200:
            told.accepted = True
            return True
        reason = answer.headers.get("x-hermes-reason", "")
        if reason and reason not in _PASSING:
            told.failure = reason
        return False  # HAProxy's own answers, or an unreachable or full Redis: try again

    async def _read(self, told: Told, response: httpx.Response) -> None:
        if not self._accepted(told, response):
            await response.aread()
            return
        rest = b""
        async for chunk in response.aiter_raw():
            *blocks, rest = (rest + chunk).split(b"\n\n")
            for block in blocks:
                self._take(told, block)
                if told.over:
                    return

    def _take(self, told: Told, block: bytes) -> None:
        while block.startswith(b":"):  # a comment is a line before an event
            _, _, block = block.partition(b"\n")
            if not block.startswith(b"id: "):  # an event that only shows that the service lives
                return
        head, _, data = block.partition(b"\ndata: ")
        number = int(head.removeprefix(b"id: "))
        if number != told.last_id + 1:
            told.wrong = f"event {number} after event {told.last_id}"
            told.twice = number <= told.last_id
            return
        told.last_id = number
        told.arrivals_s.append(time.monotonic())
        if data == b"[DONE]":
            told.done = True
            return
        event = json.loads(data)
        if "error" in event:
            told.failure = event["error"]["code"]
            return
        for choice in event["choices"]:
            told.text += choice["delta"].get("content") or ""


@dataclass
class End:
    """When a run ends: at a time (`time.monotonic`), or earlier."""

    at_s: float

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.at_s


async def look_up(
    http: httpx.AsyncClient, told: Told, gate: asyncio.Semaphore, within_s: float = 50.0
) -> None:
    """The service's own record of a request afterwards.

    Args:
        within_s: by then the request must have ended by that record.
    """
    for _ in range(round(within_s / _LOOK_S)):
        with contextlib.suppress(httpx.TransportError):
            async with gate:
                answer = await http.get(f"/v1/requests/{told.request_id}")
            if answer.status_code == 404:
                return  # no longer retained
            if answer.status_code == 200 and answer.json()["ended_at_ms"]:
                told.state = answer.json()
                return
        await asyncio.sleep(_LOOK_S)
    told.wrong = told.wrong or "never ended by the service's own account"
