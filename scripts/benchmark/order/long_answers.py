"""Long generations whose whole text is kept, so that two of them can be compared."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.request import ProxyHandler, Request, build_opener

from ..connection import Exchange
from ..pool import ConnectionPool
from ..prompts import RequestMaker

_TIMEOUT_S = 10.0


class LongAnswer(NamedTuple):
    """What a long generation has answered, and how it came."""

    text: str
    finish_reason: str
    took_s: float
    longest_gap_s: float
    error: str | None
    request_id: str = ""


class LongAnswers:
    """As many long generations as ``requests``, all under way at the same time."""

    def __init__(self, maker: RequestMaker, requests: Sequence[bytes], timeout_s: float) -> None:
        self._pool = ConnectionPool(maker, timeout_s)
        self._exchanges = [_Begun(time.perf_counter()) for _ in requests]
        self._tasks = [
            asyncio.create_task(self._pool.perform(request, exchange))
            for request, exchange in zip(requests, self._exchanges, strict=True)
        ]

    async def all_begun(self) -> None:
        """Return when each of them has its first token, or has ended without one."""
        begun = [asyncio.create_task(one.begun.wait()) for one in self._exchanges]
        for waiting, task in zip(begun, self._tasks, strict=True):
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    async def all_ended(self) -> list[LongAnswer]:
        """Return when each of them has ended."""
        await asyncio.gather(*self._tasks)
        self._pool.close()
        return [_answer(exchange) for exchange in self._exchanges]

    async def break_off(self) -> None:
        """End what is still under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.close()


class _Begun(Exchange):
    """An exchange that keeps its body, and tells when the first token has come."""

    def __init__(self, started_s: float) -> None:
        super().__init__(started_s, body=bytearray())
        self.begun = asyncio.Event()

    def note_tokens(self, now_s: float, count: int) -> None:
        """See `Exchange`."""
        super().note_tokens(now_s, count)
        self.begun.set()


def _answer(exchange: Exchange) -> LongAnswer:
    body = bytes(exchange.body or b"")
    text, finish_reason = text_of(body)
    return LongAnswer(
        text,
        finish_reason,
        (exchange.finished_s or exchange.started_s) - exchange.started_s,
        max(exchange.gaps_s, default=0.0),
        exchange.error,
        request_id_of(body),
    )


async def attempts_of(url: str, api_key: str, answers: Sequence[LongAnswer]) -> list[int]:
    """How many attempts each of them took, as hermes-serve tells at /v1/requests/{id}; a yield ends
    one. Other servers do not tell: an empty list.
    """
    told = [asyncio.to_thread(_attempts, url, api_key, one.request_id) for one in answers]
    return [attempts for attempts in await asyncio.gather(*told) if attempts]


def _attempts(url: str, api_key: str, request_id: str) -> int:
    headers = {"authorization": f"Bearer {api_key}"}
    request = Request(f"{url.rstrip('/')}/requests/{request_id}", headers=headers)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_S) as answer:
            return int(json.load(answer)["attempts"])
    except (OSError, ValueError, LookupError):
        return 0


def text_of(body: bytes) -> tuple[str, str]:
    """The text and the finish reason of a stream of chat or completion chunks."""
    parts: list[str] = []
    finish_reason = ""
    for chunk in _chunks(body):
        for choice in chunk.get("choices") or []:
            parts.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
            finish_reason = choice.get("finish_reason") or finish_reason
    return "".join(parts), finish_reason


def request_id_of(body: bytes) -> str:
    """The request's id, which vLLM's chunks carry after the name of their kind."""
    first = next(_chunks(body), {})
    return str(first.get("id", "")).partition("-")[2]


def _chunks(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])
