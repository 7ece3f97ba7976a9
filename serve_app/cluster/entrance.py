"""Whose a namespace is, and which models are served there: asked with every renewal of a lease."""

from __future__ import annotations

import logging
from typing import Any

from serve_app import timings
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import cluster_key, models_key, service_key
from serve_app.redis.replies import owned_by_another

log = logging.getLogger("hermes.membership")

_ENTER = """
local held, mine, how = redis.call('GET', KEYS[1]), ARGV[1], ARGV[2]
if mine ~= '' and (held == mine or (not held and how ~= 'wait')) then
  redis.call('SET', KEYS[1], mine, 'PX', ARGV[3])
  held = mine
end
if mine ~= '' and held ~= mine and how ~= 'stay' then return {held or ''} end
redis.call('SET', KEYS[2], ARGV[4], 'NX', 'PX', ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('ZADD', KEYS[3], ARGV[6], ARGV[7])
local unserved = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', ARGV[8], 'LIMIT', 0, ARGV[9])
return {held or '', redis.call('GET', KEYS[2]), unserved}
"""
"""KEYS: the service, this Ray cluster, the models. ARGV: the service's name; `try`, `wait` (take no
name that is free) or `stay`; its lifetime in ms; since when the Ray cluster is there, unless Redis
knows, and how long it knows that; the time now; the model; a time, and how many models to name that
nobody has served since then. Returns the name of the namespace's service; if the ingress may be
there, also since when its Ray cluster is, and those models.
"""

_MODELS_AT_ONCE = 32


class Entrance:
    """How an ingress enters its namespace, and stays there: one script, sent with every renewal of
    its lease, says which service the namespace belongs to, since when this Ray cluster is there,
    and which models are served.

    Redis decides who of two services that start at the same time is let in. The other one is told
    nothing of the members and takes no lease: it claims nothing, and answers nothing. If `service`
    is empty, the namespace may be anybody's.
    """

    def __init__(self, namespace: str, service: str, cluster: str, model: str) -> None:
        self._namespace = namespace
        self._service = service
        self._model = model
        cluster_at = cluster_key(namespace, cluster)
        self._keys = (service_key(namespace), cluster_at, models_key(namespace))
        self.let_in = False
        """Whether it may claim and answer. Whoever was let in stays: to end a service that runs
        because of another one's settings would be worse than two in one namespace.
        """
        self.refused = ""
        """Why it is not let in, in a sentence."""
        self.warnings: tuple[str, ...] = ()
        self.since_ms = 0
        """When its Ray cluster entered the namespace, by Redis's clock in Unix milliseconds."""
        self.unserved: tuple[str, ...] = ()
        """Models that no ingress (of this version or a later one) has served lately."""

    def command(self, now_ms: int, certain: bool = False) -> Command:
        """What asks Redis. `certain`: whether a service whose name has gone is dead. After an
        outage of Redis it may only have been unable to renew it.
        """
        how = "stay" if self.let_in else "wait" if self.refused and not certain else "try"
        gone_ms = now_ms - timings.MODEL_GONE_MS
        return (
            *("EVAL", _ENTER, len(self._keys), *self._keys),
            *(self._service, how, timings.SERVICE_KNOWN_MS),
            *(self.since_ms or now_ms, timings.CLUSTER_KNOWN_MS),
            *(now_ms, self._model, gone_ms, _MODELS_AT_ONCE),
        )

    def answered(self, reply: list[Any]) -> None:
        another = owned_by_another(self._namespace, reply[0], self._service)
        if len(reply) == 1:
            said = self.refused
            if another:
                after_s = timings.SERVICE_KNOWN_MS // 1000
                self.refused = (
                    f"{another}: choose another namespace; this one is free {after_s} s after the "
                    "last ingress of that service has ended"
                )
            if self.refused != said:
                log.error("membership: not let in: %s", self.refused)
            return
        _, since, unserved = reply
        if self.refused:
            log.info("membership: let in")
        self.let_in, self.refused = True, ""
        self.since_ms = int(since) if since.isdigit() else 0
        self.unserved = tuple(model.decode(errors="replace") for model in unserved)
        warnings = (f"{another}: each answers the other's requests",) if another else ()
        if warnings and warnings != self.warnings:
            log.warning("membership: %s", warnings[0])
        self.warnings = warnings
