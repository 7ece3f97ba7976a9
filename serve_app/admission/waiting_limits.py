"""The requests that this ingress has admitted and no worker has started: limited in bytes per
class, and in sequences and bytes per tenant.

This costs no round trip: every ingress counts its own requests against its share of the limits, so
the limits hold in total.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from serve_app import timings
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.settings import Settings


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One waiting request. Two requests with the same idempotency key have the same id until one of
    them is accepted.
    """

    request_class: str
    tenant: str
    body_bytes: int
    sequences: int


@dataclass(slots=True)
class _Sum:
    sequences: int = 0
    bytes: int = 0


class WaitingLimits:
    """The waiting requests of one ingress. The first one is always admitted, however large it
    is.
    """

    def __init__(self, settings: Settings) -> None:
        self._queue = settings.queue
        self._tenants_differ = settings.auth.required
        self._most_at_once = settings.workers.max_running_requests
        self._ingresses = 1
        self._most_bytes = math.inf
        self._inside: set[Ticket] = set()
        self._by_class: defaultdict[str, _Sum] = defaultdict(_Sum)
        self._by_tenant: defaultdict[tuple[str, str], _Sum] = defaultdict(_Sum)

    def __len__(self) -> int:
        return len(self._inside)

    def divide(self, ingresses: int, room_bytes: float) -> None:
        """Divide the limits among this many ingresses; no class may use more than half of Redis's
        capacity.
        """
        self._ingresses = max(1, ingresses)
        self._most_bytes = room_bytes / 2

    def enter(self, tenant: str, request_class: str, body_bytes: int, sequences: int = 1) -> Ticket:
        """Count a request that is about to be admitted. Pass the result to `leave`.

        Args:
            sequences: of the request; no more count than an engine runs at a time.

        Raises:
            RequestRefused: `queue_full`, or `tenant_limit` if other tenants may still submit.
        """
        share = self._queue.max_tenant_share
        bound_bytes = (
            min(self._queue.max_waiting_bytes(request_class), self._most_bytes) / self._ingresses
        )
        of_tenant = self._by_tenant.get((request_class, tenant), _Sum())
        sequences = min(sequences, self._most_at_once)
        if self._tenants_differ and of_tenant.sequences:
            most = share * self._queue.max_waiting(request_class) / self._ingresses
            more_bytes = of_tenant.bytes + body_bytes
            if of_tenant.sequences + sequences > most or more_bytes > share * bound_bytes:
                raise RequestRefused(
                    Reason.TENANT_LIMIT,
                    f"Your requests of class '{request_class}' that wait already ask for "
                    f"{of_tenant.sequences} answers or texts, with {of_tenant.bytes} bytes; please "
                    "wait for some of them.",
                    retry_after_s=timings.RETRY_AFTER_S,
                )
        of_class = self._by_class[request_class]
        if of_class.sequences and of_class.bytes + body_bytes > bound_bytes:
            raise RequestRefused(
                Reason.QUEUE_FULL,
                f"{of_class.bytes} bytes of requests of class '{request_class}' wait already; "
                "please try again later.",
                retry_after_s=timings.RETRY_AFTER_S,
            )
        ticket = Ticket(request_class, tenant, body_bytes, sequences)
        self._inside.add(ticket)
        for one in (of_class, self._by_tenant[request_class, tenant]):
            one.sequences += sequences
            one.bytes += body_bytes
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """A worker has started the request, or it has ended, or nobody knows it any more. A second
        call changes nothing.
        """
        if ticket not in self._inside:
            return
        self._inside.discard(ticket)
        of_tenant = self._by_tenant[ticket.request_class, ticket.tenant]
        for one in (self._by_class[ticket.request_class], of_tenant):
            one.sequences -= ticket.sequences
            one.bytes -= ticket.body_bytes
        if not of_tenant.sequences:
            del self._by_tenant[ticket.request_class, ticket.tenant]
