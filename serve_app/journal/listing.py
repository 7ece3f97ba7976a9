"""The latest requests of each tenant, by their admission.

It holds ids only: what became of a request is in its journal, so no ending has to be written here.
"""

from __future__ import annotations

from serve_app.contract import CHATS
from serve_app.journal.facts import RequestFacts
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import chats_key, requests_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.settings import Settings


def listing(settings: Settings, request_id: str, path: str, facts: RequestFacts) -> list[Command]:
    """The commands that list a request; the oldest ones beyond `journal.listed_requests` go."""
    keys = [requests_key(settings.namespace, facts.tenant)]
    if path == CHATS and facts.stored:
        keys.append(chats_key(settings.namespace, facts.tenant))
    ingress, journal = settings.ingress, settings.journal
    longest_s = max(ingress.max_request_timeout_s, ingress.detached_timeout_s)
    commands: list[Command] = []
    for key in keys:
        commands += [
            ("ZADD", key, facts.admitted_ms, request_id),
            ("ZREMRANGEBYRANK", key, 0, -1 - journal.listed_requests),
            ("PEXPIRE", key, int((longest_s + journal.max_retention_s) * 1000)),
        ]
    return commands


async def listed(
    link: RedisLink, key: str, after: str, at_most: int, newest_first: bool = True
) -> list[str] | None:
    """The ids in a list, those that are gone included.

    Args:
        after: the id behind which the page begins; empty for the newest.

    Returns:
        None if `after` is not listed (any more).

    Raises:
        RedisUnavailable: Redis cannot be reached.
    """
    order, first = "ZREV" if newest_first else "Z", 0
    if after:
        (rank,) = all_answered(await link.call([(f"{order}RANK", key, after)]))
        if rank is None:
            return None
        first = rank + 1
    (ids,) = all_answered(await link.call([(f"{order}RANGE", key, first, first + at_most - 1)]))
    return [request_id.decode() for request_id in ids]
