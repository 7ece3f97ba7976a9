"""Sends a request that was given up again, as a new one."""

from __future__ import annotations

import secrets

import msgspec

from serve_app.admission.transaction import accept
from serve_app.cli.console import CommandFailed
from serve_app.errors import RedisUnavailable
from serve_app.journal.store import JournalStore
from serve_app.policy.work import work_of
from serve_app.redis.client import connect_redis
from serve_app.redis.link import RedisLink
from serve_app.request_queue.dead_letters import DeadLetter, DeadLetters
from serve_app.request_queue.queue import RequestQueue
from serve_app.request_queue.streams import QueueStreams
from serve_app.settings import Settings


async def redrive(
    settings: Settings, link: RedisLink, dead: DeadLetters, letter: DeadLetter
) -> str:
    """Admit the request as a new one, then delete the letter. Dying in between leaves a letter, and
    loses nothing.

    Returns:
        The new request's id.

    Raises:
        CommandFailed: Redis failed; the message says what is known of the request.
    """
    request_id = f"req_{secrets.token_hex(16)}"
    now_ms = await _redis_ms(link)
    facts = msgspec.structs.replace(
        letter.facts,
        admitted_ms=now_ms,
        deadline_ms=now_ms + letter.facts.deadline_ms - letter.facts.admitted_ms,
        wake="",  # no ingress holds a connection for it
        idempotency="",  # the idempotency key belongs to the request that failed
        detached=True,
        retention_s=letter.facts.retention_s or settings.journal.detached_retention_s,
    )
    work = work_of(letter.line.path, letter.body, msgspec.json.decode(letter.body))
    async with connect_redis(settings.redis) as redis:  # it connects only when a command is sent
        streams = QueueStreams(redis, link, settings.namespace, facts.model, dead)
        enqueueing = RequestQueue(streams, consumer="").enqueueing(request_id, facts, work)
    first = JournalStore(settings, link).first_entry(request_id, letter.line, letter.body, facts)
    try:
        await accept(link, enqueueing, first)
    except RedisUnavailable as error:
        raise CommandFailed(
            f"{letter.request_id} was perhaps not sent again (as {request_id}): {error}"
        ) from None
    try:
        await dead.remove(letter.request_id)
    except RedisUnavailable as error:
        raise CommandFailed(
            f"{letter.request_id} was sent again as {request_id}, but its letter is still there: "
            f"{error}"
        ) from None
    return request_id


async def _redis_ms(link: RedisLink) -> int:
    try:
        ((seconds, microseconds),) = await link.call([("TIME",)])
    except RedisUnavailable as error:
        raise CommandFailed(str(error)) from None
    return int(seconds) * 1000 + int(microseconds) // 1000
