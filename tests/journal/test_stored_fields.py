"""What the writers leave in Redis has the fields that the modules' docstrings list, no more and no
fewer: versions that work side by side are written by these lists.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from msgspec.structs import replace

from serve_app.contract import Cause, Reason, State
from serve_app.journal import entries
from serve_app.journal.entries import MAX_ID_PART, EntryId, RequestFacts
from serve_app.journal.usage import Usage
from serve_app.redis.keyspace import dead_letters_key
from serve_app.request_queue import QueueEntry
from serve_app.requests.dead_letters import DeadLetters
from tests.journal.journal_helpers import FACTS, HEAD, OPENED, SUMMARY, World, event
from tests.waiting import eventually

KINDS = ("0-1", "k-0", "k-i", "max-max")
OUTPUT = [0, "1", [1], None, None, None]


def documented(schema: object) -> dict[str, str]:
    """The fields in the docstring of a module or class, and what is said of each."""
    said = f"{inspect.getdoc(schema)}\n"
    rows = re.findall(r"^    (\S)  (.*\n(?:     .*\n)*)", said, re.M)
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def kind(entry_id: EntryId) -> str:
    if entry_id.seq == MAX_ID_PART:
        return "max-max"
    if entry_id.epoch == 0:
        return str(entry_id)
    return "k-0" if entry_id.opens else "k-i"


async def accepted(w: World, request_id: str, facts: RequestFacts = FACTS) -> str:
    return await w.accept(request_id, replace(facts, wake_channel=w.channel), b"{}", sequences=2)


async def test_the_fields_of_a_journal(w: World) -> None:
    writer, seen = await w.writer(), set[tuple[str, str]]()

    async def opened(request_id: str, epoch: int) -> Any:
        return (await writer.open(request_id, epoch, b"nonce-%d" % epoch, OPENED))[0]

    async def look(request_id: str) -> None:
        for found in await w.entries(request_id):
            seen.update((kind(found.id), name.decode()) for name in found.fields)

    def append(attempt: Any, number: int) -> None:
        attempt.append([OUTPUT], [event(number)], number, HEAD, Usage(output=number))

    # An attempt that is given up, one that goes on from it in several entries, and one that ends
    # the request with all that it has to say.
    await accepted(w, "req_1")
    attempt = await opened("req_1", 1)
    append(attempt, 1)
    attempt.stop(Cause.LOST)
    await eventually(attempt.closed.done)
    for epoch in (2, 3):
        attempt = await opened("req_1", epoch)
        attempt.continue_from(EntryId(1, 1), event(1), 1, HEAD)
        append(attempt, epoch)
        if epoch == 2:
            attempt.stop(Cause.LOST)
        else:
            attempt.stop(State.FAILED, Reason.INTERNAL, SUMMARY, None)
        await eventually(attempt.closed.done)
    await look("req_1")
    # One that completes, one that nobody has worked on, and one that ends from outside.
    await accepted(w, "req_2")
    attempt = await opened("req_2", 1)
    append(attempt, 1)
    attempt.stop(State.COMPLETED, None, SUMMARY, 1)
    await attempt.closed
    await accepted(w, "req_3")
    await opened("req_3", 1)
    assert await w.store.void("req_3", 1, b"nonce-1")
    await w.endings.end("req_3", Reason.CANCELLED)
    for request_id in ("req_2", "req_3"):
        await look(request_id)
    said = {
        (one, name)
        for name, what in documented(entries).items()
        for one in KINDS
        if re.search(rf"(?<!\S){re.escape(one)}(?![\w-])", what)
    }
    assert seen == said


async def test_the_fields_of_a_queue_entry(w: World) -> None:
    await accepted(w, "req_1", replace(FACTS, trace="00-1-1-01"))
    ((_, fields),) = await w.redis.xrange(w.stream(FACTS.request_class))
    assert sorted(name.decode() for name in fields) == sorted(documented(QueueEntry))


async def test_the_fields_of_a_dead_letter(w: World) -> None:
    letters = DeadLetters(w.link, w.settings.namespace, 10)
    await accepted(w, "req_1")
    request = await w.store.read_request("req_1")
    assert request is not None
    await letters.add("req_1", Reason.POISON, request, 1)
    await letters.add_unreadable("a queue 1-1", {b"r": b"?", b"d": b"?"})
    found = await w.redis.xrange(dead_letters_key(w.settings.namespace))
    names = {name.decode()[0] for _, fields in found for name in fields}
    assert sorted(names) == sorted(documented(DeadLetters))
