"""What the service's user may do on the Redis of the tests: what `hermes check-redis` tries, and
nothing else. A command that the service sends and the check does not try fails every test of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from redis import Redis

from serve_app.local.redis_server import RedisServer
from serve_app.redis.check import trial
from serve_app.redis.connection import Command

_HAVE_SUBCOMMANDS = ("XGROUP", "SCRIPT", "PUBSUB")
BESIDE = ("info", "zcard", "echo")
"""Without INFO there is only a warning. The others are the tests' own."""


def needed() -> list[str]:
    """Every command that the service needs, as ACLs name it."""
    return sorted({_name(command) for commands in trial("n", "p", 0) for command in commands})


def _name(command: Command) -> str:
    assert isinstance(command, tuple)
    words = command[:2] if command[0] in _HAVE_SUBCOMMANDS else command[:1]
    return "|".join(words).lower()


def rules() -> Iterator[str]:
    """The rules of an ACL that permit what is tried."""
    yield "-@all"
    yield from (f"+{command}" for command in (*needed(), *BESIDE))


def narrow(server: RedisServer) -> RedisServer:
    """Take all other rights away."""
    with Redis.from_url(server.url("operator"), protocol=2) as operator:
        operator.execute_command("ACL", "SETUSER", "hermes", *rules())
    return server
