"""Which request an `Idempotency-Key` stands for: one at a time, and after a failure that passes a new one.

The id of a key's first request is made of the key, so that its journal itself remembers it. A later one has an id of
its own, which stands in the string `{ns}:i:<id of the first>`: written with its admission, and outliving its journal.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serve_app.errors import LASTING, AnswerLost, JournalUnavailable
from serve_app.journal.connection import Command, RedisLink, Reply, connect
from serve_app.journal.entries import Entry, RequestFacts, RequestLine
from serve_app.journal.reader import JournalReader
from serve_app.journal.store import JournalStore, check_admitted
from serve_app.settings import Settings

_OUTLIVES_MS = 60_000


class Condition(NamedTuple):
    """That Redis still gives these answers. The keys that can change them are watched."""

    watched: tuple[str, ...]
    questions: list[Command]
    answers: list[Reply]


class Held(NamedTuple):
    """What a key stands for at the moment.

    Args:
        request_id: of the request that it stands for, or else of the new one that a repeat is to be.
        stands: whether there is one that it stands for.
        ended: whether that one has ended.
        facts: of the last request that had this key, if one is still known.
        condition: under which a new one may be admitted.
        name: the string that is to hold the new one's id, where that is not made of the key.
    """

    request_id: str
    stands: bool
    ended: bool
    facts: RequestFacts | None
    condition: Condition
    name: str = ""


class Outrun(Exception):
    """Something has changed since one looked what a key stands for, as by another repeat."""


class KeyedRequests:
    """Requests by their keys."""

    def __init__(self, settings: Settings, store: JournalStore, link: RedisLink) -> None:
        self._settings = settings
        self._store = store
        self._link = link

    async def held(self, tenant: str, key: str) -> Held:
        """What the key of a tenant's stands for.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        first_id = f"req_{digest(tenant.encode(), key.encode())}"
        name = f"{self._settings.namespace}:i:{first_id}"
        request_id, later_id = "", first_id
        while request_id != later_id:
            request_id = later_id
            last = ("XREVRANGE", self._store.key(request_id), "+", "-", "COUNT", "1")
            questions: list[Command] = [("GET", name), last]
            # The answers are older than the outline: what is decided on it holds while they stay as they are.
            answers, entries = await asyncio.gather(self._link.call(questions), self._store.outline(request_id))
            later_id = _answered(answers)[0].decode() if answers[0] else first_id
        condition = Condition((name, self._store.key(first_id)), questions, answers)
        if not entries and request_id == first_id:
            return Held(first_id, False, False, None, condition)
        facts, ending = _known(entries or ())
        if entries and not _passes(ending):
            return Held(request_id, True, ending is not None, facts, condition)
        return Held(f"req_{secrets.token_hex(16)}", False, False, facts, condition, name)

    async def admit(
        self, held: Held, line: RequestLine, body: bytes, facts: RequestFacts, enqueue: tuple[str, Mapping[str, Any]]
    ) -> None:
        """Admit a key's next request: of many repeats at once, one is accepted.

        It takes a connection of its own (`WATCH` belongs to a connection) and two round trips more.

        Raises:
            Outrun: it was not accepted.
            JournalUnavailable: Redis cannot be reached; `AnswerLost`: and whether it was accepted is not known.
        """
        keep_ms = self._store.keep_ms(facts) + _OUTLIVES_MS
        naming: list[Command] = [("SET", held.name, held.request_id, "PX", keep_ms)] if held.name else []
        *admission, execute = self._store.admission(held.request_id, line, body, facts, enqueue)
        watched, questions, answers = held.condition
        connection = await connect(self._settings.redis)
        try:
            async with asyncio.timeout(self._settings.redis.response_timeout_s):
                _, *now = await connection.call([("WATCH", *watched), *questions])
                if now != answers:
                    raise Outrun
                replies = await connection.call([*admission, *naming, execute])
        except TimeoutError:
            raise AnswerLost("no answer from Redis") from None
        finally:
            connection.abort()
        check_admitted(replies)
        if replies[-1] is None:
            raise Outrun


def digest(*parts: bytes) -> str:
    """32 hex digits; where a part ends matters."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.hexdigest()


def _known(entries: Sequence[Entry]) -> tuple[RequestFacts | None, Entry | None]:
    """Facts and ending of a request. Only what is written ends it, never what a reader thinks of the journal."""
    reader = JournalReader()
    for entry in entries:
        reader.feed(entry)
    return reader.facts, next((entry for entry in entries if entry.ends), None)


def _passes(ending: Entry | None) -> bool:
    """Whether a request has ended in a way that a repeat need not end in."""
    return ending is not None and ending.state != "completed" and ending.reason not in LASTING


def _answered(replies: list[Reply]) -> list[Reply]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise JournalUnavailable(f"Redis: {reply}")
    return replies
