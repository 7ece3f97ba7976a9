"""What this ingress has admitted and nobody has begun: bounded in bytes by class, and in both for each tenant.

It costs no round trip: every ingress counts its own, and has its part of the bounds, so that summed they hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from serve_app.errors import Reason, RequestRefused
from serve_app.settings import Settings

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One request's place. Two may have the same key, and so the same id, until one is found to be first."""

    request_class: str
    tenant: str
    body_bytes: int


@dataclass(slots=True)
class _Sum:
    requests: int = 0
    bytes: int = 0


class WaitingRoom:
    """The requests of one ingress that wait. The first one always has room, however long it is."""

    def __init__(self, settings: Settings) -> None:
        self._queue = settings.queue
        self._tenants_differ = settings.auth.required
        self._ingresses = 1
        self._most_bytes = math.inf
        self._inside: set[Ticket] = set()
        self._by_class: defaultdict[str, _Sum] = defaultdict(_Sum)
        self._by_tenant: defaultdict[tuple[str, str], _Sum] = defaultdict(_Sum)

    def __len__(self) -> int:
        return len(self._inside)

    def divide(self, ingresses: int, room_bytes: float) -> None:
        """The bounds are divided among so many; no class may have more than half of Redis's room."""
        self._ingresses = max(1, ingresses)
        self._most_bytes = room_bytes / 2

    def enter(self, tenant: str, request_class: str, body_bytes: int) -> Ticket:
        """A request is about to be admitted. Returns what it leaves with.

        Raises:
            RequestRefused: `queue_full`, or `tenant_limit` where others still have room.
        """
        share = self._queue.max_tenant_share
        bound_bytes = min(self._queue.max_waiting_bytes(request_class), self._most_bytes) / self._ingresses
        of_tenant = self._by_tenant.get((request_class, tenant), _Sum())
        if self._tenants_differ and of_tenant.requests:
            most = share * self._queue.max_waiting(request_class) / self._ingresses
            if of_tenant.requests + 1 > most or of_tenant.bytes + body_bytes > share * bound_bytes:
                raise RequestRefused(
                    Reason.TENANT_LIMIT,
                    f"{of_tenant.requests} of your requests of class '{request_class}' wait already, with "
                    f"{of_tenant.bytes} bytes; please wait for some of them.",
                    retry_after_s=_RETRY_AFTER_S,
                )
        of_class = self._by_class[request_class]
        if of_class.requests and of_class.bytes + body_bytes > bound_bytes:
            raise RequestRefused(
                Reason.QUEUE_FULL,
                f"{of_class.bytes} bytes of requests of class '{request_class}' wait already; please try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        ticket = Ticket(request_class, tenant, body_bytes)
        self._inside.add(ticket)
        for one in (of_class, self._by_tenant[request_class, tenant]):
            one.requests += 1
            one.bytes += body_bytes
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Somebody works on it, or it has ended, or nobody knows of it any more. Again is nothing."""
        if ticket not in self._inside:
            return
        self._inside.discard(ticket)
        of_tenant = self._by_tenant[ticket.request_class, ticket.tenant]
        for one in (self._by_class[ticket.request_class], of_tenant):
            one.requests -= 1
            one.bytes -= ticket.body_bytes
        if not of_tenant.requests:
            del self._by_tenant[ticket.request_class, ticket.tenant]
