"""The answer to an admitted request: follows its journal and forwards the bytes, straight to ASGI `send`.

No response class of a framework stands between: those run a task group and a disconnect listener per response.
Ray Serve cancels this task when the client leaves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.deadlines import Deadlines
from serve_app.errors import JournalUnavailable, Reason, RequestRefused
from serve_app.ingress.departures import Departures
from serve_app.journal.entries import Head
from serve_app.journal.events import HEARTBEAT, SEPARATOR, after_event, body_event, error_events
from serve_app.journal.hub import Follower
from serve_app.journal.pieces import PIECE_BYTES
from serve_app.journal.reader import MESSAGES

log = logging.getLogger("hermes.ingress")

Send = Callable[[dict[str, Any]], Awaitable[None]]
_EVENT_STREAM = Head(200, [("content-type", "text/event-stream; charset=utf-8")])


_EXPIRE_WITHIN_S = 0.7


class _Overdue(Exception):
    """The deadline has passed while Redis was away."""


class ResponseStart(dict[str, Any]):
    """An `http.response.start` message whose headers stay as they are.

    Ray Serve's request-id middleware appends a second `x-request-id` of its own to every response, and clients
    join the two; here the id is the journal's.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "headers":
            super().__setitem__(key, value)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """On its way through Ray's Python proxy it becomes a plain message: unpickling would use `__setitem__`."""
        return dict, (dict(self),)


class Answer:
    """An ASGI response.

    Args:
        follower: of the journal.
        path: the endpoint, which decides how a stream ends.
        as_events: answer with server-sent events, whatever the engine's response is (`/v1/requests/{id}/events`,
            and requests with `stream: true` that have waited for a heartbeat).
        admitted_ms: Unix milliseconds of the admission.
        deadline_ms: when it must have ended; 0 where that is not known.
    """

    def __init__(
        self, follower: Follower, departures: Departures, deadlines: Deadlines, path: str, streamed: bool,
        as_events: bool, admitted_ms: int, deadline_ms: int, heartbeat_s: float, client_request_id: str = "",
    ) -> None:  # fmt: skip
        self._follower = follower
        self._departures = departures
        self._deadlines = deadlines
        self._path = path
        self._streamed = streamed
        self._as_events = as_events
        self._admitted_ms = admitted_ms
        self._deadline_ms = deadline_ms
        self._overdue = False
        self._alarm: asyncio.TimerHandle | None = None
        self._heartbeat_s = heartbeat_s
        self._client_request_id = client_request_id
        self._started = False
        self.status = 0
        """Of the response, once it has begun."""
        self._last_sent_s = time.monotonic()
        self.sending_since_s = math.inf
        """Since when the client takes nothing, by `time.monotonic`; infinite while nothing is sent."""
        self._task: asyncio.Task[Any] | None = None
        self._cut = False

    def cut(self) -> None:
        """The client takes nothing any more: treat it as one that has left."""
        if self._task is not None and not self._cut:
            self._cut = True
            self._task.cancel()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Run until the request has ended, or the client leaves (then this task is cancelled)."""
        departed = True
        self._task = asyncio.current_task()
        if self._deadline_ms:
            self._set_alarm(self._deadlines.due_in_s(self._deadline_ms))
        try:
            await self._forward(send)
            departed = False
        except _Overdue:
            departed = False
            raise RequestRefused(Reason.DEADLINE, MESSAGES[Reason.DEADLINE]) from None
        except asyncio.CancelledError:
            if not self._cut or self._task is None:
                raise
            self._task.uncancel()
            log.info("request %s: a client that takes nothing is cut", self._follower.request_id)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            self._departures.left(self._follower, departed)

    def _set_alarm(self, in_s: float) -> None:
        self._follower.due_at = asyncio.get_running_loop().time() + in_s
        self._alarm = asyncio.get_running_loop().call_at(self._follower.due_at, self._ring)

    def _ring(self) -> None:
        self._overdue = True  # and `due_at` is past: nothing more of Redis is waited for before `_expire`
        self._follower.wake()

    async def _expire(self) -> None:
        """The deadline has passed, and whoever should have said so has not: say it, whatever the request waits for.

        Raises:
            _Overdue: Redis does not answer, and the client has nothing yet.
        """
        self._overdue = False
        try:
            async with asyncio.timeout(_EXPIRE_WITHIN_S):
                await self._deadlines.end(self._follower.request_id)
                await self._follower.catch_up()
        except (JournalUnavailable, TimeoutError):
            if not self._started:
                self._deadlines.owe(self._follower.request_id)
                raise _Overdue from None
        if self._follower.reader.ending is None:  # a part was sent: its end is the journal's
            self._set_alarm(_EXPIRE_WITHIN_S)

    async def _forward(self, send: Send) -> None:
        reader = self._follower.reader
        held: list[bytes] = []  # of a response that is not a stream: its status may still change
        while True:
            ended = reader.ending is not None  # before the bytes are taken: more can come while they are sent
            body = reader.take()
            if reader.head is not None and reader.head.streamed:
                if body:
                    await self._send(send, reader.head, body)
            elif body:
                held.append(body)
            if reader.more and ended:  # a long transcript: the next piece, once this one was taken
                continue
            if ended:
                await self._finish(send, b"".join(held))
                return
            if self._streamed and time.monotonic() - self._last_sent_s >= self._heartbeat_s:
                await self._send(send, _EVENT_STREAM, HEARTBEAT)
            if self._overdue:
                await self._expire()
            else:
                await self._follower.wait()

    async def _finish(self, send: Send, held: bytes) -> None:
        """The last bytes: of the engine's response, or an error of ours in the shape that still fits."""
        reader = self._follower.reader
        ending, head = reader.ending, reader.head
        assert ending is not None
        as_events = self._started or self._as_events
        if head is not None and not head.streamed and (ending.state == "completed" or held):
            if not as_events:
                await self._send(send, head, held, more=False)
                return
            last, tail = 0, body_event(held)
        elif ending.state != "completed":
            if not as_events:
                raise RequestRefused(Reason(ending.reason), ending.message)
            last = reader.last_event
            tail = error_events(Reason(ending.reason), ending.message, last, self._path)
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
        if tail or not self._started:
            await self._send(send, _EVENT_STREAM if tail else head or _EVENT_STREAM, tail)
        await self._take(send, b"", more=False)

    async def _send(self, send: Send, head: Head, body: bytes, more: bool = True) -> None:
        if not self._started:
            self._started = True
            self.status = head.status
            headers = self._headers(head)
            if not more:
                headers.append((b"content-length", str(len(body)).encode()))
            await send(ResponseStart(type="http.response.start", status=head.status, headers=headers))
        for start in range(0, max(1, len(body)), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES] if len(body) > PIECE_BYTES else body
            await self._take(send, piece, more or start + PIECE_BYTES < len(body))

    async def _take(self, send: Send, body: bytes, more: bool) -> None:
        """Hand bytes to the client; it returns when there is room for more behind them."""
        self.sending_since_s = self._last_sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.sending_since_s = math.inf

    def _headers(self, head: Head) -> list[tuple[bytes, bytes]]:
        headers = [*head.headers, *self.own_headers().items()]
        if head.streamed:
            headers += [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]

    def own_headers(self) -> dict[str, str]:
        """What is known of the request by now."""
        reader = self._follower.reader
        headers = {"x-request-id": self._follower.request_id}
        if self._client_request_id:
            headers["x-client-request-id"] = self._client_request_id
        if reader.attempt is not None:
            headers["x-hermes-replica"] = reader.attempt.replica
            headers["x-hermes-engine"] = reader.attempt.engine
            headers["x-hermes-attempts"] = str(reader.attempts)
            headers["x-hermes-queue-ms"] = str(max(0, reader.attempt.opened_ms - self._admitted_ms))
        if reader.ending is not None and reader.ending.reason:
            headers["x-hermes-reason"] = reader.ending.reason
        return headers
