"""Delivers what waits in the outbox, in every ingress. Any of them may die at any time: what it has
not settled is due again after the lease of its route.

A route, of one receiver and one tenant, is held by one ingress, which posts a few of its deliveries
at a time. If all of those fail, the route pauses: a dead receiver costs one look a minute, however
much waits for it, and takes nobody else's place.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.errors import RedisUnavailable
from serve_app.loops import Loops, ended, jittered
from serve_app.observability.logs import Outage, about
from serve_app.observability.metrics import Telemetry
from serve_app.settings.webhooks import WebhookSettings
from serve_app.webhooks.events import pause_s
from serve_app.webhooks.outbox import DeliveryResult, Filed, Outbox, WaitingDelivery
from serve_app.webhooks.post import Answered, Poster

log = logging.getLogger("hermes.webhooks")

_MAX_DOWN = 10_000


class Sender:
    """That of one ingress; it does nothing where the settings name no receiver."""

    def __init__(
        self,
        settings: WebhookSettings,
        outbox: Outbox,
        clock: RedisClock,
        loops: Loops,
        telemetry: Telemetry,
    ) -> None:
        self._settings, self._outbox, self._clock = settings, outbox, clock
        self._loops, self._telemetry = loops, telemetry
        self._poster = Poster(settings, clock)
        self._outage = Outage(log, "webhooks: Redis cannot be used")
        self._running: list[asyncio.Task[None]] = []
        self._working: dict[str, asyncio.Task[None]] = {}
        self._alike: Counter[str] = Counter()
        """How many of these routes each host and each tenant has."""
        self._down: set[str] = set()
        """Receivers that have failed lately."""

    async def start(self) -> None:
        if self._settings.used:
            self._running = [self._loops.keep("webhooks", self._run)]

    async def stop(self) -> None:
        """Let go of the routes, so that no other ingress waits for the end of their leases."""
        await self._loops.end(*self._running)
        held = list(self._working)
        await ended(self._working.values())
        try:
            await asyncio.gather(*(self._outbox.settle(route, (), go_on=False) for route in held))
        except RedisUnavailable as error:
            log.debug("webhooks: routes stay held: %s", error)
        await self._poster.stop()

    async def _run(self) -> None:
        await self._poster.start()
        while True:
            try:
                await self._outbox.news(jittered(timings.WEBHOOK_LOOK_S))
                await self._look()
                self._outage.over()
            except RedisUnavailable as error:
                self._outage.failed(error)
                await asyncio.sleep(jittered(timings.WEBHOOK_LOOK_S))

    async def _look(self) -> None:
        """Sort what is new, and take up what is due."""
        while True:
            filed = await self._outbox.file()
            self._show(filed)
            room = timings.WEBHOOK_ROUTES - len(self._working)
            taken = await self._outbox.take(room) if room else {}
            await asyncio.gather(*(self._put_off(*one) for one in self._take_up(taken)))
            if not room:
                await asyncio.wait(self._working.values(), return_when=asyncio.FIRST_COMPLETED)
            elif filed.events < timings.WEBHOOK_EVENTS_A_LOOK and len(taken) < room:
                return

    def _take_up(
        self, taken: Mapping[str, Sequence[WaitingDelivery]]
    ) -> Iterator[tuple[str, Sequence[WaitingDelivery]]]:
        """Begin to work on routes. Returns those for which there is no room."""
        for route, due in taken.items():
            alike = due[0].delivery.where, f"|{due[0].delivery.tenant}"
            if any(self._alike[one] >= timings.WEBHOOK_ROUTES_ALIKE for one in alike):
                yield route, due
            elif route not in self._working:
                self._alike.update(alike)
                task = asyncio.create_task(self._work(route, due), name=f"webhooks-{route}")
                self._working[route] = task
                task.add_done_callback(partial(self._let_go, route, alike))

    async def _put_off(self, route: str, due: Sequence[WaitingDelivery]) -> None:
        down = due[0].delivery.where in self._down
        pause = timings.WEBHOOK_PAUSE_S if down else timings.WEBHOOK_CROWDED_S
        await self._outbox.settle(route, (), jittered(pause))

    def _let_go(self, route: str, alike: Sequence[str], _: object) -> None:
        del self._working[route]
        self._alike.subtract(alike)
        for one in alike:
            if not self._alike[one]:
                del self._alike[one]

    async def _work(self, route: str, due: Sequence[WaitingDelivery]) -> None:
        """Deliver what is due in a route, until nothing is, or all of it has failed."""
        try:
            while due:
                results = await asyncio.gather(*map(self._try, due))
                failed_s = [result.again_s for result in results if result.again_s]
                all_failed = len(failed_s) == len(results)
                self._note(due[0].delivery.where, all_failed)
                pause = min(*failed_s, jittered(timings.WEBHOOK_PAUSE_S)) if all_failed else 0.0
                due = await self._outbox.settle(route, results, pause)
        except RedisUnavailable as error:  # the same are tried again after the lease
            self._outage.failed(error)

    def _note(self, where: str, failed: bool) -> None:
        if len(self._down) >= _MAX_DOWN:
            self._down.clear()
        (self._down.add if failed else self._down.discard)(where)

    async def _try(self, waiting: WaitingDelivery) -> DeliveryResult:
        delivery = waiting.delivery
        answered = await self._poster.post(delivery)
        extra = about(tenant=delivery.tenant)
        told = delivery.event_id, delivery.event, delivery.where
        if not answered.problem:
            self._telemetry.count("hermes_webhooks_delivered", delivery.event)
            log.info("webhook %s %s delivered to %s", *told, extra=extra)
            return DeliveryResult(waiting)
        self._telemetry.count("hermes_webhook_failures", answered.problem)
        age_s = max(0.0, self._clock.now_s() - waiting.since_ms / 1000)
        if dead := _dead(answered, age_s, self._settings.give_up_after_s):
            self._telemetry.count("hermes_webhooks_dead", dead)
            log.warning("webhook %s %s to %s is dead: %s", *told, answered.text, extra=extra)
            return DeliveryResult(waiting, dead=dead)
        again_s = pause_s(age_s, answered.later_s)
        text = "webhook %s %s to %s failed, next try in %.0f s: %s"
        log.info(text, *told, again_s, answered.text, extra=extra)
        return DeliveryResult(waiting, again_s)

    def _show(self, filed: Filed) -> None:
        age_s = max(0.0, self._clock.now_s() - filed.oldest_ms / 1000) if filed.waiting else 0.0
        self._telemetry.set("hermes_webhooks_waiting", filed.waiting)
        self._telemetry.set("hermes_webhooks_oldest_age_seconds", age_s)
        if filed.dead:
            self._telemetry.count("hermes_webhooks_dead", "too_many", by=filed.dead)
            log.warning("webhook: %d events are dead: too many wait", filed.dead)
        if filed.lost:
            self._telemetry.count("hermes_webhooks_dead", "lost", by=filed.lost)
            log.error("webhook: lost %d events: too many came while no ingress ran", filed.lost)


def _dead(answered: Answered, age_s: float, give_up_after_s: float) -> str:
    """Why no other try is made, or nothing."""
    if answered.gone:
        return "gone"
    return "given_up" if age_s >= give_up_after_s else ""
