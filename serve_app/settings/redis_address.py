"""Parses `redis.url`. Pure. The forms of the URL:

redis[s]://[user:password@]host[:port][/db]          one address, which leads to the primary
unix://[user:password@]/path[?db=]
redis[s]+sentinel://[user:password@]host[:port][,host[:port]...]/<name of the primary>[/db]
    [?sentinel_username=&sentinel_password=]         Sentinels, which know where the primary is
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")
_SENTINEL_PORT = 26379


class SentinelAddress(NamedTuple):
    """The Sentinels to ask, and the primary that they watch. `login` is the primary's, `own_login`
    the Sentinels'.
    """

    nodes: tuple[tuple[str, int], ...]
    primary: str
    db: int
    tls: bool
    login: dict[str, str]
    own_login: dict[str, str]


def check_ends(url: str) -> None:
    """Refuse a URL whose user and password do not end at the @, and a port that is none. Else a
    part of the password would count as the host or the port, which messages show.

    Raises:
        ValueError: with a message that holds no password.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "unix":
        return
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" not in netloc and "@" in rest.partition("?sentinel_")[0]:
        raise ValueError(
            "has a '/', '?' or '#' in its user or password: write it as %2F, %3F or %23"
        )
    _, _, port = netloc.rpartition("@")[2].rpartition("]")[2].partition(":")
    if port and not scheme.endswith("+sentinel") and not _is_port(port):
        raise ValueError(f"port '{port}' is not a number up to 65535")


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= 65535


def is_tls(url: str) -> bool:
    """Whether the connections are encrypted."""
    return url.startswith("rediss")


def sentinel_address(url: str) -> SentinelAddress | None:
    """Parse a URL that names Sentinels; None for any other URL.

    Raises:
        ValueError: the URL is incomplete; the message says what is missing, and holds no password.
    """
    scheme, _, rest = url.partition("://")
    if not scheme.endswith("+sentinel"):
        return None
    # Not urlsplit: it refuses several IPv6 addresses, because elsewhere a URL names one host.
    rest, _, options = rest.partition("?")
    netloc, _, path = rest.partition("/")
    user, _, hosts = netloc.rpartition("@")
    name, _, db = path.strip("/").partition("/")
    if not all(host.rpartition(":")[0] or host for host in hosts.split(",")):
        raise ValueError(
            "names no Sentinel: use redis+sentinel://host:26379,host:26379/<name of the primary>"
        )
    if not name:
        raise ValueError(
            "names no primary: use redis+sentinel://host:26379,host:26379/<name of the primary>"
        )
    if db and not db.isdecimal():
        raise ValueError(f"database '{db}' is not a number")
    query = {key.removeprefix("sentinel_"): values[-1] for key, values in parse_qs(options).items()}
    username, _, password = user.partition(":")
    return SentinelAddress(
        tuple(_node(host) for host in hosts.split(",")),
        unquote(name),
        int(db or 0),
        is_tls(url),
        _login(unquote(username), unquote(password)),
        _login(query.get("username", ""), query.get("password", "")),
    )


def _node(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):  # an IPv6 address without a port
        return text.strip("[]"), _SENTINEL_PORT
    if not port.isdecimal():
        raise ValueError(f"port '{port}' is not a number")
    return host.strip("[]"), int(port)


def _login(username: str, password: str) -> dict[str, str]:
    named = {"username": username, "password": password}
    return {key: value for key, value in named.items() if value}
