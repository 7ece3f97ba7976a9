"""Tenants with limits at several ingresses, on a real Redis, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from serve_app.admission.admission import Receipt, Submission
from serve_app.contract import Reason, State
from serve_app.errors import RequestRefused
from serve_app.journal.entries import (
    Entry,
    EntryId,
    Head,
    RequestFacts,
    RequestLine,
    Summary,
    encode_used,
)
from serve_app.journal.usage import Usage
from serve_app.policy.tenant_limits import MINUTE, Limits
from serve_app.policy.work import Work
from serve_app.redis.keyspace import limits_key
from serve_app.redis.replies import all_answered
from serve_app.requests.lifecycle import Ended, end
from tests.journal.admitting import StillIngress
from tests.journal.journal_helpers import World

BEGIN_MS = 29_000_000 * MINUTE
"""A minute begins."""
STILL: dict[str, Any] = {"ingress": {"disconnect_grace_s": 1e6, "lost_reader_grace_s": 0}}
LINE = RequestLine("POST", "/v1/completions", "", [])
names = itertools.count(1)


@dataclass(eq=False)
class Clients:
    """The clients of one tenant; `now_ms` is virtual. Each request has so many tokens in its prompt
    and allows as many in its answer.
    """

    w: World
    ingresses: list[StillIngress]
    limits: Limits
    tenant: str = "t"
    now_ms: int = BEGIN_MS
    turn: itertools.count[int] = field(default_factory=itertools.count)

    async def send(
        self,
        tokens: int = 5,
        at: int | None = None,
        background: bool = False,
        key: str = "",
        most: int | None = None,
        body: bytes = b"{}" * 500,
        path: str = "/v1/completions",
    ) -> Receipt:
        """Accept a request at one ingress, or at the next one in turn."""
        ingress = self.ingresses[next(self.turn) % len(self.ingresses) if at is None else at]
        facts = RequestFacts(
            "standard",
            self.tenant,
            "s",
            self.w.settings.model.name,
            False,
            self.now_ms,
            self.now_ms + 600_000,
            ingress.followers.channel,
            detached=background,
        )
        work = Work(tokens, tokens if most is None else most, "completions w0")
        asked = Submission(facts, replace(LINE, path=path), body, work, key, limits=self.limits)
        receipt = await ingress.exchanges.admission.submit(asked)
        receipt.begun()
        return receipt

    async def accepts(self, tokens: int = 5, **how: object) -> Receipt | None:
        """The same; None if it is refused."""
        try:
            return await self.send(tokens, **how)  # type: ignore[arg-type] # as they are
        except RequestRefused:
            return None

    async def refused(self, tokens: int = 5, **how: object) -> RequestRefused:
        """The refusal of one that is refused."""
        try:
            await self.send(tokens, **how)  # type: ignore[arg-type] # as they are
        except RequestRefused as refusal:
            return refusal
        raise AssertionError("it is accepted")

    async def answer(self, receipt: Receipt, prompt: int = 5, output: int = 5) -> None:
        """A worker ends a request that has used so much."""
        summary = Summary(receipt.facts, None, 1, self.now_ms)
        used = encode_used(Usage(prompt, 0, output))
        head = Head(200, [])
        last = Entry.output(EntryId(1, 1), b"nonce", head, b"[]", b"{}", 0, None, None, used)
        terminal = last.terminal_behind(State.COMPLETED, None, summary, b"z", head)
        ended = Ended(receipt.request_id, (last, terminal), summary)
        all_answered(await self.w.link.call([end(self.w.settings, ended)]))

    async def cancel(self, receipt: Receipt) -> bool:
        """It ends from outside."""
        return await self.w.endings.end(receipt.request_id, Reason.CANCELLED)

    async def kept(self) -> dict[str, int]:
        """What Redis has of the tenant, without what is 0."""
        found = await self.w.redis.get(limits_key(self.w.settings.namespace, self.tenant)) or b""
        numbers = dict(zip("wmurtcbd", map(int, found.split()), strict=False))
        return {name: value for name, value in numbers.items() if value}

    def with_limits(self, **limits: int) -> Clients:
        """Those of the same tenant after its policy has changed."""
        return replace_limits(self, Limits(**limits))


def replace_limits(clients: Clients, limits: Limits) -> Clients:
    return Clients(clients.w, clients.ingresses, limits, clients.tenant, clients.now_ms)


def without_reservation(receipt: Receipt) -> Receipt:
    """As a version that knows no limits writes its end."""
    return receipt._replace(facts=replace(receipt.facts, reserved=None))


@asynccontextmanager
async def clients_of(w: World, many: int = 3, **limits: int) -> AsyncIterator[Clients]:
    """A tenant's clients at so many ingresses."""
    ingresses = [StillIngress(w.settings, f"ingress-{next(names)}") for _ in range(many)]
    try:
        yield Clients(w, ingresses, Limits(**limits))
    finally:
        for ingress in ingresses:
            await ingress.close()
