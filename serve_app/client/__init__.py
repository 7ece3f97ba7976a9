"""For clients of the service: httpx transports that reconnect. They depend on nothing else in the
project.
"""

from .transports import AsyncReconnectingTransport, ReconnectingTransport

__all__ = ["AsyncReconnectingTransport", "ReconnectingTransport"]
