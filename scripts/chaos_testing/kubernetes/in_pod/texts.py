"""Which text is right: the one of before the faults, or what the service itself recorded."""

from __future__ import annotations

import asyncio

import httpx

from scripts.chaos_testing.prompts import PROMPTS
from scripts.chaos_testing.traffic import Client, Told

BEFORE = "the texts of before the faults"
RECORD = "the service's own record of each request"


class Texts:
    """The expected texts.

    A model's greedy text can depend on what else is in its batch. If it does, a text of before the
    faults proves nothing, and what the client saw is compared with the request's own events, read
    again after its end.

    Args:
        compare: `before` or `record`; `auto`: find out.
    """

    def __init__(self, client: Client, http: httpx.AsyncClient, compare: str) -> None:
        self._client = client
        self._http = http
        self._compare = compare
        self._texts: dict[str, str] = {}
        self.compared_with = ""
        """In words; empty until it is known."""

    async def ask(self, tokens: int) -> str:
        """Ask for every text before any fault; returns what is wrong, if anything."""
        alone = [Told(prompt, tokens, streamed=True) for prompt in PROMPTS]
        for told in alone:
            await self._client.ask(told)
        together = [Told(prompt, tokens, streamed=True) for prompt in PROMPTS]
        await asyncio.gather(*map(self._client.ask, together))
        for told in (*alone, *together):
            if not told.done:
                return f"before any fault: {told.failure or told.wrong[0]}"
        self._texts = {told.prompt: told.text for told in alone}
        same = all(told.text == self._texts[told.prompt] for told in together)
        before = self._compare == "before" or (self._compare == "auto" and same)
        self.compared_with = BEFORE if before else RECORD
        return ""

    async def of(self, told: Told) -> str:
        """What the client should have seen of a request that has ended."""
        if self.compared_with == BEFORE:
            return self._texts[told.prompt]
        again = Told(told.prompt, told.tokens, streamed=True, request_id=told.request_id)
        await self._client.read_again(again)
        return again.text
