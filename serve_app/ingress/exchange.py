"""One client's exchange: its request is submitted, waits, is answered from its journal, and ends or
loses its client.

    offered ──▶ waiting ──▶ streaming ──▶ over
       │           ╰──────▶ passing ────────▲
       ╰─ doubtful: its client left or got a 503, and Redis may still accept it (`Disconnects`)

Submitting needs no connection (`Admission.submit`): an exchange attaches to what was accepted, here
or at another ingress. The bytes go directly to ASGI's `send`, without a framework's response class,
which runs a task group and a disconnect listener per response. Ray Serve cancels the task when the
client leaves. While the task waits for the next bytes of a stream, the follower hands them to the
connection itself, as long as the client takes everything. Otherwise it wakes the task, so the bytes
always have one sender.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Send

from serve_app import timings
from serve_app.admission.admission import Admission, Receipt, Submission
from serve_app.clock import SYSTEM
from serve_app.contract import Reason, State
from serve_app.errors import (
    RedisUnavailable,
    RequestRefused,
    failed,
    retry_headers,
)
from serve_app.ingress.client_connections import PUSH, Push
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.ingress.disconnects import Disconnects
from serve_app.ingress.followers import Follower, Followers
from serve_app.ingress.protocol_events import body_event, error_events, sign_of_life
from serve_app.journal.entries import Head, RequestFacts
from serve_app.journal.events import SEPARATOR, after_event
from serve_app.loops import ended
from serve_app.observability.logs import about
from serve_app.policy.tenant_limits import Standing
from serve_app.redis.check import RedisWatch

log = logging.getLogger("hermes.ingress")

_EVENT_STREAM = Head(200, [("content-type", "text/event-stream; charset=utf-8")])
_NO_MORE = Head(204, [])
"""After the last event: an `EventSource` connects again after every other answer."""


class Stage(Enum):
    """How far the answer is."""

    WAITING = auto()
    STREAMING = auto()
    """Events have begun, or the answer was sent as a whole."""
    PASSING = auto()
    """A long answer that is not a stream is sent in pieces."""

    @property
    def begun(self) -> bool:
        return self is not Stage.WAITING


class ExchangeParts(NamedTuple):
    """What all exchanges of one ingress use."""

    disconnects: Disconnects
    heartbeat_s: float
    unread: ConnectionLimit


@dataclass(eq=False)
class Exchange:
    """An ASGI response."""

    parts: ExchangeParts
    follower: Follower
    path: str
    """The endpoint, which determines how a stream ends."""
    facts: RequestFacts | None
    """Of the request; None where they are not known."""
    streamed: bool
    as_events: bool = False
    """Answer with server-sent events whatever the engine's response is
    (`/v1/requests/{id}/events`, and requests with `stream: true` after the first heartbeat).
    """
    begun: Callable[[], None] | None = None
    """Called once, when a worker has started the request, or none will."""
    standing: Standing | None = None
    """What its tenant has used of its limits, if it has any."""
    more_headers: Mapping[str, str] = field(default_factory=dict, init=False)
    status_code: int = field(default=0, init=False)
    """Of HTTP, once the response has begun."""
    refusal: RequestRefused | None = field(default=None, init=False)
    """What the client was told instead of a response."""

    def __post_init__(self) -> None:
        self._stage = Stage.WAITING
        self._overdue = False
        self._unread_bytes = 0
        self._tenant = self.facts.tenant if self.facts is not None else ""
        self._alarm: asyncio.TimerHandle | None = None
        self._last_sent_s = SYSTEM.monotonic_s()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Run until the request has ended, or until the client leaves (this task is then
        cancelled).
        """
        departed = True
        if self.facts is not None:
            left_s = self.facts.deadline_ms / 1000 - self.parts.disconnects.base.clock.now_s()
            self._set_alarm(max(0.0, left_s) + timings.DEADLINE_ANSWERED_S)
        try:
            await self._forward(send, scope.get("extensions", {}).get(PUSH))
            departed = False
        except RequestRefused as refusal:
            departed = False
            self.refusal = refusal
        finally:
            self.follower.push = None
            if self._alarm is not None:
                self._alarm.cancel()
            if self._unread_bytes:
                self.parts.unread.release(self._tenant, self._unread_bytes)
            self.leave(departed)
        if self.refusal is not None:
            await refusal_answer(self.refusal, self.path, self.own_headers())(scope, receive, send)

    async def until_begun(self) -> None:
        """Without a client: count among the requests that wait until a worker has started this
        one.
        """
        try:
            while self.begun is not None:
                await self._wait()
        finally:
            self.leave(departed=False)

    async def until_ended(self) -> bytes:
        """The same until it has ended: the bytes of its answer."""
        reader, parts = self.follower.reader, list[bytes]()
        try:
            while reader.ending is None:
                await self._wait()
            while reader.more:
                parts.append(reader.take())
                await asyncio.sleep(0)
            return b"".join(parts)
        finally:
            self.leave(departed=False)

    def leave(self, departed: bool) -> None:
        """The client has its answer or, if `departed`, has left before the end."""
        settling = self.parts.disconnects.left(self.follower, departed, self.facts)
        if settling is None:
            self._has_begun()
        else:
            settling.add_done_callback(lambda _: self._has_begun())

    def _has_begun(self) -> None:
        if self.begun is not None:
            begun, self.begun = self.begun, None
            begun()

    async def _wait(self) -> None:
        await self.follower.wait()
        reader = self.follower.reader
        if self.begun is not None and (reader.attempt or reader.ending) is not None:
            self._has_begun()

    def _set_alarm(self, in_s: float) -> None:
        """Answer the client then, although Redis has not told that its request has ended
        (`Deadlines`). If a part was sent, its end must come from the journal.
        """
        loop, self._reached = asyncio.get_running_loop(), self.follower.reader.position
        self.follower.due_at = loop.time() + in_s
        self._alarm = loop.call_at(self.follower.due_at, self._ring)

    def _ring(self) -> None:
        if self.follower.reader.position != self._reached:  # Redis answers: read on
            self._set_alarm(timings.DEADLINE_ANSWERED_S)
        else:
            self._overdue, self.follower.due_at = True, None
            self.follower.wake()

    # -- from the journal to the client -----------------------------------------------------------

    async def _forward(self, send: Send, push: Push | None) -> None:
        reader = self.follower.reader
        held: list[bytes] = []  # the response is not a stream, so its status may still change
        while True:
            ended = reader.ending is not None  # set before sending: more bytes can arrive meanwhile
            if ended:
                self._count_unread(reader.memory_bytes + sum(map(len, held)))
            body = reader.take()
            if reader.streams and reader.head is not None:
                if body:
                    await self._send(send, reader.head, body)
                    self.follower.push = push
            elif body and reader.more and self._passes_on():
                assert reader.head is not None
                await self._send(send, reader.head, body)
                self._stage = Stage.PASSING
            elif body:
                held.append(body)
            if reader.more and ended:  # a long transcript: the next piece, once this one is sent
                await asyncio.sleep(0)
                continue
            if ended:
                whole = b"".join(held)
                held.clear()
                await self._finish(send, whole)
                return
            sent_s = max(self._last_sent_s, self.follower.pushed_at)
            if self.streamed and SYSTEM.monotonic_s() - sent_s >= self.parts.heartbeat_s:
                last, request_id = max(reader.last_event, reader.seen), self.follower.request_id
                begun = self._stage.begun or last > 0
                sign = sign_of_life(self.path, request_id, self.facts, last, begun)
                await self._send(send, _EVENT_STREAM, sign)
            if self._overdue and not self._stage.begun:
                raise failed(Reason.DEADLINE)
            await self._wait()

    def _count_unread(self, size: int) -> None:
        """Count so much that was read of a journal and not sent yet, unless it is little. Refuse if
        there is no room for it, and nothing has been sent.
        """
        if size > max(self._unread_bytes, timings.LARGE_BYTES):
            if not (self._stage.begun or self._unread_bytes):
                self.parts.unread.check(self._tenant)
            self.parts.unread.count(self._tenant, size - self._unread_bytes)
            self._unread_bytes = size

    def _passes_on(self) -> bool:
        """Whether a long answer that is not a stream can be sent before all of it is read."""
        reader = self.follower.reader
        complete = reader.ending is not None and reader.ending.state is State.COMPLETED
        ours = self.as_events or self._stage is Stage.STREAMING
        return complete and reader.head is not None and not ours

    async def _finish(self, send: Send, held: bytes) -> None:
        """Send the last bytes: of the engine's response, or an error of ours in a format that still
        fits.
        """
        reader = self.follower.reader
        ending, head = reader.ending, reader.head
        assert ending is not None
        completed = ending.state is State.COMPLETED
        if self._stage is Stage.PASSING and head is not None:
            if completed:
                await self._send(send, head, held, more=False)
            return  # otherwise the server ends the connection before the answer is complete
        as_events = self._stage.begun or self.as_events
        whole = head is not None and not head.streamed and (completed or held)
        if head is not None and whole and not as_events:
            await self._send(send, head, held, more=False)
            return
        if whole and (completed or not self.streamed):
            last, tail, held = 0, body_event(held), b""
        elif not completed:
            if not as_events:
                raise RequestRefused(ending.reason or Reason.INTERNAL, ending.message)
            last, reason = reader.last_event, ending.reason or Reason.INTERNAL
            tail = error_events(reason, ending.message, last, self.path)
        else:
            last, tail = reader.last_event, b""
        end = last + tail.count(SEPARATOR)
        if reader.seen > end:
            message = f"Event {reader.seen} is not in the journal, which ends with event {end}."
            if not self._stage.begun:
                raise RequestRefused(Reason.JOURNAL_LOST, message)
            tail = error_events(Reason.JOURNAL_LOST, message, end, self.path)
        else:
            tail = after_event(tail, last + 1, reader.seen)
        if not tail and reader.seen and not self._stage.begun:
            await self._send(send, _NO_MORE, b"")
        elif tail or not self._stage.begun:
            await self._send(send, _EVENT_STREAM if tail else head or _EVENT_STREAM, tail)
        await self._write(send, b"", more=False)

    async def _send(self, send: Send, head: Head, body: bytes, more: bool = True) -> None:
        if not self._stage.begun:
            self._stage = Stage.STREAMING
            self.status_code = head.status
            headers = self._headers(head)
            if not more:
                headers.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": head.status, "headers": headers})
        await self._write(send, body, more)

    async def _write(self, send: Send, body: bytes, more: bool) -> None:
        self._last_sent_s = SYSTEM.monotonic_s()
        await send({"type": "http.response.body", "body": body, "more_body": more})

    def _headers(self, head: Head) -> list[tuple[bytes, bytes]]:
        headers = [*head.headers, *self.own_headers().items()]
        if head.streamed:
            headers += [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]

    def own_headers(self) -> dict[str, str]:
        """Headers with what is known of the request so far."""
        reader, facts = self.follower.reader, self.facts
        headers = known_headers(self.follower.request_id, facts)
        headers |= {**self.more_headers, **self.limit_headers()}
        if self.as_events:
            headers.pop("x-client-request-id", None)
        if reader.attempt is not None:
            admitted_ms = facts.admitted_ms if facts is not None else 0
            headers["x-hermes-replica"] = reader.attempt.replica
            headers["x-hermes-engine"] = reader.attempt.engine
            headers["x-hermes-attempts"] = str(reader.attempts)
            headers["x-hermes-queue-ms"] = str(max(0, reader.attempt.opened_ms - admitted_ms))
        if reader.ending is not None and reader.ending.reason:
            headers["x-hermes-reason"] = reader.ending.reason
            headers |= retry_headers(reader.ending.reason)
        return headers

    def limit_headers(self) -> Mapping[str, str]:
        """What is left of its tenant's limits by the minute, if there are any."""
        if self.standing is None:
            return {}
        now_ms = self.parts.disconnects.base.clock.now_ms()
        return self.standing.headers(self.path, now_ms)


def known_headers(request_id: str, facts: RequestFacts | None) -> dict[str, str]:
    """The headers of an answer to a request that was accepted."""
    headers = {"x-request-id": request_id, "request-id": request_id}
    if facts is not None:
        headers["x-hermes-class"] = facts.request_class
        if facts.client_request_id:
            headers["x-client-request-id"] = facts.client_request_id
    return headers


@dataclass(eq=False)
class Exchanges:
    """The exchanges of one ingress: with clients that submit a request or join an earlier one, and
    the places of requests that go on without a client.
    """

    admission: Admission
    followers: Followers
    parts: ExchangeParts
    redis: RedisWatch
    within_s: float
    _waiting: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def stop(self) -> None:
        """No longer follow requests in the background; they go on."""
        await ended(list(self._waiting))

    async def submit(self, submission: Submission) -> Exchange:
        """Submit a request, or join the earlier one that it repeats.

        Raises:
            RequestRefused: as `Admission.submit`, `body_too_large` if Redis takes no such value,
                and `journal_unavailable`.
        """
        size_bytes, why = len(submission.body), self.redis.refused
        fits = size_bytes < self.redis.sizes.refused_bytes
        try:
            if fits and not why:
                async with asyncio.timeout(self.within_s):
                    try:
                        receipt = await self.admission.submit(submission)
                        return await self._attached(submission, receipt)
                    except RedisUnavailable as error:
                        fits, why = not await self._takes_no(size_bytes), str(error)
        except (RedisUnavailable, TimeoutError) as error:
            why = str(error) or f"not accepted in {self.within_s:g} s"
        if not fits:
            raise RequestRefused(
                Reason.BODY_TOO_LARGE,
                f"The request body has {size_bytes:,} bytes, more than the service's storage takes "
                "at a time; shorten the request.",
            )
        self.redis.doubt()
        facts = submission.facts
        log.warning(
            "request refused: journal_unavailable: %s",
            why,
            extra=about("", facts.tenant, Reason.JOURNAL_UNAVAILABLE, facts.trace),
        )
        raise RequestRefused(
            Reason.JOURNAL_UNAVAILABLE,
            "The service cannot accept requests at the moment; please try again.",
            retry_after_s=timings.RETRY_AFTER_S,
        )

    async def submit_detached(
        self, submission: Submission
    ) -> tuple[str, RequestFacts, Mapping[str, str]]:
        """The same for a request that goes on without its client: its id, its facts, and headers
        with what is left of its tenant's limits.

        Raises:
            RequestRefused: as `submit`, and `idempotency_conflict` if the earlier request ends with
                its client.
        """
        exchange = await self.submit(submission)
        request_id, facts = exchange.follower.request_id, exchange.facts
        if facts is None or not facts.detached:
            exchange.leave(departed=True)
            raise RequestRefused(
                Reason.IDEMPOTENCY_CONFLICT,
                "This Idempotency-Key was used for a request that waits for its answer; repeat it "
                "without Prefer: respond-async.",
                param="prefer",
            )
        task = asyncio.create_task(exchange.until_begun(), name=f"detached-{request_id}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return request_id, facts, exchange.limit_headers()

    async def attach(
        self, request_id: str, path: str, seen: int, over: bool, as_events: bool
    ) -> Exchange:
        """The exchange with a client that reads any request after event `seen`. `over`: whether it
        has ended. Raises `RedisUnavailable`.
        """
        follower = await self.parts.disconnects.attach(request_id, seen, over)
        facts = follower.reader.facts
        streamed = as_events or (facts is not None and facts.streamed)
        return Exchange(self.parts, follower, path, facts, streamed, as_events)

    async def _attached(self, submission: Submission, receipt: Receipt) -> Exchange:
        request_id, facts, begun, repeat, over, standing = receipt
        if repeat:
            seen = submission.seen
            follower = await self.parts.disconnects.attach(request_id, seen, over)
            facts = follower.reader.facts or facts
        else:
            follower = self.followers.follow_new(request_id)
        continued = facts.streamed and submission.seen > 0
        path = submission.line.path
        return Exchange(
            self.parts, follower, path, facts, facts.streamed, continued, begun, standing
        )

    async def _takes_no(self, size_bytes: int) -> bool:
        """Whether a request was not accepted because of its size, although all else works."""
        large = size_bytes > timings.LARGE_BYTES and self.redis.usable
        return large and await self.redis.sizes.refuses(size_bytes)


def refusal_answer(
    refusal: RequestRefused, path: str, more_headers: Mapping[str, str] | None = None
) -> Response:
    headers = {**(more_headers or {}), **refusal.headers()}
    return Response(refusal.body(path), refusal.status_at(path), headers, "application/json")
