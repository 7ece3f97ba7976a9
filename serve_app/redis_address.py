"""Where Redis is, as `redis.url` says it. Pure.

redis[s]://[user:password@]host[:port][/db]          one address, which leads to the primary
unix://[user:password@]/path[?db=]
redis[s]+sentinel://[user:password@]host[:port][,host[:port]...]/<name of the primary>[/db]
    [?sentinel_username=&sentinel_password=]         Sentinels, which know where the primary is
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")
_SENTINEL_PORT = 26379


class SentinelAddress(NamedTuple):
    """Sentinels, and what they are asked for. `login`: of the primary; `own_login`: of the Sentinels."""

    nodes: tuple[tuple[str, int], ...]
    primary: str
    db: int
    tls: bool
    login: dict[str, str]
    own_login: dict[str, str]


def is_tls(url: str) -> bool:
    """Whether the connections are encrypted."""
    return url.startswith("rediss")


def sentinel_address(url: str) -> SentinelAddress | None:
    """Of a URL with Sentinels; None for any other.

    Raises:
        ValueError: the URL is incomplete; the message says what is missing, and holds no password.
    """
    scheme, _, _ = url.partition("://")
    if not scheme.endswith("+sentinel"):
        return None
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, db = parts.path.strip("/").partition("/")
    if not all(host.rpartition(":")[0] or host for host in hosts.split(",")):
        raise ValueError("names no Sentinel: redis+sentinel://host:26379,host:26379/<name of the primary>")
    if not name:
        raise ValueError("names no primary: redis+sentinel://host:26379,host:26379/<name of the primary>")
    if db and not db.isdecimal():
        raise ValueError(f"database '{db}' is no number")
    query = {key.removeprefix("sentinel_"): values[-1] for key, values in parse_qs(parts.query).items()}
    username, _, password = user.partition(":")
    return SentinelAddress(
        tuple(_node(host) for host in hosts.split(",")), unquote(name), int(db or 0), is_tls(url),
        _login(unquote(username), unquote(password)), _login(query.get("username", ""), query.get("password", "")),
    )  # fmt: skip


def _node(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):  # an IPv6 address without a port
        return text.strip("[]"), _SENTINEL_PORT
    if not port.isdecimal():
        raise ValueError(f"port '{port}' is no number")
    return host.strip("[]"), int(port)


def _login(username: str, password: str) -> dict[str, str]:
    named = {"username": username, "password": password}
    return {key: value for key, value in named.items() if value}
