"""Which request an `Idempotency-Key` stands for: one at a time, and a new one after a temporary
failure.

The id of the first request with a key derives from the key, so its journal itself remembers the
key. A later request has an id of its own, to which the string `{ns}:i:<id of the first>` points.
The admission writes this string, and it outlives the journal that it points to.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import NamedTuple

from serve_app import timings
from serve_app.contract import State
from serve_app.errors import REASONS
from serve_app.journal.entries import Entry, RequestFacts
from serve_app.policy.tenant_limits import Standing
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import later_request_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.requests.lifecycle import Answer, Condition, Offer, accept, keep_ms, reading
from serve_app.requests.record import Record
from serve_app.requests.store import JournalStore
from serve_app.settings import Settings


class Held(NamedTuple):
    """What an idempotency key stands for at the moment.

    Args:
        request_id: the request that the key stands for; otherwise the id for the next request.
        stands: whether the key stands for a request.
        ended: whether that request has ended.
        facts: of the last request with this key, if it is still known.
        condition: under which a new request may be admitted.
        name: the string that will hold the new request's id, if that does not derive from the key.
        presumed: whether this was not read; most keys are used once.
    """

    request_id: str
    stands: bool
    ended: bool
    facts: RequestFacts | None
    condition: Condition
    name: str = ""
    presumed: bool = False


class Outrun(Exception):
    """Something has changed since the key was read; for example, another repeat was faster.
    `standing`: see `Answer`.
    """

    def __init__(self, standing: Standing | None = None) -> None:
        super().__init__()
        self.standing = standing


class KeyedRequests:
    """Requests by their idempotency keys."""

    def __init__(self, settings: Settings, store: JournalStore, link: RedisLink) -> None:
        self._settings = settings
        self._store = store
        self._link = link

    def presumed(self, tenant: str, key: str) -> Held:
        """What a tenant's key stands for if it was never used."""
        its_id = first_id(tenant, key)
        keys = (later_request_key(self._settings.namespace, its_id), self._store.key(its_id))
        return Held(its_id, False, False, None, Condition(keys), presumed=True)

    async def held(self, tenant: str, key: str) -> Held:
        """Read what a tenant's key stands for."""
        its_id = first_id(tenant, key)
        name = later_request_key(self._settings.namespace, its_id)
        request_id, later_id = "", its_id
        while request_id != later_id:
            request_id = later_id
            questions = [("GET", name), reading(self._store.key(request_id))]
            named, found = all_answered(await self._link.call(questions))
            record = Record.from_redis(found)
            later_id = named.decode() if named else its_id
        keys = (name, self._store.key(request_id))
        condition = Condition(keys, named or b"", str(record.last.id).encode() if record else b"")
        if record is None and request_id == its_id:
            return Held(its_id, False, False, None, condition)
        facts = record.facts if record else None
        if record and not _passes(record.last):
            return Held(request_id, True, record.ended, facts, condition)
        return Held(f"req_{secrets.token_hex(16)}", False, False, facts, condition, name)

    async def accept(self, held: Held, offer: Offer) -> Answer:
        """Accept the next request of a key; of several simultaneous repeats, one is accepted, and
        the others raise `Outrun`.
        """
        kept_ms = keep_ms(self._settings, offer.facts) + timings.KEY_OUTLIVES_MS
        naming: list[Command] = (
            [("SET", held.name, held.request_id, "PX", kept_ms)] if held.name else []
        )
        answer = await accept(self._link, self._settings, offer, held.condition, naming)
        if not (answer.request_id or answer.refused or offer.asks):
            raise Outrun(answer.standing)
        return answer


def first_id(tenant: str, key: str) -> str:
    """The id of the first request of a tenant with this key."""
    return f"req_{digest(tenant.encode(), key.encode())}"


def digest(*parts: bytes) -> str:
    """32 hex digits over the parts; where one part ends and the next begins matters."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.hexdigest()


def _passes(last: Entry) -> bool:
    """Whether a request failed for a temporary reason, so that a repeat may succeed."""
    if not last.ends or last.state is State.COMPLETED:
        return False
    return last.reason is None or not REASONS[last.reason].lasting
