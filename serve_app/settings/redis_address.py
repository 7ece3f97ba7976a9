"""Parses `redis.url`; every connection to Redis or to a Sentinel is opened by what this returns.
Pure. The forms of the URL:

redis[s]://[user:password@]host[:port][/db]          one address, which leads to the primary
unix://[user:password@]/path                         a Unix socket
redis[s]+sentinel://[user:password@]host[:port][,host[:port]...]/<name of the primary>[/db]
    [?sentinel_username=&sentinel_password=]         Sentinels, which know where the primary is

Each may end with `?username=&password=&db=` instead of saying it further in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

_PORT, _SENTINEL_PORT = 6379, 26379
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_OPTIONS = ("db", "username", "password")
_OF_SENTINEL = ("sentinel_username", "sentinel_password")
_SENTINELS_FORM = "use redis+sentinel://host:26379,host:26379/<name of the primary>"

Login = Mapping[str, str]


class RedisAddress(NamedTuple):
    """Where Redis is, and how to log in."""

    nodes: tuple[tuple[str, int], ...]
    """The one address, or the Sentinels; none for a Unix socket."""
    path: str
    """Of the Unix socket."""
    primary: str
    """The name by which Sentinels know the primary; empty without Sentinels."""
    db: int
    tls: bool
    login: Login
    """`username` and `password`, as far as they are given."""
    own_login: Login
    """The Sentinels'."""

    @property
    def secrets(self) -> Iterator[str]:
        for login in (self.login, self.own_login):
            yield login.get("password", "")


def redis_address(url: str) -> RedisAddress:
    """Parse the URL of Redis.

    Raises:
        ValueError: the message says what is wrong with the URL and what to write instead. It holds
            no password.
    """
    scheme, slashes, rest = url.partition("://")
    if not slashes or scheme not in _SCHEMES:
        raise ValueError(
            "must start with redis://, rediss:// (TLS), unix:// or redis[s]+sentinel://"
        )
    of_sentinel = scheme.endswith("+sentinel")
    _check_ends(scheme, rest)
    rest, _, query = rest.partition("?")
    options = _options(query, _OPTIONS + _OF_SENTINEL if of_sentinel else _OPTIONS)
    # Not urlsplit: it refuses several IPv6 addresses, because elsewhere a URL names one host.
    netloc, _, path = rest.partition("/")
    user, _, hosts = netloc.rpartition("@")
    username, _, password = user.partition(":")
    login = _login({"username": unquote(username), "password": unquote(password), **options}, "")
    if scheme == "unix":
        if hosts or not path:
            what = f"names the host '{hosts}'" if hosts else "names no file"
            raise ValueError(f"{what}: a Unix socket has three slashes, unix:///run/redis.sock")
        return RedisAddress((), unquote(f"/{path}"), "", _db(options.get("db")), False, login, {})
    primary, _, db = path.strip("/").partition("/") if of_sentinel else ("", "", path.strip("/"))
    nodes = tuple(_node(host, of_sentinel) for host in hosts.split(","))
    if of_sentinel and not primary:
        raise ValueError(f"names no primary: {_SENTINELS_FORM}")
    db_number = _db(options.get("db", db))
    own_login = _login(options, "sentinel_")
    tls = scheme.startswith("rediss")
    return RedisAddress(nodes, "", unquote(primary), db_number, tls, login, own_login)


def _check_ends(scheme: str, rest: str) -> None:
    """Refuse a user and a password that do not end at the @. Else a part of the password would
    count as the host or the port, which messages show.
    """
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    after = re.split(rf"\?(?:{'|'.join(_OPTIONS + _OF_SENTINEL)})=", rest[len(netloc) :])[0]
    if "@" not in netloc and (":" in netloc if scheme == "unix" else "@" in after):
        raise ValueError(
            "has a '/', '?' or '#' in its user or password: write it as %2F, %3F or %23"
        )


def _options(query: str, known: tuple[str, ...]) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options.keys() - set(known):
        raise ValueError(
            f"has the option '{name}', which is none of {', '.join(known)}: remove it; timeouts "
            "and certificates are settings, such as redis.response_timeout_s and redis.ca_file"
        )
    return {name: value for name, value in options.items() if value}


def _node(text: str, of_sentinel: bool) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):  # also an IPv6 address without a port
        host, port = text, ""
    port = port or str(_SENTINEL_PORT if of_sentinel else _PORT)
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535):
        # Not shown: without an @, it is the password.
        raise ValueError("has a port that is not a number up to 65535: use host:6379")
    host = unquote(host.strip("[]"))
    if not host:
        form = f"Sentinel: {_SENTINELS_FORM}" if of_sentinel else "host: use redis://host:6379/0"
        raise ValueError(f"names no {form}")
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"host '{host}' is not a name or an address") from None
    return host, int(port)


def _db(text: str | None) -> int:
    if text and not (text.isascii() and text.isdecimal()):
        raise ValueError(f"database '{text}' is not a number: use /0, as in redis://host:6379/0")
    return int(text or 0)


def _login(values: Mapping[str, str], prefix: str) -> Login:
    named = {name: values.get(f"{prefix}{name}", "") for name in ("username", "password")}
    return {name: value for name, value in named.items() if value}
