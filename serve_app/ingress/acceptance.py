"""Submits a request for a connection that waits for the answer, and follows the accepted
request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from serve_app import timings
from serve_app.admission.admission import Admission
from serve_app.admission.submission import Submission
from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable, RequestRefused
from serve_app.ingress.disconnects import Disconnects
from serve_app.journal.facts import RequestFacts
from serve_app.journal.followers import Follower, Followers
from serve_app.loops import ended
from serve_app.observability.logs import about
from serve_app.redis.check import RedisWatch

log = logging.getLogger("hermes.ingress")


class Acceptance:
    """Accepts the requests of one ingress's connections.

    Args:
        redis: whether a request could be answered at all.
        within_s: how long accepting a request may take.
    """

    def __init__(
        self,
        admission: Admission,
        followers: Followers,
        disconnects: Disconnects,
        redis: RedisWatch,
        within_s: float,
    ) -> None:
        self._admission = admission
        self._followers = followers
        self._disconnects = disconnects
        self._redis = redis
        self._within_s = within_s
        self._waiting: set[asyncio.Task[None]] = set()

    async def accept(self, submission: Submission) -> tuple[Follower, RequestFacts]:
        """Submit a request, or join the earlier one that it repeats.

        Returns:
            The follower that reads its journal, and the request's facts.

        Raises:
            RequestRefused: as `Admission.submit`, `body_too_large` if Redis takes no such value,
                and `journal_unavailable`.
        """
        size_bytes = len(submission.body)
        if size_bytes >= self._redis.sizes.refused_bytes:
            raise _too_large(size_bytes)
        try:
            if self._redis.refused:
                raise RedisUnavailable(self._redis.refused)
            async with asyncio.timeout(self._within_s):
                try:
                    return await self._submit(submission)
                except RedisUnavailable:
                    if not await self._takes_no(size_bytes):
                        raise
            raise _too_large(size_bytes)
        except (RedisUnavailable, TimeoutError) as error:
            self._redis.doubt()
            facts = submission.facts
            log.warning(
                "request refused: journal_unavailable: %s",
                str(error) or f"not accepted in {self._within_s:g} s",
                extra=about("", facts.tenant, Reason.JOURNAL_UNAVAILABLE, facts.trace),
            )
            raise RequestRefused(
                Reason.JOURNAL_UNAVAILABLE,
                "The service cannot accept requests at the moment; please try again.",
                retry_after_s=timings.RETRY_AFTER_S,
            ) from None

    async def _takes_no(self, size_bytes: int) -> bool:
        """Whether a request was not accepted because of its size, although all else works."""
        if size_bytes <= timings.LARGE_BYTES or not self._redis.usable:
            return False
        return await self._redis.sizes.refuses(size_bytes)

    async def accept_detached(self, submission: Submission) -> tuple[str, RequestFacts]:
        """The same for a request that goes on without its client.

        Returns:
            The request's id and facts.

        Raises:
            RequestRefused: as `accept`, and `idempotency_conflict` if the earlier request ends with
                its client.
        """
        follower, facts = await self.accept(submission)
        if not facts.detached:
            self._disconnects.left(follower, departed=True)
            raise RequestRefused(
                Reason.IDEMPOTENCY_CONFLICT,
                "This Idempotency-Key was used for a request that waits for its answer; repeat it "
                "without Prefer: respond-async.",
                param="prefer",
            )
        task = asyncio.create_task(
            self._until_begun(follower), name=f"detached-{follower.request_id}"
        )
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return follower.request_id, facts

    async def _until_begun(self, follower: Follower) -> None:
        """Follow a request that counts against the limits on waiting requests until it does not."""
        try:
            while follower.on_begun is not None:
                await follower.wait()
        finally:
            self._followers.leave(follower)
            follower.begun()

    async def stop(self) -> None:
        """No longer follow detached requests; they go on."""
        await ended(list(self._waiting))

    async def _submit(self, submission: Submission) -> tuple[Follower, RequestFacts]:
        followed: list[Follower] = []

        def expect(request_id: str) -> Callable[[], None]:
            """Follow the journal before the request is written, so that no wake-up is missed."""
            followed.append(self._followers.follow_new(request_id))
            return partial(self._followers.leave, followed[-1])

        receipt = await self._admission.submit(submission, expect)
        if receipt.repeat:
            follower = await self._disconnects.attach(
                receipt.request_id, submission.seen, receipt.ended
            )
        else:
            follower = followed[-1]
            follower.on_begun = receipt.begun
        return follower, receipt.facts


def _too_large(size_bytes: int) -> RequestRefused:
    return RequestRefused(
        Reason.BODY_TOO_LARGE,
        f"The request body has {size_bytes:,} bytes, more than the service's storage takes at a "
        "time; shorten the request.",
    )
