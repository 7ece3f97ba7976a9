"""Whether Redis still knows after a restart what it was told in a transaction.

Admissions are transactions. Redis before 8.4 (Valkey before mid 2026) replays the transactions of its append-only file
with the rights of the user `default`, and drops those that `default` has no rights for; only its own log says so.
So one key is written inside of a transaction and one outside, and after a restart they tell what Redis forgets.

Keys, of all ingresses together: `{ns}:probe:transaction` and `{ns}:probe:command` hold the `run_id` of the Redis that
took them; `{ns}:probe:forgot` holds the sentence about what was forgotten, until a restart at which nothing was.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from redis.asyncio import Redis

from serve_app.errors import JournalUnavailable
from serve_app.journal.client import reaching
from serve_app.telemetry import Telemetry

log = logging.getLogger("hermes.journal")

LOOK_S = 2.0

TRANSACTIONS = (
    "Redis has restarted and dropped every transaction of its append-only file, so what was accepted before is lost. "
    "Its user 'default' needs all rights even where nobody may log in as it: `user default off +@all ~* &*`."
)
EVERYTHING = (
    "Redis has restarted and forgotten everything, so what was accepted before is lost. "
    "It needs `appendonly yes` and a folder that outlives it."
)


def forgotten(known: str, run_id: str, transaction: str, command: str) -> str:
    """What a restart has cost, as a sentence; empty where it cost nothing.

    Args:
        known: run id of the Redis that both keys were seen in; empty where they never were.
        run_id: of the Redis that answers now.
        transaction: what it has of the key written in a transaction; empty where it has none.
        command: what it has of the other key.
    """
    if known in ("", run_id) or transaction:
        return ""
    return TRANSACTIONS if command else EVERYTHING


class Durability:
    """Writes the keys, and looks for them after a restart. `problem`: what is wrong, for whoever runs this Redis."""

    def __init__(self, redis: Redis, namespace: str, telemetry: Telemetry) -> None:
        self._redis = redis
        self._transaction, self._command, self._forgot = (
            f"{namespace}:probe:{name}" for name in ("transaction", "command", "forgot")
        )
        self._telemetry = telemetry
        self._known = ""
        self.problem = ""

    async def keep_looking(self) -> None:
        """Look for ever. A Redis that is away is asked again."""
        while True:
            try:
                await self.look()
            except JournalUnavailable as error:
                log.debug("durability unknown: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """One round trip; after a start of Redis two.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.info("server")
        pipeline.mget(self._transaction, self._command, self._forgot)
        server, values = await reaching(lambda: pipeline.execute())
        run_id: str = server["run_id"]
        transaction, command, told = (value.decode() if value else "" for value in values)
        if transaction == run_id:  # nothing new, or another ingress was first; older than a period: it is on the disk
            self._known = run_id
            self._tell(told)
            return
        lost = forgotten(self._known, run_id, transaction, command)
        await self._write(run_id, lost)
        self._tell(lost)

    async def _write(self, run_id: str, lost: str) -> None:
        first: Any = self._redis.pipeline(transaction=False)
        first.set(self._command, run_id)
        if lost:
            first.set(self._forgot, lost)
        else:
            first.delete(self._forgot)
        await reaching(lambda: first.execute())
        # Last: whoever finds it takes the others for written. Two commands, or redis-py would send it as a plain one.
        transaction = self._redis.pipeline(transaction=True)
        transaction.set(self._transaction, run_id)
        transaction.persist(self._transaction)
        await reaching(lambda: transaction.execute())

    def _tell(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.error("journal: %s", problem)
        self.problem = problem
        self._telemetry.redis_forgets(bool(problem))
