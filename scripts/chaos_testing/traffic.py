"""Strict clients: they check every event's number, compare every text, and survive every
disconnect. Each prompt has one text, so a mix-up shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

GIVE_UP_S = 120.0
_RETRY_S = 0.1
_LOOK_S = 0.5
_PASSING = ("journal_unavailable", "storage_full", "queue_full")

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "bread"]}, "maxItems": 4},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
_SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string", "maxLength": 60}},
    "required": ["query"],
}
_FORCED = {"type": "function", "function": {"name": "search"}}

MIXES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"plain": {"ignore_eos": True}},
    "real": {
        "plain": {"ignore_eos": True},
        "schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": _PERSON},
            }
        },
        "tool": {
            "tools": [{"type": "function", "function": {"name": "search", "parameters": _SEARCH}}],
            "tool_choice": _FORCED,
        },
        "logprobs": {"logprobs": True, "top_logprobs": 2, "ignore_eos": True},
        "penalties": {
            "frequency_penalty": 0.3,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
        },
        "n": {"n": 2, "seed": 11, "temperature": 1.0, "ignore_eos": True},
        "seed": {"seed": 7, "temperature": 1.0, "ignore_eos": True},
    },
}
"""By mix and kind: what a request has beside its prompt, so that its text is determined."""

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
    kind: str = "plain"
    more: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    """What the request has beside its prompt (`MIXES`)."""
    key: str = field(default_factory=lambda: f"chaos-{uuid.uuid4().hex}")
    request_id: str = ""
    accepted: bool = False
    last_id: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    """By choice: content and arguments of tool calls."""
    done: bool = False
    breaks: int = 0
    failure: str = ""
    """The reason of an explicit failure."""
    wrong: list[str] = field(default_factory=list)
    """A violation: an event twice, or missing; or no end by the service's own account."""
    arrivals_s: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The texts of all choices."""
        return "\n".join(text for _, text in sorted(self.texts.items()))

    def take(self, choice: dict[str, Any], said: dict[str, Any]) -> None:
        """Add what a choice says, whole or a delta."""
        calls = said.get("tool_calls") or ()
        parts = [
            said.get("content") or "",
            *(call["function"].get("arguments") or "" for call in calls),
        ]
        index = choice.get("index", 0)
        self.texts[index] = self.texts.get(index, "") + "".join(parts)


class Client:
    """Sends requests one after another, and follows each to its end."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        model: str,
        path: str = "/v1/chat/completions",
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._give_up_s = give_up_s
        self._http = http
        self._model = model
        self._path = path

    async def ask(self, told: Told) -> None:
        """Run one request to its end, over as many connections as necessary."""
        deadline_s = time.monotonic() + self._give_up_s
        while not (told.done or told.failure or told.wrong):
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
            if not (told.done or told.failure or told.wrong):
                if time.monotonic() > deadline_s:
                    told.failure = f"client gave up: {broken!r}"
                await asyncio.sleep(_RETRY_S)

    async def read_again(self, told: Told) -> None:
        """Read all events of a request by its ID, over as many connections as necessary."""
        while not (told.done or told.failure or told.wrong):
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
            **told.more,
        }

    async def _stream(self, told: Told) -> None:
        headers = {"idempotency-key": told.key}
        async with self._http.stream(
            "POST", self._path, json=self._body(told), headers=headers
        ) as response:
            await self._read(told, response)

    async def _events(self, told: Told) -> None:
        headers = {"last-event-id": str(told.last_id)}
        url = f"/v1/requests/{told.request_id}/events"
        async with self._http.stream("GET", url, headers=headers) as response:
            await self._read(told, response)

    async def _whole(self, told: Told) -> None:
        answer = await self._http.post(
            self._path, json=self._body(told), headers={"idempotency-key": told.key}
        )
        if not self._accepted(told, answer):
            return
        for choice in answer.json()["choices"]:
            told.take(choice, choice["message"])
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
                if told.wrong or told.done or told.failure:
                    return

    def _take(self, told: Told, block: bytes) -> None:
        while block.startswith(b":"):  # a comment is a line before an event
            _, _, block = block.partition(b"\n")
        head, _, data = block.partition(b"\ndata: ")
        number = int(head.removeprefix(b"id: "))
        if number != told.last_id + 1:
            told.wrong.append(f"event {number} after event {told.last_id}")
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
            told.take(choice, choice["delta"])


@dataclass
class End:
    """When a run ends: at a time (`time.monotonic`), or earlier."""

    at_s: float

    @property
    def over(self) -> bool:
        """Whether no new request should begin."""
        return time.monotonic() >= self.at_s


async def keep_busy(
    client: Client,
    chance: random.Random,
    prompts: list[str],
    tokens: tuple[int, int],
    end: End,
    all_told: list[Told],
    mix: dict[str, dict[str, Any]],
) -> None:
    """One user, who sends request after request until the run ends."""
    while not end.over:
        kind = chance.choice(sorted(mix))
        # The text of a plain request begins that of a longer one; others are asked in one length.
        length = chance.randint(*tokens) if kind == "plain" else tokens[1]
        told = Told(chance.choice(prompts), length, chance.random() < 0.75, kind, mix[kind])
        all_told.append(told)
        await client.ask(told)


async def look_up(
    http: httpx.AsyncClient, told: Told, gate: asyncio.Semaphore, within_s: float = 50.0
) -> None:
    """The service's own record of a request afterwards.

    Args:
        within_s: by then the request must have ended by that record.
    """
    for _ in range(round(within_s / _LOOK_S)):
        try:
            async with gate:
                answer = await http.get(f"/v1/requests/{told.request_id}")
        except httpx.TransportError:
            await asyncio.sleep(_LOOK_S)
            continue
        if answer.status_code == 404:
            return  # no longer retained
        if answer.status_code == 200 and answer.json()["ended_at_ms"]:
            told.state = answer.json()
            return
        await asyncio.sleep(_LOOK_S)
    told.wrong.append("never ended by the service's own account")
