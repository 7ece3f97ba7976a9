"""What one ingress holds of connections and uploads, in total and from one tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from serve_app import timings
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.settings import Settings


class ConnectionLimit:
    """A limit for one kind of connection, or for what connections hold.

    Args:
        what: the kind as an error message names it, such as `connections`.
        most: how many all tenants together may hold.
        most_of_tenant: how many one tenant may hold.
    """

    def __init__(self, what: str, most: int, most_of_tenant: int) -> None:
        self._what = what
        self._most = most
        self._most_of_tenant = max(1, most_of_tenant)
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._held.total()

    def take(self, tenant: str, size: int = 1) -> None:
        """Count more of a tenant.

        Raises:
            RequestRefused: `too_many_connections`, or `tenant_limit` if other tenants may still
                have more.
        """
        if self._held.total() + size > self._most:
            raise RequestRefused(
                Reason.TOO_MANY_CONNECTIONS,
                f"All {self._most} {self._what} are taken; please try again later.",
                retry_after_s=timings.RETRY_AFTER_S,
            )
        if self._held[tenant] + size > self._most_of_tenant:
            raise RequestRefused(
                Reason.TENANT_LIMIT,
                f"You hold {self._held[tenant]} {self._what} here already; please try again later.",
                retry_after_s=timings.RETRY_AFTER_S,
            )
        self._held[tenant] += size

    def release(self, tenant: str, size: int = 1) -> None:
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def hold(self, tenant: str) -> Iterator[None]:
        """Count a connection of a tenant while the block runs; raises as `take`."""
        self.take(tenant)
        try:
            yield
        finally:
            self.release(tenant)


class ConnectionLimits:
    """The limits of one ingress. Short requests, such as a `DELETE`, are not counted."""

    def __init__(self, settings: Settings) -> None:
        ingress = settings.ingress
        share = ingress.max_tenant_share if settings.auth.required else 1.0
        self.requests = ConnectionLimit(
            "connections", ingress.max_connections, int(share * ingress.max_connections)
        )
        self.event_readers = ConnectionLimit(
            "readers of events", ingress.max_readers, int(share * ingress.max_readers)
        )
