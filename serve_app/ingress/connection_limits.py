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

    def check(self, tenant: str, size: int = 1) -> None:
        """Whether a tenant may have more.

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

    def count(self, tenant: str, size: int = 1) -> None:
        """Count more of a tenant, whether or not it may have that."""
        self._held[tenant] += size

    def take(self, tenant: str, size: int = 1) -> None:
        """Count more of a tenant; raises as `check`."""
        self.check(tenant, size)
        self.count(tenant, size)

    def release(self, tenant: str, size: int = 1) -> None:
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def hold(self, tenant: str) -> Iterator[None]:
        """Count a connection of a tenant while the block runs; raises as `check`."""
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
        self.unread = ConnectionLimit(
            "bytes of answers that wait to be read",
            ingress.max_buffered_response_bytes,
            int(share * ingress.max_buffered_response_bytes),
        )
        """What answers above `timings.LARGE_BYTES` take until their clients have them. Whoever
        finds any room has one answer, of whatever size.
        """
