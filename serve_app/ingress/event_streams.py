"""A request's response, for a reader who reconnects or who comes later."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from serve_app.errors import RequestRefused
from serve_app.ingress.answer import Answer, Answers
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.ingress.disconnects import Disconnects
from serve_app.ingress.refusals import send_refusal
from serve_app.ingress.slow_readers import SlowReaders
from serve_app.journal.entries import Entry, decode_line, has_ended
from serve_app.journal.ids import REQUEST_ID


class EventStreams:
    """What one ingress needs to serve the events of any request."""

    def __init__(
        self,
        disconnects: Disconnects,
        answers: Answers,
        slow_readers: SlowReaders,
        connections: ConnectionLimit,
    ) -> None:
        self._disconnects = disconnects
        self._answers = answers
        self.slow_readers = slow_readers
        self.connections = connections

    async def attach(
        self, request_id: str, seen: int, entries: list[Entry], as_events: bool
    ) -> Answer:
        """The answer with the events after number `seen`.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        follower = await self._disconnects.attach(request_id, seen, has_ended(entries))
        path = decode_line(entries[0]).path if entries[0].id == REQUEST_ID else ""
        facts = follower.reader.facts
        streamed = as_events or (facts is not None and facts.streamed)
        return self._answers.of(follower, path, facts, streamed, as_events)


class EventStream(Response):
    """The response to one reader; FastAPI returns it unchanged.

    Args:
        seen: the number of the last event that the reader has.
        entries: the outline of the request's journal.
        as_events: whether also an answer that was not streamed comes as an event.
    """

    def __init__(
        self,
        streams: EventStreams,
        request_id: str,
        tenant: str,
        seen: int,
        entries: list[Entry],
        as_events: bool = True,
    ) -> None:
        super().__init__()
        self._streams = streams
        self._request_id = request_id
        self._tenant = tenant
        self._seen = seen
        self._entries = entries
        self._as_events = as_events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        streams = self._streams
        with streams.connections.hold(self._tenant):
            answer = await streams.attach(
                self._request_id, self._seen, self._entries, self._as_events
            )
            try:
                await streams.slow_readers.serve(answer, scope, receive, send)
            except RequestRefused as refusal:  # as the POST itself would have got it
                await send_refusal(send, refusal, answer.own_headers())
