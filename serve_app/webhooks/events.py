"""Which events there are, who gets them, when they are tried again, and where they may go. Pure.

Source: https://platform.openai.com/docs/guides/webhooks and https://www.standardwebhooks.com
"""

from __future__ import annotations

import hashlib
import ipaddress
import random
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

import msgspec

from serve_app.contract import State
from serve_app.errors import invalid
from serve_app.settings.webhooks import WebhookSettings

HEADER = "x-hermes-webhook"
RESPONSE, REQUEST, BATCH = "response", "request", "batch"
"""What has ended: a response, a request of any other path, or a batch."""
MAX_URL_CHARS = 2_048
_HOST = re.compile(r"[a-z0-9.-]+")
_RETRY_AT_LEAST_S, _RETRY_AT_MOST_S = 5.0, 4 * 3600.0
_OUTCOMES = {
    State.COMPLETED: "completed",
    State.CANCELLED: "cancelled",
    State.FAILED: "failed",
    State.EXPIRED: "failed",
}
_NOT_PUBLIC = [*map(ipaddress.ip_network, ("192.0.0.0/24", "fec0::/10", "64:ff9b::/96"))]
"""Beside those that `ipaddress` knows; the last one leads to addresses of version 4."""


class Delivery(msgspec.Struct, array_like=True, frozen=True):
    """An event for one receiver. A newer version may add fields."""

    event_id: str
    """The same for every receiver and every try."""
    event: str
    """Its type, such as `response.completed`."""
    created_s: int
    """Unix seconds by Redis's clock."""
    subject: str
    """The id of what has ended."""
    tenant: str
    target: str
    """The name of an endpoint in the settings, or the URL that a request or batch has named."""

    @property
    def where(self) -> str:
        """The receiver without what may be secret: an endpoint's name, or host and port."""
        return urlsplit(self.target).netloc if "/" in self.target else self.target

    @property
    def route(self) -> str:
        """That of one receiver and one tenant, in which deliveries wait for each other."""
        return f"{'//' * ('/' in self.target)}{self.where}|{self.tenant}"

    def body(self) -> bytes:
        """What is posted, in OpenAI's form."""
        event = {"id": self.event_id, "object": "event", "type": self.event}
        return msgspec.json.encode(
            {**event, "created_at": self.created_s, "data": {"id": self.subject}}
        )


def subject_of(kind: str, request_id: str) -> str:
    """The id of what has ended, as its client knows it."""
    return f"resp_{request_id}" if kind == RESPONSE else request_id


def event_of(kind: str, state: State, cut: bool) -> str:
    """The type of the event for the end of a response or request. `cut`: see `Summary`."""
    incomplete = cut and kind == RESPONSE and state is State.COMPLETED
    return f"{kind}.{'incomplete' if incomplete else _OUTCOMES[state]}"


def deliveries(
    settings: WebhookSettings, event: str, subject: str, tenant: str, ended_ms: int, url: str = ""
) -> Iterator[Delivery]:
    """The event for everybody who gets it.

    Args:
        subject: the id of what has ended.
        url: that which was named with it, if any.
    """
    digest = hashlib.sha256(f"{subject} {event} {ended_ms}".encode()).hexdigest()
    named = [
        name
        for name, one in settings.endpoints.items()
        if any(fnmatchcase(event, wanted) for wanted in one.events)
        if any(fnmatchcase(tenant, wanted) for wanted in one.tenants)
    ]
    for target in [*named, url] if url else named:
        yield Delivery(f"evt_{digest[:32]}", event, ended_ms // 1000, subject, tenant, target)


def check_url(settings: WebhookSettings, url: str, param: str = HEADER) -> None:
    """Refuse a URL that a request may not name: `invalid_request`."""
    if not settings.hosts:
        raise invalid("Webhooks of requests are off here (webhooks.hosts).", param)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    plain = host and parts.scheme == "http" and settings.plain_http
    odd = not url.isascii() or not url.isprintable() or " " in url or len(url) > MAX_URL_CHARS
    if not _HOST.fullmatch(host) or odd or "@" in parts.netloc or "#" in url or port == 0:
        raise invalid(f"'{param}' takes a URL such as https://hooks.example.com/done.", param)
    if parts.scheme != "https" and not plain:
        raise invalid(f"The URL in '{param}' must begin with https://.", param)
    if not any(_is(host, allowed) for allowed in settings.hosts):
        raise invalid(f"'{host[:80]}' is no host that webhooks may go to (webhooks.hosts).", param)


def _is(host: str, allowed: str) -> bool:
    return host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed


def is_public(address: str) -> bool:
    """Whether anybody on the internet has this address. One that leads to another is none."""
    ip = ipaddress.ip_address(address)
    if ip.version == 6 and (ip.ipv4_mapped or ip.sixtofour or ip.teredo):
        return False
    odd = ip.is_multicast or ip.is_reserved or any(ip in network for network in _NOT_PUBLIC)
    return ip.is_global and not odd


def pause_s(age_s: float, asked_s: float = 0.0) -> float:
    """How long to wait after a failure: half as long as the event is old, about. So the pauses grow
    from seconds to hours, and nobody must count.

    Args:
        asked_s: what `Retry-After` says.
    """
    usual_s = age_s / 2 * random.uniform(0.8, 1.2)
    at_least_s = _RETRY_AT_LEAST_S * random.uniform(1.0, 1.2)
    return min(max(usual_s, asked_s, at_least_s), _RETRY_AT_MOST_S)
