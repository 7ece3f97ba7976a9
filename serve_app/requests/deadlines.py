"""Ends the requests whose deadline has passed.

The worker that runs a request ends it itself (`workers/attempt.py`); a client that hears nothing
because Redis is away is answered by its connection (`ingress/exchange.py`).
"""

from __future__ import annotations

import logging
from functools import partial

from serve_app import timings
from serve_app.contract import Reason
from serve_app.errors import Unreadable
from serve_app.loops import Loops, repeat
from serve_app.observability.logs import Outage
from serve_app.redis.keyspace import due_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.requests.endings import Endings

log = logging.getLogger("hermes.endings")


class Deadlines:
    """Ends the requests whose deadline has passed, whatever they wait for and whoever has died.

    Those that have not ended are in `{ns}:due`, by their deadlines, which the scripts of their
    acceptance and of their end write. A worker ends what it runs itself; this comes a moment later.
    """

    def __init__(self, link: RedisLink, namespace: str, endings: Endings, loops: Loops) -> None:
        self._link = link
        self._key = due_key(namespace)
        self._endings = endings
        self._loops = loops

    async def start(self) -> None:
        outage = Outage(log, "deadlines: cannot search for requests")
        sweeping = partial(repeat, timings.DEADLINE_SWEEP_S, self.sweep, outage)
        self._loops.keep("deadlines", sweeping)

    async def sweep(self) -> None:
        """End some of the requests whose deadline has passed, and forget those that have ended or
        are gone. What several ingresses end at a time ends once. A machine's own clock, which may
        be wrong by hours, ends nothing.
        """
        clock = self._endings.store.clock
        if not clock.known:
            return
        late_ms = clock.now_ms() - int(timings.DEADLINE_GRACE_S * 1000)
        page = ("LIMIT", 0, timings.OVERDUE_A_LOOK)
        asked = ("ZRANGEBYSCORE", self._key, "-inf", late_ms, *page)
        (found,) = all_answered(await self._link.call([asked]))
        late = [request_id.decode() for request_id in found]
        over: list[str] = []
        for request_id, record in zip(late, await self._endings.store.records(late), strict=True):
            try:
                if record is None or record.ended:
                    over.append(request_id)
                else:
                    await self._endings.end(request_id, Reason.DEADLINE, record)
            except Unreadable as error:  # whoever claims it keeps it as a dead letter
                log.error("request %s has a journal that cannot be read: %r", request_id, error)
                over.append(request_id)
        if over:
            all_answered(await self._link.call([("ZREM", self._key, *over)]))
