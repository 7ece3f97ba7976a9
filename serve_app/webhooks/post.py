"""One try of a delivery: its signature, the check of the address, and the POST."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.errors import RequestRefused
from serve_app.redaction import hide
from serve_app.settings.webhooks import WebhookSettings
from serve_app.webhooks.events import Delivery, check_url, is_public

_PREFIX = "whsec_"
_ADDRESSES = 4
"""Of a host, of which one after the other is tried."""


class Answered(NamedTuple):
    """What came of a try.

    Args:
        problem: why it counts as none, a word for metrics; empty if it was delivered.
        text: the same for people, without what may be secret.
        later_s: after how many seconds the receiver wants the next try, if it says so.
        gone: whether it never wants it again.
    """

    problem: str = ""
    text: str = ""
    later_s: float = 0.0
    gone: bool = False


class Failed(Exception):
    """A try that came to no answer."""

    def __init__(self, problem: str, text: str) -> None:
        super().__init__(text)
        self.answered = Answered(problem, text)


class Poster:
    """Posts deliveries. To the endpoints of the settings it connects wherever these lead; what a
    request has named must lead to a public address, unless `webhooks.private_addresses` is set.
    """

    def __init__(self, settings: WebhookSettings, clock: RedisClock) -> None:
        self._settings, self._clock = settings, clock
        self._resolving = ThreadPoolExecutor(timings.WEBHOOK_RESOLVERS, "webhook-names")
        self._transport: httpx.AsyncHTTPTransport | None = None
        """It follows no redirects, and has no cookies and no proxies, as a client would. No
        connection serves a second request, since it may have been checked for another host.
        """

    async def start(self) -> None:
        if self._transport is None:
            # reads the CA certificates, some 40 ms; SSL_CERT_FILE names others
            context = await asyncio.to_thread(ssl.create_default_context)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._transport = httpx.AsyncHTTPTransport(context, trust_env=False, limits=limits)

    async def post(self, delivery: Delivery) -> Answered:
        """Never raises, and takes `timings.WEBHOOK_ANSWER_S` at most."""
        try:
            async with asyncio.timeout(timings.WEBHOOK_ANSWER_S):
                return await self._post(delivery)
        except Failed as failed:
            return failed.answered
        except RequestRefused as refused:
            return Answered("refused", refused.message)
        except TimeoutError:
            return Answered("timeout", f"no answer in {timings.WEBHOOK_ANSWER_S:g} s")
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return Answered("connection", type(error).__name__)

    async def stop(self) -> None:
        self._resolving.shutdown(wait=False, cancel_futures=True)
        if self._transport is not None:
            await self._transport.aclose()

    async def _post(self, delivery: Delivery) -> Answered:
        endpoint = self._settings.endpoints.get(delivery.target)
        if endpoint is None and "/" not in delivery.target:
            raise Failed("unknown", f"webhooks.endpoints has no '{delivery.target}'")
        if endpoint is None:
            check_url(self._settings, delivery.target)  # the settings may have changed
        source = endpoint.secret if endpoint else self._settings.secret
        url = httpx.URL(endpoint.url if endpoint else delivery.target)
        keys = await asyncio.to_thread(secrets_of, source)
        addresses = await self._addresses(url)
        open_to_all = endpoint is not None or self._settings.private_addresses
        if not open_to_all and not all(map(is_public, addresses)):
            raise Failed("private_address", "its name leads to an address that is not public")
        body = delivery.body()
        headers = {
            "host": url.netloc.decode("ascii"),
            "content-type": "application/json",
            "user-agent": "hermes-serve",
            **signed(keys, delivery.event_id, int(self._clock.now_s()), body),
        }
        return await self._send(url, addresses, headers, body)

    async def _addresses(self, url: httpx.URL) -> Sequence[str]:
        port = url.port or (443 if url.scheme == "https" else 80)
        host = url.raw_host.decode("ascii").strip("[]")
        lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._resolving, lookup)
        except socket.gaierror:
            raise Failed("name", "its name cannot be resolved") from None
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    async def _send(
        self, url: httpx.URL, addresses: Sequence[str], headers: dict[str, str], body: bytes
    ) -> Answered:
        """Connect to the addresses that were checked, whatever the name leads to by now."""
        assert self._transport is not None, "it has been started"
        more = {"sni_hostname": url.raw_host.decode("ascii")}
        failed: httpx.ConnectError | None = None
        for address in addresses[:_ADDRESSES]:
            there = url.copy_with(host=address)
            request = httpx.Request("POST", there, headers=headers, content=body, extensions=more)
            try:
                response = await self._transport.handle_async_request(request)
            except httpx.ConnectError as error:
                failed = error
                continue
            await response.aclose()  # nobody reads what else it says
            return _meaning(response)
        raise Failed("connection", f"cannot connect: {failed}")


def _meaning(response: httpx.Response) -> Answered:
    status = response.status_code
    if 200 <= status < 300:
        return Answered()
    text = f"the answer has the status {status}"
    return Answered(f"status_{status // 100}xx", text, _later_s(response), status == 410)


def _later_s(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "")
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        at = parsedate_to_datetime(value)
        return max(0.0, (at - parsedate_to_datetime(response.headers["date"])).total_seconds())
    except (LookupError, TypeError, ValueError):
        return 0.0


def signed(keys: Sequence[bytes], event_id: str, at_s: int, body: bytes) -> dict[str, str]:
    """The headers of Standard Webhooks, with a signature of each key."""
    content = b"%b.%d.%b" % (event_id.encode(), at_s, body)
    made = [base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode() for key in keys]
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": " ".join(f"v1,{one}" for one in made),
    }


def secrets_of(source: str) -> list[bytes]:
    """The keys at `env:NAME` or `file:/path`, read again each time, since a file may change.

    Raises:
        Failed: there are none, or they cannot be read.
    """
    kind, _, where = source.partition(":")
    try:
        text = os.environ.get(where, "") if kind == "env" else Path(where).read_text()
        keys = [
            base64.b64decode(word.removeprefix(_PREFIX), validate=True) for word in text.split()
        ]
    except (OSError, ValueError, binascii.Error):
        keys = []
    if not keys or not all(keys) or not all(word.startswith(_PREFIX) for word in text.split()):
        raise Failed("secret", f"{source} has no secret of the form whsec_<base64>")
    for word in text.split():
        hide(word)
    return keys
