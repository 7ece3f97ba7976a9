"""Admission and disconnect handling of an ingress, on a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve_app.admission.admission import Admission
from serve_app.admission.idempotency import KeyedRequests
from serve_app.admission.limits import AdmissionLimits
from serve_app.clock import RedisClock, SystemClock
from serve_app.cluster.leases import Membership
from serve_app.contract import IngressLease
from serve_app.ingress.acceptance import Acceptance
from serve_app.ingress.disconnects import Disconnects
from serve_app.ingress.submissions import Submissions
from serve_app.journal.facts import RequestFacts
from serve_app.journal.follower import Follower
from serve_app.journal.followers import Followers
from serve_app.observability.metrics import Telemetry
from serve_app.redis.keyspace import journal_key
from tests.journal.journal_helpers import World

BODY = b'{"prompt": "Hello"}'


class Skewed(SystemClock):
    """The clock of a machine whose time is wrong, and which a test turns ahead by `ahead_s`."""

    def __init__(self, skew_s: float) -> None:
        self.ahead_s = 0.0
        self.unix_s = lambda: time.time() + skew_s
        self.monotonic_s = lambda: time.monotonic() + self.ahead_s


class AdmittingIngress:
    """One ingress's admission, on a machine whose clock is wrong by `skew_s`."""

    def __init__(self, w: World, name: str, skew_s: float = 0.0) -> None:
        self.local = Skewed(skew_s)
        self.clock = RedisClock(self.local)
        self.followers = Followers(w.settings, w.store, name)
        self.disconnects = Disconnects(
            w.settings, w.redis, w.store, self.followers, name, w.endings, self.clock
        )
        self.limits = AdmissionLimits(w.settings)
        self.submissions = Submissions(w.settings, self.followers.channel)
        self.admission = Admission(
            w.store,
            w.queue(name),
            w.link,
            KeyedRequests(w.settings, w.store, w.link),
            self.limits,
            self.clock,
            Telemetry(),
            self.disconnects.unsure,
        )
        self.acceptance = Acceptance(
            self.admission, self.followers, self.disconnects, w.settings.redis.admission_timeout_s
        )

    async def post(self, key: str = "", body: bytes = BODY) -> tuple[Follower, RequestFacts]:
        """Admit a client's request, or join it to an earlier one."""
        headers = {"idempotency-key": key} if key else {}
        submission = self.submissions.of("tenant", "/v1/completions", "", headers, body, {}, "")
        return await self.acceptance.accept(submission)

    async def quiet(self) -> None:
        """Wait until the grace periods of all clients that have left are over."""
        await asyncio.gather(*self.disconnects._tasks)


@asynccontextmanager
async def admitting(
    w: World, name: str = "ingress-1", skew_s: float = 0.0
) -> AsyncIterator[AdmittingIngress]:
    """An `AdmittingIngress` with a lease, which knows the clock of Redis."""
    made = AdmittingIngress(w, name, skew_s)
    membership = Membership(w.redis, w.settings.namespace, clock=made.clock)
    await membership.join_as_ingress(lambda: IngressLease(name, "session-1"))
    try:
        yield made
    finally:
        await made.disconnects.stop()
        await membership.leave()


async def ending(w: World, request_id: str) -> str:
    """Why a request has ended; empty if it has not."""
    ends = [entry for entry in await w.entries(request_id) if entry.ends]
    return (ends[0].reason or ends[0].state or "") if ends else ""


async def journals(w: World) -> list[str]:
    """The ids of all requests that have a journal."""
    found = [
        key.decode() async for key in w.operator.scan_iter(journal_key(w.settings.namespace, "*"))
    ]
    return [key.rpartition(":")[2] for key in found]
