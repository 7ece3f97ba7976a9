"""Checks whether Redis still has, after a restart, what it accepted in a transaction.

Admissions are transactions. Redis before 8.4 (Valkey before mid 2026) replays the transactions of
its append-only file with the permissions of the user `default`, and drops those that `default` may
not execute; only its own log says so. So the service writes one Redis key inside a transaction and
one outside. After a restart, these show what Redis has lost.

Keys, shared by all ingresses: `{ns}:probe:transaction` and `{ns}:probe:command` hold the `run_id`
of the Redis that accepted them; `{ns}:probe:forgot` holds a sentence about what was lost, until a
restart that lost nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from redis.asyncio import Redis

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.observability.metrics import Telemetry
from serve_app.redis.client import redis_call
from serve_app.redis.keyspace import probe_key

log = logging.getLogger("hermes.journal")


TRANSACTIONS = (
    "Redis has restarted and dropped every transaction of its append-only file, so what was "
    "accepted before is lost. Its user 'default' needs all rights even where nobody may log in "
    "as it: `user default off +@all ~* &*`."
)
EVERYTHING = (
    "Redis has restarted and forgotten everything, so what was accepted before is lost. "
    "It needs `appendonly yes` and a folder that outlives it."
)


def forgotten(known: str, run_id: str, transaction: str, command: str) -> str:
    """What a restart has lost, as a sentence; empty if it lost nothing.

    Args:
        known: run id of the Redis in which both keys were seen; empty if they never were.
        run_id: of the Redis that answers now.
        transaction: the value of the key written in a transaction; empty if it is missing.
        command: the value of the other key; empty if it is missing.
    """
    if known in ("", run_id) or transaction:
        return ""
    return TRANSACTIONS if command else EVERYTHING


class Durability:
    """Writes the keys, and checks them after a restart. `problem` is a sentence for Redis's
    operator.
    """

    def __init__(self, redis: Redis, namespace: str, telemetry: Telemetry) -> None:
        self._redis = redis
        self._transaction, self._command, self._forgot = (
            probe_key(namespace, name) for name in ("transaction", "command", "forgot")
        )
        self._telemetry = telemetry
        self._known = ""
        self.problem = ""

    async def keep_looking(self) -> None:
        """Check forever. If Redis is unreachable, it is asked again later."""
        while True:
            try:
                await self.look()
            except RedisUnavailable as error:
                log.debug("cannot check Redis's durability: %s", error)
            await asyncio.sleep(timings.DURABILITY_LOOK_S)

    async def look(self) -> None:
        """Check in one round trip, or in two after a restart of Redis.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.info("server")
        pipeline.mget(self._transaction, self._command, self._forgot)
        server, values = await redis_call(lambda: pipeline.execute())
        run_id: str = server["run_id"]
        transaction, command, told = (value.decode() if value else "" for value in values)
        if (
            transaction == run_id
        ):  # nothing new, or another ingress was first; older than a period, so it is on disk
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
        await redis_call(lambda: first.execute())
        # Last, because a process that finds it assumes that the others are written. Two commands,
        # because redis-py would send a single one without a transaction.
        transaction = self._redis.pipeline(transaction=True)
        transaction.set(self._transaction, run_id)
        transaction.persist(self._transaction)
        await redis_call(lambda: transaction.execute())

    def _tell(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.error("journal: %s", problem)
        self.problem = problem
        self._telemetry.redis_forgets(bool(problem))
