"""An ingress whose parts a test calls: admission, disconnects and attempts, on a real Redis."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from serve_app.clock import SystemClock
from serve_app.cluster.replicas import Replicas
from serve_app.contract import Execute, IngressLease
from serve_app.ingress.exchange import Exchange
from serve_app.ingress.followers import Follower
from serve_app.journal.entries import RequestFacts
from serve_app.policy.tenants import Tenant
from serve_app.processes import IngressProcess
from serve_app.settings import Settings
from tests.journal.in_process import never


class Skewed(SystemClock):
    """The clock of a machine whose time is wrong, and which a test turns ahead by `ahead_s`."""

    def __init__(self, skew_s: float) -> None:
        self.ahead_s = 0.0
        self.unix_s = lambda: time.time() + skew_s
        self.monotonic_s = lambda: time.monotonic() + self.ahead_s


class StillIngress(IngressProcess):
    """An ingress that does nothing by itself: a test admits, and runs what is claimed. The clock of
    its machine is wrong by `skew_s`.
    """

    def __init__(
        self,
        settings: Settings,
        name: str = "ingress-1",
        skew_s: float = 0.0,
        execute: Execute = never,
        replicas: Replicas | None = None,
    ) -> None:
        if replicas is None:
            replicas = Replicas()
            replicas.serving(["worker-1"])
        super().__init__(settings, name, "session-1", execute, replicas)
        self.base.clock.local = self.local = Skewed(skew_s)
        self.attempts = self.dispatcher._attempts
        self.disconnects = self._disconnects

    async def submit(
        self, key: str = "", body: bytes = b'{"prompt": "Hello"}', prefer: str = ""
    ) -> Exchange:
        """Submit a client's request, or join it to an earlier one."""
        headers = {"idempotency-key": key} if key else {}
        if prefer:
            headers["prefer"] = prefer
        request = json.loads(body)
        submission = self.submissions.of(
            Tenant("tenant"), "/v1/completions", "", headers, body, request, ""
        )
        return await self.exchanges.submit(submission)

    async def post(self, *request: Any, **more: Any) -> tuple[Follower, RequestFacts]:
        """The same; what reads its journal, and its facts."""
        exchange = await self.submit(*request, **more)
        assert exchange.facts is not None
        return exchange.follower, exchange.facts

    async def quiet(self) -> None:
        """Wait until the grace periods of all clients that have left are over. It knows who lives
        by then.
        """
        await self.membership._renew()
        await asyncio.gather(*self.disconnects.tasks)

    async def close(self) -> None:
        """Stop what works without having been started."""
        await self.disconnects.stop()
        await self.membership.leave()
        await self.base.lease_link.close()
        await self.base.link.close()


@asynccontextmanager
async def admitting(
    settings: Settings, name: str = "ingress-1", skew_s: float = 0.0
) -> AsyncIterator[StillIngress]:
    """A `StillIngress` with a lease, which knows the clock of Redis."""
    made = StillIngress(settings, name, skew_s)
    await made.membership.join_as_ingress(lambda: IngressLease(name, "session-1"))
    try:
        yield made
    finally:
        await made.close()
