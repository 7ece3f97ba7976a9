"""A bounded number of something that clients hold at one ingress, of which no tenant has more than its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from serve_app.errors import Reason, RequestRefused

_RETRY_AFTER_S = 1.0


class Places:
    """Such as connections, or readers.

    Args:
        what: as a client reads it, such as `connections`.
        most: of all tenants together.
        most_of_tenant: of one.
    """

    def __init__(self, what: str, most: int, most_of_tenant: int) -> None:
        self._what = what
        self._most = most
        self._most_of_tenant = max(1, most_of_tenant)
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Hold one.

        Raises:
            RequestRefused: `too_many_connections`, or `tenant_limit` where others still find one.
        """
        if self._taken.total() >= self._most:
            raise RequestRefused(
                Reason.TOO_MANY_CONNECTIONS,
                f"All {self._most} {self._what} are taken; please try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self._taken[tenant] >= self._most_of_tenant:
            raise RequestRefused(
                Reason.TENANT_LIMIT,
                f"You hold {self._taken[tenant]} {self._what} here already; please try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
