"""The steps of a request's life, each one round trip to Redis: accept, append, read, end.

`lifecycle.lua` has the scripts. A worker that ends its attempt, and whoever ends a request from
outside, execute the same one. The first ending counts: a second one changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from typing import NamedTuple

from serve_app import timings
from serve_app.contract import FINAL, State
from serve_app.journal.entries import PLAIN, Entry, flatten
from serve_app.journal.facts import RequestFacts, Summary
from serve_app.journal.usage import Usage, Whose
from serve_app.redis.connection import Command, Script
from serve_app.redis.keyspace import body_key, journal_key, queue_key, usage_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.request_queue.entry import encode_entry
from serve_app.requests.signals import AT_ACCEPT, AT_END, Accepted, Ended
from serve_app.settings import Settings

SCRIPT = Script(files(__package__).joinpath("lifecycle.lua").read_text())
_NOTHING = Usage().encode()

_APPEND = b"*14\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$10\r\nNOMKSTREAM\r\n$%d\r\n%b\r\n"
_APPEND_PLAIN = _APPEND + b"".join(b"$1\r\n%b\r\n$%%d\r\n%%b\r\n" % name for name in PLAIN)


class Condition(NamedTuple):
    """That nothing has changed since an idempotency key was read: the string that names its
    request, and the id of the last entry of that one's journal. Empty for what does not exist.
    """

    keys: tuple[str, ...] = ()
    named: bytes = b""
    last: bytes = b""


ALWAYS = Condition()


def keep_ms(settings: Settings, facts: RequestFacts) -> int:
    """How long to keep a journal that nobody ends: a late ending must still find it."""
    retention_s = facts.retention_s or settings.journal.retention_s
    retention_s = max(retention_s, timings.ENDED_WITHIN_S)
    return facts.deadline_ms - facts.admitted_ms + int(retention_s * 1000)


async def accept(
    link: RedisLink,
    settings: Settings,
    accepted: Accepted,
    condition: Condition = ALWAYS,
    naming: Sequence[Command] = (),
) -> bool:
    """Write a request: queue entry, journal and body. When this returns True, it is accepted; if
    it returns False, the condition does not hold, and nothing was written.

    Args:
        naming: commands that give an idempotency key to the request.

    Raises:
        RedisUnavailable: nothing was accepted; if it is `AnswerLost`, that is unknown.
    """
    request_id, line, body, facts, work = accepted
    namespace, kept_ms = settings.namespace, keep_ms(settings, facts)
    key, first = journal_key(namespace, request_id), Entry.request(line, facts)
    whose = (request_id, facts.tenant, facts.session, facts.deadline_ms)
    queued = chain.from_iterable(encode_entry(*whose, work, facts.trace).items())
    commands: list[Command] = [
        ("XADD", queue_key(namespace, facts.model, facts.request_class), "*", *queued),
        ("XADD", key, str(first.id), *flatten(first)),
        ("PEXPIRE", key, kept_ms),
        ("SET", body_key(namespace, request_id), body, "PX", kept_ms),
    ]
    for signal in AT_ACCEPT:
        commands += signal(settings, accepted)
    keys, named, last = condition
    script = ("EVAL", SCRIPT, len(keys), *keys, "accept", named, last)
    (done,) = all_answered(await link.call([(*script, *_words([*commands, *naming]))]))
    return bool(done)


def append(key: str, entry: Entry) -> Command:
    """Append an entry, unless the journal has gone (hot path)."""
    if tuple(entry.fields) != PLAIN:
        return ("XADD", key, "NOMKSTREAM", str(entry.id), *flatten(entry))
    of, at = key.encode(), b"%d-%d" % entry.id
    n, o, b, e, u = entry.fields.values()
    lengths = len(n), n, len(o), o, len(b), b, len(e), e, len(u), u
    return _APPEND_PLAIN % (len(of), of, len(at), at, *lengths)


def append_though_full(key: str, entry: Entry) -> Command:
    """The same for an entry that comes before the end, after a full Redis has refused it. The end
    frees more than it takes.
    """
    return ("EVAL", SCRIPT, 1, key, "append", str(entry.id), *flatten(entry))


def reading(key: str) -> Command:
    """The command whose reply is a request's `Record`."""
    return ("EVAL", SCRIPT, 1, key, "record")


def end(settings: Settings, ended: Ended, whose: Whose | None = None) -> Command:
    """The command that ends a request: it appends the entries, books what was used, and executes
    what `signals.py` adds.

    Args:
        whose: the row of the ledger, if the journal cannot be decoded.
    """
    summary, facts = ended.summary, ended.summary.request
    key = journal_key(settings.namespace, ended.request_id)
    ledger = usage_key(settings.namespace, summary.ended_ms // timings.HOUR_MS)
    if whose is None:
        whose = Whose("?", "", "?", "?")
        if facts is not None:
            whose = Whose(facts.tenant, facts.key, facts.request_class, facts.model)
    commands: list[Command] = [
        ("XADD", key, "NOMKSTREAM", str(entry.id), *flatten(entry)) for entry in ended.entries
    ]
    for signal in AT_END:
        commands += signal(settings, ended)
    return (
        *("EVAL", SCRIPT, 2, key, ledger, "end", len(ended.entries), whose.encode()),
        FINAL.index(ended.terminal.state or State.FAILED) + 1,
        "{} {}".format(*times_ms(summary)),
        summary.attempts,
        b"" if ended.from_outside else ended.terminal.used or _NOTHING,
        int(settings.journal.usage_retention_days * 24 * timings.HOUR_MS),
        *_words(commands),
    )


def times_ms(summary: Summary) -> tuple[int, int]:
    """How long a request waited and ran."""
    if summary.request is None:
        return 0, 0
    began_ms = summary.began_ms or summary.ended_ms
    queued_ms = max(0, began_ms - summary.request.admitted_ms)
    return queued_ms, max(0, summary.ended_ms - began_ms)


def _words(commands: Sequence[Command]) -> list[object]:
    return [word for command in commands for word in (len(command), *command)]
