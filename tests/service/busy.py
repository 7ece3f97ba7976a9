"""The capacity of all engines in use, by requests that stay until they are cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from serve_app.contract import IngressLease
from tests.service.services import HELD, PLACES, WORKERS
from tests.service.support import LONG_TOKENS, Running
from tests.waiting import until

CAPACITY = WORKERS * PLACES


class Busy:
    """All capacity of all engines is in use, by requests that stay until they are cancelled."""

    def __init__(self, service: Running) -> None:
        self._service = service
        self._streams = ExitStack()
        self._ids: list[str] = []

    def waits(self, prompt: str, request_class: str) -> None:
        """One more request, which is cancelled at the end."""
        headers = {"x-hermes-class": request_class}
        response = self._streams.enter_context(
            self._service.stream(prompt, LONG_TOKENS, headers=headers)
        )
        self._ids.append(response.headers["x-request-id"])

    def free_one(self) -> None:
        """Cancel one of the requests that use it."""
        self._service.cancel(self._ids.pop(0))

    def end(self) -> None:
        """Cancel all."""
        for request_id in self._ids:
            self._service.cancel(request_id)
        self._streams.close()


@contextmanager
def busy(service: Running) -> Iterator[Busy]:
    """Occupy all engines; free them at the end."""
    service.until_idle()
    held = Busy(service)
    try:
        for number in range(CAPACITY):
            held.waits(f"{HELD} {number}", "realtime")
        settled(service)
        yield held
    finally:
        held.end()
    service.until_idle()


def settled(service: Running) -> None:
    """Wait until all of them run, and every ingress has read so in the leases. Before that, one may
    start a request that the engines have no place for.
    """

    def leases() -> dict[IngressLease, float]:
        found: Any = service.redis.zrange("hermes:ingresses", 0, -1, withscores=True)
        return {IngressLease.decode(member): end_ms for member, end_ms in found}

    def told() -> float | None:
        found = leases()
        use = [(lease.running, lease.waiting) for lease in found]
        all_run = len(use) == 2 and sum(running for running, _ in use) == CAPACITY
        return max(found.values()) if all_run and not any(waits for _, waits in use) else None

    told_ms = until("all of them run", told)
    until("every ingress knows", lambda: all(end_ms > told_ms for end_ms in leases().values()))


def waiting(service: Running, request_class: str) -> float:
    return service.metrics().total("hermes_queue_depth", **{"class": request_class})
