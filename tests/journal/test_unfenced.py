"""Only fencing keeps an attempt that was replaced from doing damage; `scripts/chaos` counts that
damage.
"""

from __future__ import annotations

import json

import httpx
import pytest

from scripts.chaos_testing.account import settle
from scripts.chaos_testing.traffic import Client, Told
from serve_app.errors import Fenced
from serve_app.journal.attempt import Attempt
from serve_app.journal.reader import JournalReader
from tests.journal.journal_helpers import HEAD, world
from tests.waiting import eventually

TEXT = "word "


def append(attempt: Attempt, number: int, data: str) -> None:
    """Append an event of a chat stream."""
    head = HEAD if number == 1 else None
    body = f"id: {number}\ndata: {data}\n\n".encode()
    attempt.append([[0, data, [number], None, None, None]], [body], number, head)


def say(attempt: Attempt) -> None:
    """Append the first event, which has the whole text."""
    append(attempt, 1, json.dumps({"choices": [{"delta": {"content": TEXT}}]}))


def read_as_chaos_does(body: bytes) -> Told:
    """What a client of `scripts/chaos` makes of a stream."""
    told = Told("Hello", 1, streamed=True, accepted=True)
    client = Client(httpx.AsyncClient(), "m")
    for block in body.split(b"\n\n")[:-1]:
        if not told.wrong:
            client._take(told, block)
    return told


@pytest.mark.parametrize("fencing", [True, False])
async def test_an_attempt_that_wakes_after_it_was_replaced(
    redis_url: str, namespace: str, fencing: bool
) -> None:
    async with world(redis_url, namespace, journal={"fencing": fencing}) as w:
        await w.admit()
        old = await w.opened(await w.writer(), 1, b"nonce-1")
        new = await w.opened(await w.writer(), 2, b"nonce-2")
        say(new)
        await eventually(lambda: not new.pending)
        say(old)
        if fencing:
            with pytest.raises(Fenced):
                await old.closed
        else:
            await eventually(lambda: not old.pending)
        append(new, 2, "[DONE]")
        await eventually(lambda: not new.pending)
        reader = JournalReader()
        for entry in await w.entries():
            reader.feed(entry)
    told = read_as_chaos_does(reader.take())
    account = settle([told], lambda told: TEXT)
    assert account.clean is fencing
    assert (account.completed, len(account.duplicated)) == ((1, 0) if fencing else (0, 1))
