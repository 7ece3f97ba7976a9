"""What else happens when a request is accepted or ends: it is listed, retained, dequeued and
announced.

Each signal adds commands to the script of that step, so that they are executed exactly once,
whatever dies. (The ledger is in the script itself, which must add numbers.) Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from serve_app import timings
from serve_app.contract import CHATS, State
from serve_app.journal.entries import Entry, encode_wakes, wake_of
from serve_app.journal.facts import RequestFacts, RequestLine, Summary
from serve_app.journal.ids import TERMINAL_ID
from serve_app.policy.work import Work
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import (
    QUEUE_GROUP,
    body_key,
    chats_key,
    journal_key,
    kept_key,
    queue_key,
    requests_key,
    wake_channel,
)
from serve_app.settings import Settings

_STREAM_BYTES = 4_700
"""What Redis needs for a stream besides the fields (docs/redis.md)."""


class Accepted(NamedTuple):
    """A request that is accepted."""

    request_id: str
    line: RequestLine
    body: bytes
    facts: RequestFacts
    work: Work


class Ended(NamedTuple):
    """A request that ends.

    Args:
        entries: the last output of the worker that ends it, none if it ends from outside; and the
            terminal entry.
        queued: the id of its queue entry; empty if it is not known.
        size: bytes of its journal, if its entries remain.
    """

    request_id: str
    entries: tuple[Entry, ...]
    summary: Summary
    queued: bytes = b""
    size: int = 0

    @property
    def terminal(self) -> Entry:
        return self.entries[-1]

    @property
    def from_outside(self) -> bool:
        return len(self.entries) == 1

    @property
    def trimmed(self) -> bool:
        """Whether the terminal entry replaces all others: they are in it, or nobody wants an answer
        that was broken off for as long as it is kept.
        """
        facts = self.summary.request
        broken_off = facts is not None and facts.kept and self.terminal.state is not State.COMPLETED
        return self.terminal.packed is not None or broken_off


def _list(settings: Settings, accepted: Accepted) -> list[Command]:
    """List the request; the oldest ones beyond `journal.listed_requests` go."""
    facts = accepted.facts
    keys = [requests_key(settings.namespace, facts.tenant)]
    if accepted.line.path == CHATS and facts.stored:
        keys.append(chats_key(settings.namespace, facts.tenant))
    ingress, journal = settings.ingress, settings.journal
    longest_s = max(ingress.max_request_timeout_s, ingress.background_timeout_s)
    commands: list[Command] = []
    for key in keys:
        commands += [
            ("ZADD", key, facts.admitted_ms, accepted.request_id),
            ("ZREMRANGEBYRANK", key, 0, -1 - journal.listed_requests),
            ("PEXPIRE", key, int((longest_s + journal.max_retention_s) * 1000)),
        ]
    return commands


def _expire(settings: Settings, ended: Ended) -> list[Command]:
    """Trim the journal, and keep it and the body for as long as they are wanted."""
    facts = ended.summary.request
    key, body = (make(settings.namespace, ended.request_id) for make in (journal_key, body_key))
    keep_ms = int(((facts and facts.retention_s) or settings.journal.retention_s) * 1000)
    stored = facts is not None and facts.stored
    trim: list[Command] = [("XTRIM", key, "MINID", str(TERMINAL_ID))] if ended.trimmed else []
    its_body: Command = ("PEXPIRE", body, keep_ms) if stored else ("UNLINK", body)
    return [*trim, ("PEXPIRE", key, keep_ms), its_body]


def _retain(settings: Settings, ended: Ended) -> list[Command]:
    """Count what is kept of the answer for whoever comes later."""
    # What was used is added by the script, if it ends from outside.
    terminal = sum(map(len, ended.terminal.fields.values())) - len(ended.terminal.used)
    return retaining(settings, ended.summary, terminal if ended.trimmed else ended.size)


def retaining(settings: Settings, summary: Summary, size: int, sign: int = 1) -> list[Command]:
    """The commands that count an answer with so many bytes until it expires; none if it is not kept
    for later.

    Args:
        sign: -1 if it is not kept any longer.
    """
    facts = summary.request
    if facts is None or not facts.kept:
        return []
    size = sign * (size + _STREAM_BYTES + facts.body_bytes)
    hour = (summary.ended_ms + int(facts.retention_s * 1000)) // timings.HOUR_MS + 1
    longest_ms = int(settings.journal.max_retention_s * 1000) + 2 * timings.HOUR_MS
    commands: list[Command] = []
    for key in (kept_key(settings.namespace, whose) for whose in (facts.tenant, "")):
        commands += [("HINCRBY", key, hour, size), ("PEXPIRE", key, longest_ms)]
    return commands


def _announce(settings: Settings, ended: Ended) -> list[Command]:
    """Tell who reads the answer, and whoever has claimed the request and shall not start it. An
    ending worker tells its readers itself.
    """
    facts = ended.summary.request
    if facts is None or not ended.from_outside:
        return []
    wakes = encode_wakes([wake_of(ended.request_id, ended.terminal)])
    commands: list[Command] = [("PUBLISH", facts.wake, wakes)]
    if ended.queued:
        line = queue_key(settings.namespace, facts.model, facts.request_class)
        channels = wake_channel(settings.namespace, "")
        commands.append(("TELL", line, QUEUE_GROUP, ended.queued, channels, wakes))
    return commands


def _dequeue(settings: Settings, ended: Ended) -> list[Command]:
    """Remove the queue entry, which is acknowledged only here or later: nobody would take the
    request up again.
    """
    facts = ended.summary.request
    if facts is None or not ended.queued:
        return []
    line = queue_key(settings.namespace, facts.model, facts.request_class)
    return [("XDEL", line, ended.queued), ("XACK", line, QUEUE_GROUP, ended.queued)]


AT_ACCEPT: tuple[Callable[[Settings, Accepted], list[Command]], ...] = (_list,)
AT_END: tuple[Callable[[Settings, Ended], list[Command]], ...] = (
    *(_expire, _retain),
    *(_announce, _dequeue),  # in this order, since a claim goes with the queue entry
)
