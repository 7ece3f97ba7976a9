"""Pages of metrics: merging those of many processes, and the gauges that belong to none of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

log = logging.getLogger("hermes.telemetry")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OF_REDIS = (
    ("hermes_redis_used_bytes", "Redis's used memory, as counted towards its limit."),
    ("hermes_redis_limit_bytes", "Redis's `maxmemory`; 0 if there is none."),
)
_OF_RETAINED = (
    (
        "hermes_retained_answers_bytes",
        "Memory in Redis of the answers that are retained for later reading.",
    ),
    (
        "hermes_retained_answers_limit_bytes",
        "Most memory in Redis for answers retained for later reading; 0 if Redis has no limit.",
    ),
)
FORMER_NAMES = {
    "hermes_event_loop_blocks": "hermes_loop_held",
    "hermes_event_loop_lag_seconds": "hermes_loop_lag_seconds",
    "hermes_journal_buffer_bytes": "hermes_journal_kept_bytes",
    "hermes_retained_answers_bytes": "hermes_kept_answers_bytes",
    "hermes_retained_answers_limit_bytes": "hermes_kept_answers_limit_bytes",
    "hermes_tenant_deficit_cost": "hermes_tenant_behind_cost",
}
"""Families that are shown under their former names, too, until the next release."""


class _Families:
    """Already collected families, as a collector."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return list(self._families.values())


def merge_pages(pages: Mapping[str, bytes], extra: CollectorRegistry) -> bytes:
    """Merge pages: every sample gets a label `replica` with the name of its page. `extra` is added
    unchanged. Renamed families are also shown under their former names.
    """
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in _families_of(replica, page):
            target = families.get(family.name)
            if target is None:
                target = families[family.name] = Metric(
                    family.name, family.documentation, family.type
                )
            for sample in family.samples:
                target.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    families |= {family.name: family for family in extra.collect()}
    for name, former in FORMER_NAMES.items():
        if name in families:
            renamed, text = families[name], f"Former name of {name}, for one release (deprecated)."
            copy = families.setdefault(former, Metric(former, text, renamed.type))
            copy.samples += [
                sample._replace(name=sample.name.replace(name, former))
                for sample in renamed.samples
            ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


def _families_of(replica: str, page: bytes) -> list[Metric]:
    """The families of a page; none if the page cannot be parsed, so that the others are still
    shown.
    """
    try:
        return list(text_string_to_metric_families(page.decode()))
    except (ValueError, LookupError) as error:
        log.error("ignoring malformed metrics of %s: %r", replica, error)
        return []


def queue_gauges(
    depths: Mapping[str, tuple[int, int, int, float]],
    redis_bytes: tuple[int, int] | None = None,
    kept_bytes: tuple[int, int] | None = None,
) -> CollectorRegistry:
    """The state of queue and Redis, which belongs to no single replica.

    Args:
        depths: `{class: (waiting, claimed, limit, oldest_s)}`.
        redis_bytes: Redis's used memory and its limit (0: none); None if Redis does not report
            them.
        kept_bytes: what retained answers occupy, and their bound (0: none); None if
            Redis cannot be reached.
    """
    registry = CollectorRegistry()
    waiting = Gauge(
        "hermes_queue_depth",
        "Requests that wait in the queue and that no ingress has claimed.",
        ["class"],
        registry=registry,
    )
    claimed = Gauge(
        "hermes_queue_claimed",
        "Requests that an ingress has claimed and that have not ended.",
        ["class"],
        registry=registry,
    )
    limit = Gauge(
        "hermes_queue_limit",
        "Most requests that may wait; more are refused.",
        ["class"],
        registry=registry,
    )
    oldest = Gauge(
        "hermes_queue_oldest_age_seconds",
        "Age of the oldest request that no ingress has claimed.",
        ["class"],
        registry=registry,
    )
    for name, (n_waiting, n_claimed, bound, oldest_s) in depths.items():
        waiting.labels(name).set(n_waiting)
        claimed.labels(name).set(n_claimed)
        limit.labels(name).set(bound)
        oldest.labels(name).set(oldest_s)
    for (name, text), value in (
        *zip(_OF_REDIS, redis_bytes or (), strict=False),
        *zip(_OF_RETAINED, kept_bytes or (), strict=False),
    ):
        Gauge(name, text, registry=registry).set(value)
    return registry
