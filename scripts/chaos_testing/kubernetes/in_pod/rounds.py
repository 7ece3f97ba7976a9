"""Rounds of streams, and the account of each."""

from __future__ import annotations

import asyncio
import math
import random
import time
from itertools import pairwise
from typing import Any

import httpx

from scripts.chaos_testing.account import settle
from scripts.chaos_testing.kubernetes.in_pod.texts import Texts
from scripts.chaos_testing.prompts import PROMPTS
from scripts.chaos_testing.records import look_up
from scripts.chaos_testing.traffic import Client, Told

_LOOK_UPS = 32
_ENDS_S = 1800.0
"""By then, the service's own record must say that a request has ended; it may be away meanwhile."""


class Rounds:
    """Users who send stream after stream, from `begin` to `end`."""

    def __init__(
        self,
        client: Client,
        http: httpx.AsyncClient,
        texts: Texts,
        tokens: int,
        chance: random.Random,
    ) -> None:
        self._client = client
        self._http = http
        self._texts = texts
        self._tokens = tokens
        self._chance = chance
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._gate = asyncio.Semaphore(_LOOK_UPS)
        self._users = 0
        self._told: list[Told] = []
        self._right: dict[str, str] = {}
        self._struck_s = math.inf
        self._problem = ""

    def expect(self) -> None:
        """Ask for the texts."""
        self._asking = asyncio.create_task(self._ask())

    def begin(self, users: int) -> None:
        """Begin a round; what an abandoned one has left is ended."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks, self._told, self._right = {}, [], {}
        self._struck_s = math.inf
        self.users(users)

    def users(self, number: int) -> None:
        """Change the number of users: those who leave finish their streams."""
        self._users = number
        for user in range(number):
            if user not in self._tasks or self._tasks[user].done():
                self._tasks[user] = asyncio.create_task(self._use(user))

    def strike(self) -> None:
        """A fault comes now."""
        self._struck_s = time.monotonic()

    def end(self) -> None:
        """Begin no more streams."""
        self.users(0)

    async def state(self) -> dict[str, Any]:
        """How the round goes, and what `/readyz` says."""
        self._find_failures()
        return {
            "compared_with": self._texts.compared_with,
            "problem": self._problem,
            "users": self._users,
            "running": sum(not task.done() for task in self._tasks.values()),
            "begun": sum(bool(told.arrivals_s) for told in self._told),
            "ready": await self._ready(),
        }

    def result(self) -> dict[str, Any]:
        """The account of the round."""
        account = settle(self._told, lambda told: self._right.get(told.key, ""))
        return {
            "whole": account.completed,
            "all": account.sent,
            "longest_pause_s": longest_pause_s(self._told, self._struck_s),
            "reconnected": account.reconnected,
            "attempts": {str(n): count for n, count in sorted(account.attempts.items())},
            "failed": dict(account.failed),
            "lost": account.lost,
            "duplicated": account.duplicated,
            "corrupted": account.corrupted,
        }

    async def _ask(self) -> None:
        self._problem = await self._texts.ask(self._tokens)

    async def _use(self, user: int) -> None:
        while user < self._users:
            told = Told(self._chance.choice(PROMPTS), self._tokens, streamed=True)
            self._told.append(told)
            await self._client.ask(told)
            if told.request_id:
                await look_up(self._http, told, self._gate, _ENDS_S)
            if told.done:
                self._right[told.key] = await self._texts.of(told)

    def _find_failures(self) -> None:
        """A user whom an error of this program ended would look like a stream that never ended."""
        for task in (*self._tasks.values(), *((self._asking,) if self._asking else ())):
            if task.done() and not task.cancelled() and (error := task.exception()):
                self._problem = f"the client failed: {error!r}"

    async def _ready(self) -> dict[str, Any]:
        try:
            answer = await self._http.get("/readyz")
        except httpx.TransportError:
            return {}
        kind = answer.headers.get("content-type", "")
        found = answer.json() if kind.startswith("application/json") else {}
        return found if isinstance(found, dict) else {}


def longest_pause_s(all_told: list[Told], struck_s: float) -> float | None:
    """The longest time after a fault that a stream went without an event; None if none flowed."""
    gaps = [
        ended_s - max(began_s, struck_s)
        for told in all_told
        for began_s, ended_s in pairwise(told.arrivals_s)
        if ended_s > struck_s
    ]
    return max(gaps, default=None)
