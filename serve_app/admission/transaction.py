"""The transaction that accepts a request: it writes journal, body and queue entry, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.redis.connection import Command
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import Reply, all_answered


async def accept(link: RedisLink, commands: Sequence[Command]) -> None:
    """Send the commands as one transaction, in one round trip. When it returns, the request is
    accepted.

    Raises:
        RedisUnavailable: nothing was accepted; if it is `AnswerLost`, that is unknown.
    """
    replies: list[Reply] = await link.call([("MULTI",), *commands, ("EXEC",)])
    all_answered([*replies, *(replies[-1] if isinstance(replies[-1], list) else [])])
