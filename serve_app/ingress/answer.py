"""The answer to an admitted request: follows its journal and forwards the bytes directly to ASGI's
`send`.

It uses no framework's response class, because those run a task group and a disconnect listener per
response. Ray Serve cancels this task when the client leaves.

While the task waits for the next bytes of a stream, the follower hands them to the connection
itself, as long as the client takes everything. Otherwise it wakes the task, so the bytes always
have one sender.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any, NamedTuple

from starlette.types import Send

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.contract import Reason, State
from serve_app.dispatch.deadlines import Deadlines
from serve_app.errors import RedisUnavailable, RequestRefused, Unreadable, retry_headers
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.ingress.disconnects import Disconnects
from serve_app.ingress.http_protocol import PUSH, Push
from serve_app.ingress.sending import pieces
from serve_app.ingress.signs_of_life import sign_of_life
from serve_app.journal.ending import MESSAGES
from serve_app.journal.events import (
    SEPARATOR,
    after_event,
    body_event,
    error_events,
)
from serve_app.journal.facts import Head, RequestFacts
from serve_app.journal.followers import Follower

log = logging.getLogger("hermes.ingress")

_EVENT_STREAM = Head(200, [("content-type", "text/event-stream; charset=utf-8")])
_NO_MORE = Head(204, [])
"""After the last event: an `EventSource` connects again after every other answer."""


class _Overdue(Exception):
    """The deadline has passed while Redis was unreachable."""


class Answering(NamedTuple):
    """What all answers of one ingress use."""

    disconnects: Disconnects
    deadlines: Deadlines
    heartbeat_s: float
    unread: ConnectionLimit


class Answer:
    """An ASGI response.

    Args:
        follower: of the journal.
        path: the endpoint, which determines how a stream ends.
        facts: of the request; None where they are not known.
        as_events: answer with server-sent events whatever the engine's response is
            (`/v1/requests/{id}/events`, and requests with `stream: true` after the first
            heartbeat).
    """

    def __init__(
        self,
        answering: Answering,
        follower: Follower,
        path: str,
        facts: RequestFacts | None,
        streamed: bool,
        as_events: bool = False,
    ) -> None:
        self._follower = follower
        self._disconnects, self._deadlines, self._heartbeat_s, self._unread = answering
        self._path = path
        self._streamed = streamed
        self._as_events = as_events
        self._facts = facts
        self._overdue = False
        self._unread_bytes = 0
        self._tenant = facts.tenant if facts is not None else ""
        self._passing = False
        self._alarm: asyncio.TimerHandle | None = None
        self._started = False
        self.status = 0
        """HTTP status, once the response has begun."""
        self._last_sent_s = SYSTEM.monotonic_s()
        self.sending_since_s = math.inf
        """Since when the client has read nothing, in monotonic seconds; infinite while it reads
        everything.
        """
        self._task: asyncio.Task[Any] | None = None
        self._cut = False

    def cut(self) -> None:
        """The client no longer reads: treat it as disconnected."""
        if self._task is not None and not self._cut:
            self._cut = True
            self._task.cancel()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Run until the request has ended, or until the client leaves (this task is then
        cancelled).
        """
        departed = True
        self._task = asyncio.current_task()
        if self._facts is not None:
            self._set_alarm(self._deadlines.due_in_s(self._facts.deadline_ms))
        try:
            await self._forward(send, scope.get("extensions", {}).get(PUSH))
            departed = False
        except _Overdue:
            departed = False
            raise RequestRefused(Reason.DEADLINE, MESSAGES[Reason.DEADLINE]) from None
        except asyncio.CancelledError:
            if not self._cut or self._task is None:
                raise
            self._task.uncancel()
            log.info(
                "request %s: the client does not read and is disconnected",
                self._follower.request_id,
            )
        finally:
            self._follower.push = None
            if self._alarm is not None:
                self._alarm.cancel()
            if self._unread_bytes:
                self._unread.release(self._tenant, self._unread_bytes)
            self._disconnects.left(self._follower, departed)

    def _set_alarm(self, in_s: float) -> None:
        self._follower.due_at = asyncio.get_running_loop().time() + in_s
        self._alarm = asyncio.get_running_loop().call_at(self._follower.due_at, self._ring)

    def _ring(self) -> None:
        self._overdue = (
            True  # and `due_at` has passed: `_expire` comes before any other wait for Redis
        )
        self._follower.wake()

    async def _expire(self) -> None:
        """The deadline has passed and no other process has ended the request: end it here, whatever
        it waits for.

        Raises:
            _Overdue: Redis does not answer, or nobody can read the journal, and the client has
                received nothing yet.
        """
        self._overdue = False
        try:
            async with asyncio.timeout(timings.EXPIRE_WITHIN_S):
                await self._deadlines.end(self._follower.request_id)
                await self._follower.catch_up()
        except (RedisUnavailable, Unreadable, TimeoutError):
            if not self._started:
                self._deadlines.owe(self._follower.request_id)
                raise _Overdue from None
        if (
            self._follower.reader.ending is None
        ):  # a part was sent, so its end must come from the journal
            self._set_alarm(timings.EXPIRE_WITHIN_S)

    async def _forward(self, send: Send, push: Push | None) -> None:
        reader = self._follower.reader
        held: list[bytes] = []  # the response is not a stream, so its status may still change
        while True:
            ended = (
                reader.ending is not None
            )  # set before sending, because more bytes can arrive meanwhile
            if ended:
                self._count_unread(reader.memory_bytes + sum(map(len, held)))
            body = reader.take()
            if reader.streams and reader.head is not None:
                if body:
                    await self._send(send, reader.head, body)
                    self._follower.push = push
            elif body and reader.more and self._passes_on():
                assert reader.head is not None
                self._passing = True
                await self._send(send, reader.head, body)
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
            sent_s = max(self._last_sent_s, self._follower.pushed_at)
            if self._streamed and SYSTEM.monotonic_s() - sent_s >= self._heartbeat_s:
                await self._send(send, _EVENT_STREAM, self._sign_of_life())
            if self._overdue:
                await self._expire()
            else:
                await self._follower.wait()

    def _sign_of_life(self) -> bytes:
        reader = self._follower.reader
        begun, last = self._started, max(reader.last_event, reader.seen)
        return sign_of_life(
            self._path, self._follower.request_id, self._facts, last, begun or last > 0
        )

    def _count_unread(self, size: int) -> None:
        """Count so much that was read of a journal and not sent yet, unless it is little.

        Raises:
            RequestRefused: there is no room for it, and nothing has been sent.
        """
        if size > max(self._unread_bytes, timings.LARGE_BYTES):
            if not (self._started or self._unread_bytes):
                self._unread.check(self._tenant)
            self._unread.count(self._tenant, size - self._unread_bytes)
            self._unread_bytes = size

    def _passes_on(self) -> bool:
        """Whether a long answer that is not a stream can be sent before all of it is read."""
        reader = self._follower.reader
        complete = reader.ending is not None and reader.ending.state is State.COMPLETED
        ours = self._as_events or (self._started and not self._passing)
        return complete and reader.head is not None and not ours

    async def _finish(self, send: Send, held: bytes) -> None:
        """Send the last bytes: of the engine's response, or an error of ours in a format that still
        fits.
        """
        reader = self._follower.reader
        ending, head = reader.ending, reader.head
        assert ending is not None
        if self._passing and head is not None:
            if ending.state is State.COMPLETED:
                await self._send(send, head, held, more=False)
            return  # otherwise the server ends the connection before the answer is complete
        as_events = self._started or self._as_events
        completed = ending.state is State.COMPLETED
        whole = head is not None and not head.streamed and (completed or held)
        if head is not None and whole and not as_events:
            await self._send(send, head, held, more=False)
            return
        if whole and (completed or not self._streamed):
            last, tail, held = 0, body_event(held), b""
        elif not completed:
            if not as_events:
                raise RequestRefused(ending.reason or Reason.INTERNAL, ending.message)
            last = reader.last_event
            reason = ending.reason or Reason.INTERNAL
            tail = error_events(reason, ending.message, last, self._path)
        else:
            last, tail = reader.last_event, b""
        end = last + tail.count(SEPARATOR)
        if reader.seen > end:
            message = f"Event {reader.seen} is not in the journal, which ends with event {end}."
            if not self._started:
                raise RequestRefused(Reason.JOURNAL_LOST, message)
            tail = error_events(Reason.JOURNAL_LOST, message, end, self._path)
        else:
            tail = after_event(tail, last + 1, reader.seen)
        if not tail and reader.seen and not self._started:
            await self._send(send, _NO_MORE, b"")
        elif tail or not self._started:
            await self._send(send, _EVENT_STREAM if tail else head or _EVENT_STREAM, tail)
        await self._take(send, b"", more=False)

    async def _send(self, send: Send, head: Head, body: bytes, more: bool = True) -> None:
        if not self._started:
            self._started = True
            self.status = head.status
            headers = self._headers(head)
            if not more:
                headers.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": head.status, "headers": headers})
        if len(body) > timings.SEND_BYTES:
            for piece in pieces(body):
                await self._take(send, piece, more=True)
                await asyncio.sleep(0)  # a quick client takes all of it without a pause for others
            if more:
                return
            body = b""
        await self._take(send, body, more)

    async def _take(self, send: Send, body: bytes, more: bool) -> None:
        """Send bytes to the client; returns when the socket accepts more."""
        self.sending_since_s = self._last_sent_s = SYSTEM.monotonic_s()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.sending_since_s = math.inf

    def _headers(self, head: Head) -> list[tuple[bytes, bytes]]:
        headers = [*head.headers, *self.own_headers().items()]
        if head.streamed:
            headers += [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]

    def own_headers(self) -> dict[str, str]:
        """Headers with what is known of the request so far."""
        reader = self._follower.reader
        headers = {"x-request-id": self._follower.request_id}
        facts = self._facts
        if facts is not None:
            headers["x-hermes-class"] = facts.request_class
            if facts.client_request_id and not self._as_events:
                headers["x-client-request-id"] = facts.client_request_id
        if reader.attempt is not None:
            headers["x-hermes-replica"] = reader.attempt.replica
            headers["x-hermes-engine"] = reader.attempt.engine
            headers["x-hermes-attempts"] = str(reader.attempts)
            admitted_ms = facts.admitted_ms if facts is not None else 0
            headers["x-hermes-queue-ms"] = str(max(0, reader.attempt.opened_ms - admitted_ms))
        if reader.ending is not None and reader.ending.reason:
            headers["x-hermes-reason"] = reader.ending.reason
            headers |= retry_headers(reader.ending.reason)
        return headers
