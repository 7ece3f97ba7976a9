"""The latest requests of each tenant, by their admission.

It holds ids only: what became of a request is in its journal, so no ending has to be written here.
"""

from __future__ import annotations

from serve_app.journal.facts import RequestFacts
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import requests_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.settings import Settings


def listing(settings: Settings, request_id: str, facts: RequestFacts) -> list[Command]:
    """The commands that list a request; the oldest ones beyond `journal.listed_requests` go."""
    key = requests_key(settings.namespace, facts.tenant)
    ingress, journal = settings.ingress, settings.journal
    longest_s = max(ingress.max_request_timeout_s, ingress.detached_timeout_s)
    return [
        ("ZADD", key, facts.admitted_ms, request_id),
        ("ZREMRANGEBYRANK", key, 0, -1 - journal.listed_requests),
        ("PEXPIRE", key, int((longest_s + journal.max_retention_s) * 1000)),
    ]


async def listed(
    settings: Settings, link: RedisLink, tenant: str, after: str, at_most: int
) -> list[str] | None:
    """The ids of a tenant's requests, newest first, those that are gone included.

    Args:
        after: the id behind which the page begins; empty for the newest.

    Returns:
        None if `after` is not listed (any more).

    Raises:
        RedisUnavailable: Redis cannot be reached.
    """
    key, first = requests_key(settings.namespace, tenant), 0
    if after:
        (rank,) = all_answered(await link.call([("ZREVRANK", key, after)]))
        if rank is None:
            return None
        first = rank + 1
    (ids,) = all_answered(await link.call([("ZREVRANGE", key, first, first + at_most - 1)]))
    return [request_id.decode() for request_id in ids]
