"""Ends what waits for a model that nobody serves any more, such as for its old name after an
upgrade that has renamed it. Nobody else would: every ingress claims from its own model's queues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from serve_app import timings
from serve_app.cluster.entrance import Entrance
from serve_app.cluster.members import Members
from serve_app.contract import Reason
from serve_app.errors import Unreadable
from serve_app.foundation import Foundation
from serve_app.loops import repeat
from serve_app.observability.logs import Outage
from serve_app.policy.classes import CLASSES
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import models_key, open_batches_key, queue_key
from serve_app.redis.replies import all_answered, with_fields
from serve_app.request_queue import decode_request_id, deletion, text
from serve_app.requests.endings import Endings

log = logging.getLogger("hermes.dispatcher")


@dataclass(eq=False)
class Unserved:
    """Looks after the queues of the models that `entrance` says nobody serves. What several
    ingresses end at a time ends once.
    """

    _base: Foundation
    _endings: Endings
    _entrance: Entrance
    _members: Callable[[], Members]

    def __post_init__(self) -> None:
        self._link, self._namespace = self._base.link, self._base.settings.namespace
        self._looked_to: dict[str, str] = {}
        """By queue: the last entry of the last look, if more come behind it."""

    async def start(self) -> None:
        outage = Outage(log, "unserved models: cannot search their queues")
        sweeping = partial(repeat, timings.UNSERVED_LOOK_S, self.sweep, outage)
        self._base.loops.keep("unserved-models", sweeping)

    async def sweep(self) -> None:
        """End a part of what waits for each such model, and forget the model once nothing does and
        its batches are over, which whoever leads for another model ends.

        Nothing is ended while it is not certain who lives.
        """
        members = self._members()
        if not members.trusted:
            return
        for model in self._entrance.unserved:
            if any(one.model == model for one in members.ingresses):
                continue
            parts = [await self._end_some(model, name, members.living) for name in CLASSES]
            asked = ("ZCARD", open_batches_key(self._namespace, model))
            if not sum([*parts, *all_answered(await self._link.call([asked]))]):
                await self._link.call([("ZREM", models_key(self._namespace), model)])

    async def _end_some(self, model: str, request_class: str, living: frozenset[str]) -> int:
        """End requests of one queue, claimed or not. Returns how many there were, without those
        that cannot be read.
        """
        queue = queue_key(self._namespace, model, request_class)
        first, most = self._looked_to.pop(queue, "-"), timings.UNSERVED_A_LOOK
        gone_ms = self._base.clock.now_ms() - timings.MODEL_GONE_MS
        looked: list[Command] = [
            ("XRANGE", queue, first, "+", "COUNT", most),
            ("ZRANGEBYSCORE", models_key(self._namespace), "-inf", gone_ms),
        ]
        items, unserved = all_answered(await self._link.call(looked))
        if model.encode() not in unserved:  # somebody has come back, who may have accepted these
            return 1
        if len(items) == most:
            self._looked_to[queue] = f"({text(items[-1][0])}"
        named = {
            text(entry_id): request_id
            for entry_id, fields in map(with_fields, items)
            if (request_id := decode_request_id(fields))
        }
        records = await self._base.store.records([*named.values()]) if named else []
        over: list[Command] = []
        found = ended = 0
        for (entry_id, request_id), record in zip(named.items(), records, strict=True):
            try:
                if record and not record.ended:
                    if record.attempt and record.attempt.replica in living:
                        found += 1
                        continue
                    ended += await self._endings.end(request_id, Reason.MODEL_NOT_FOUND, record)
                found += 1
                over += deletion(queue, entry_id)
            except Unreadable as error:
                log.debug("request %s cannot be read: %r", request_id, error)
        if over:
            await self._link.call(over)
        if ended:
            log.warning("nobody serves the model of %s any more: ended %d requests", queue, ended)
        return found or int(len(items) == most or first != "-")
