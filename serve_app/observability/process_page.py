"""The page of a single process, for a scraper that discovers every pod."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

_PORTS = 64


def serve_page(ours: CollectorRegistry, first_port: int) -> int:
    """Serve this process's metrics on the first free port from `first_port` upwards; returns the
    port.
    """
    for port in range(first_port, first_port + _PORTS):
        try:
            start_http_server(port, registry=_Both(ours))
            return port
        except OSError:
            continue
    raise OSError(f"no free port for metrics in {first_port}..{first_port + _PORTS - 1}")


class _Both(CollectorRegistry):
    """Our registry and the default one, as one collector."""

    def __init__(self, ours: CollectorRegistry) -> None:
        super().__init__()
        self.register(ours)
        self.register(REGISTRY)
