"""`/metrics` on any ingress is one page for the whole application: every process leaves its own
page in Redis, and an ingress merges them and labels each sample with its `replica`.

`{ns}:metrics:<replica>` holds a zlib-compressed Prometheus page, which expires when its process
stops renewing it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.loops import Loops
from serve_app.observability.metrics import Metrics, Telemetry
from serve_app.redis.keyspace import metrics_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import answered

log = logging.getLogger("hermes.telemetry")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Snapshots:
    """Writes this process's page, and reads all pages."""

    def __init__(
        self,
        link: RedisLink,
        namespace: str,
        replica: str,
        telemetry: Telemetry,
        period_s: float,
        loops: Loops,
    ) -> None:
        self._link = link
        self._loops = loops
        self._namespace = namespace
        self._replica = replica
        self._telemetry = telemetry
        self._period_s = period_s
        self._one = asyncio.Lock()

    async def start(self) -> None:
        self._loops.keep("metrics-snapshots", self._keep)

    async def _keep(self) -> None:
        expires_s = max(timings.SNAPSHOT_KEPT_S, round(4 * self._period_s))
        while True:
            try:
                page = await self._own()
                await self._leave(await asyncio.to_thread(zlib.compress, page, 1), expires_s)
            except RedisUnavailable as error:
                log.debug("cannot write the metrics snapshot: %s", error)
            except Exception as error:  # a collector failed: the next page may be complete
                log.error("cannot assemble the metrics page: %r", error)
            await asyncio.sleep(self._period_s)

    async def _own(self) -> bytes:
        """This process's page: one at a time, and in a thread, since vLLM's part is long."""
        async with self._one:
            return await asyncio.to_thread(self._telemetry.page)

    async def _leave(self, page: bytes, expires_s: int) -> None:
        key = metrics_key(self._namespace, self._replica)
        (reply,) = await self._link.call([("SET", key, page, "EX", expires_s)])
        answered(reply)

    async def pages(self, replicas: Iterable[str]) -> dict[str, bytes]:
        """Pages by replica: this process's own, always fresh, and those that Redis has."""
        pages = {self._replica: await self._own()}
        others = [name for name in replicas if name != self._replica]
        found: list[Any] = []
        if keys := [metrics_key(self._namespace, name) for name in others]:
            with suppress(RedisUnavailable):
                (reply,) = await self._link.call([("MGET", *keys)], large=True)
                found = answered(reply)
        return pages | await asyncio.to_thread(_unpacked, dict(zip(others, found, strict=False)))


def _unpacked(packed: Mapping[str, bytes | None]) -> dict[str, bytes]:
    """The pages that are there and can be read."""
    pages: dict[str, bytes] = {}
    for name, page in packed.items():
        try:
            pages |= {name: zlib.decompress(page)} if page else {}
        except zlib.error as error:
            log.error("ignoring malformed metrics of %s: %s", name, error)
    return pages


FORMER_NAMES = {
    "hermes_event_loop_blocks_total": "hermes_loop_held_total",
    "hermes_event_loop_lag_seconds": "hermes_loop_lag_seconds",
    "hermes_journal_buffer_bytes": "hermes_journal_kept_bytes",
    "hermes_retained_answers_bytes": "hermes_kept_answers_bytes",
    "hermes_retained_answers_limit_bytes": "hermes_kept_answers_limit_bytes",
    "hermes_tenant_deficit_cost": "hermes_tenant_behind_cost",
}
"""Families that are shown under their former names, too, until the next release."""


class _Family(NamedTuple):
    """Lines of one family: what describes it, and its samples."""

    head: list[str]
    samples: list[str]


_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.ASCII)


def merge_pages(pages: Mapping[str, bytes], extra: CollectorRegistry) -> bytes:
    """Merge pages by replica, as text: parsing a sample costs much more than adding its label.
    `extra` is added without a label. Renamed families are also shown under their former names.
    """
    families: dict[str, _Family] = {}
    for replica, page in (*pages.items(), ("", generate_latest(extra))):
        try:
            for name, found in _families_of(replica, page).items():
                families.setdefault(name, _Family(found.head, [])).samples.extend(found.samples)
        except ValueError as error:
            log.error("ignoring malformed metrics of %s: %r", replica, error)
    for name, former in FORMER_NAMES.items():
        if renamed := families.get(name):
            text = f"Former name of {name}, for one release (deprecated)."
            kind = [line.replace(name, former) for line in renamed.head if " TYPE " in line[:8]]
            copy = families.setdefault(former, _Family([f"# HELP {former} {text}", *kind], []))
            copy.samples.extend(line.replace(name, former, 1) for line in renamed.samples)
    lines = (line for one in families.values() for line in (*one.head, *one.samples))
    return "".join(f"{line}\n" for line in lines).encode()


def _families_of(replica: str, page: bytes) -> dict[str, _Family]:
    """The families of a page. Raises ValueError if it is none."""
    families: dict[str, _Family] = {}
    label = f'replica="{replica}"' if replica else ""
    name = ""
    for line in page.decode().split("\n"):
        if line.startswith("# "):
            name = line.split(" ", 3)[2]
            families.setdefault(name, _Family([], [])).head.append(line)
        elif match := _SAMPLE.fullmatch(line):
            sample, labels, value = match.groups()
            name = name if name and sample.startswith(name) else sample
            every = ",".join(filter(None, (labels, label)))
            named = f"{sample}{{{every}}} {value}" if every else line
            families.setdefault(name, _Family([], [])).samples.append(named)
        elif line:
            raise ValueError(f"no sample: {line[:100]!r}")
    return families


def queue_gauges(
    depths: Mapping[str, tuple[int, int, int, float]],
    redis_bytes: tuple[int, int] | None = None,
    kept_bytes: tuple[int, int] | None = None,
) -> CollectorRegistry:
    """The state of queue and Redis, which belongs to no single replica: by class how many wait, are
    claimed and may wait, and the age of the oldest; and bytes that are used with their limit (0:
    none), as far as Redis tells them.
    """
    registry = CollectorRegistry()
    queue = Metrics("queue", registry)
    for request_class, (depth, claimed, limit, oldest_s) in depths.items():
        queue.set("hermes_queue_depth", depth, request_class)
        queue.set("hermes_queue_claimed", claimed, request_class)
        queue.set("hermes_queue_limit", limit, request_class)
        queue.set("hermes_queue_oldest_age_seconds", oldest_s, request_class)
    if redis_bytes is not None:
        redis = Metrics("redis", registry)
        redis.set("hermes_redis_used_bytes", redis_bytes[0])
        redis.set("hermes_redis_limit_bytes", redis_bytes[1])
    if kept_bytes is not None:
        retained = Metrics("retained", registry)
        retained.set("hermes_retained_answers_bytes", kept_bytes[0])
        retained.set("hermes_retained_answers_limit_bytes", kept_bytes[1])
    return registry
