"""Bytes that are pushed to a client from the subscription are the bytes that its task would have
sent, in their order, whatever is lost, suspends, breaks or leaves in between.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.types import Message

from serve_app.ingress.client_connections import PUSH
from serve_app.ingress.exchange import Exchange, ExchangeParts
from serve_app.ingress.followers import Follower, Followers
from serve_app.ingress.protocol_events import COMMENT
from serve_app.journal.entries import (
    REQUEST_ID,
    TERMINAL_ID,
    AttemptFacts,
    Entry,
    EntryId,
    Head,
    Summary,
    encode_wakes,
    wake_of,
)
from serve_app.settings import Settings

HEAD = msgspec.json.encode(Head(200, [("content-type", "text/event-stream")]))
OPENED = msgspec.json.encode(AttemptFacts("r1", "engine-1", 0))
SUMMARY = msgspec.json.encode(Summary(None, None, 1, 0))
ID = "req_1"


class Journal:
    """The entries of one request, and pages of them."""

    def __init__(self) -> None:
        self.entries = [Entry(EntryId(1, 0), {b"n": b"1", b"m": OPENED})]
        self.events = 0

    def add(self, last: bool) -> Entry:
        self.events += 1
        body = b"id: %d\ndata: %d\n\n" % (self.events, self.events)
        fields = {b"n": b"1", b"b": body, b"e": b"%d" % self.events}
        if self.events == 1:
            fields[b"h"] = HEAD
        before = self.entries[-1].id
        at = EntryId(1, before.seq + 1)
        if last:
            at = TERMINAL_ID
            ending = {b"k": b"completed", b"w": b"", b"m": SUMMARY, b"p": str(before).encode()}
            fields |= ending
        self.entries.append(Entry(at, fields))
        return self.entries[-1]

    @property
    def whole(self) -> bytes:
        return b"".join(entry.body for entry in self.entries)

    async def read_many(self, wanted: Any, at_most: int) -> list[list[Entry]]:
        await asyncio.sleep(0)  # the journal may grow meanwhile
        return [[entry for entry in self.entries if entry.id > after] for _, after in wanted]


class Nobody:
    """The disconnect handling, of which nothing is asked here."""

    def left(self, follower: Follower, departed: bool, facts: Any) -> None:
        pass


class Client:
    """One connection. `takes`: whether its socket takes bytes; `breaks`: whether a send fails.

    Args:
        pushed: whether its server takes bytes without `send`, too.
    """

    def __init__(self, followers: Followers, pushed: bool = True) -> None:
        self.got = b""
        self.takes = asyncio.Event()
        self.takes.set()
        self.breaks = False
        self._sending = False
        self.follower = followers.follow_new(ID)
        # Nothing is looked at here that is unread.
        parts = ExchangeParts(Nobody(), 0.0, None)  # type: ignore[arg-type]
        answer = Exchange(parts, self.follower, "/v1/completions", facts=None, streamed=True)
        scope = {"extensions": {PUSH: self._push}} if pushed else {}
        self.task = asyncio.ensure_future(answer(scope, None, self._send))

    def _push(self, body: bytes) -> bool:
        assert not self._sending, "two senders at once"
        assert body, "it would end the answer"
        if not self.takes.is_set() or self.breaks:
            return False
        self.got += body
        return True

    async def _send(self, message: Message) -> None:
        assert not self._sending, "two senders at once"
        self._sending = True
        try:
            if self.breaks:
                raise OSError("the connection is broken")
            await self.takes.wait()
            body = message.get("body", b"")
            self.got += b"" if body == COMMENT else body
        finally:
            self._sending = False


STEPS = st.lists(
    st.sampled_from(
        "told told told lost twice resubscribed silence heartbeat "
        "blocks takes runs runs breaks leaves".split()
    ),
    max_size=40,
)


async def play(steps: list[str]) -> None:
    journal = Journal()
    followers = Followers(Settings(), journal, "ingress-1")  # type: ignore[arg-type]
    patient, other = Client(followers), Client(followers)

    def tell(entry: Entry) -> None:
        before = str(journal.entries[-2].id) if len(journal.entries) > 1 else None
        followers.on_message(encode_wakes([wake_of(ID, entry, before)]))

    followers.on_message(encode_wakes([wake_of(ID, journal.entries[0])]))
    for step in steps:
        if step in ("told", "lost", "twice"):
            entry = journal.add(last=False)
            for _ in range({"told": 1, "lost": 0, "twice": 2}[step]):
                tell(entry)
        elif step == "resubscribed":
            for client in (patient, other):
                client.follower.wake(stale=True)
        elif step == "silence":
            await followers._look_at([patient.follower, other.follower])
        elif step == "heartbeat":
            patient.follower.wake()
        elif step in ("blocks", "takes"):
            getattr(patient.takes, {"blocks": "clear", "takes": "set"}[step])()
        elif step == "runs":
            for _ in range(3):
                await asyncio.sleep(0)
        elif step == "breaks":
            other.breaks = True
        else:
            other.task.cancel()
        assert journal.whole.startswith(patient.got)
        assert journal.whole.startswith(other.got)
    patient.takes.set()
    tell(journal.add(last=True))
    while not patient.task.done():  # `_look_at` is what a silent second brings
        await followers._look_at([patient.follower])
        await asyncio.sleep(0)
    await patient.task
    assert patient.got == journal.whole
    other.task.cancel()
    with suppress(OSError, asyncio.CancelledError):
        await other.task


@settings(max_examples=150, deadline=None)
@given(STEPS)
@example("told runs blocks told runs told runs takes runs".split())  # sends, and there is more
def test_what_is_pushed_is_what_would_have_been_pulled(steps: list[str]) -> None:
    asyncio.run(play(steps))


def test_a_token_needs_no_turn_of_the_connections_task() -> None:
    async def run() -> None:
        journal = Journal()
        followers = Followers(Settings(), journal, "ingress-1")  # type: ignore[arg-type]
        client = Client(followers)
        for entry, before in (
            (journal.entries[0], REQUEST_ID),
            (journal.add(False), EntryId(1, 0)),
        ):
            followers.on_message(encode_wakes([wake_of(ID, entry, str(before))]))
        while not client.got:  # the head is sent by the task
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        last = str(journal.entries[-1].id)
        followers.on_message(encode_wakes([wake_of(ID, journal.add(last=False), last)]))
        assert client.got == journal.whole
        client.task.cancel()
        with suppress(asyncio.CancelledError):
            await client.task

    asyncio.run(run())
