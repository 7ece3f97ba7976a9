"""The steps of a request's life, each one round trip to Redis: accept, append, read, end.

`lifecycle.lua` has the scripts. A worker that ends its attempt, and whoever ends a request from
outside, execute the same one. The first ending counts: a second one changes nothing.

A signal adds commands to the script of a step (a request is listed, retained, dequeued, announced),
so that they are executed exactly once, whatever dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from typing import NamedTuple

from serve_app import timings
from serve_app.contract import CHATS, FINAL, State
from serve_app.journal.entries import (
    PLAIN,
    TERMINAL_ID,
    Entry,
    RequestFacts,
    RequestLine,
    Summary,
    encode_used,
    encode_wakes,
    flatten,
    wake_of,
)
from serve_app.journal.ledger import Whose
from serve_app.journal.usage import Usage
from serve_app.policy.tenant_limits import NO_LIMITS, Limits, Over, Standing, in_order
from serve_app.policy.work import Work
from serve_app.redis.connection import Command, Script, as_arguments
from serve_app.redis.keyspace import (
    QUEUE_GROUP,
    body_key,
    chats_key,
    due_key,
    journal_key,
    kept_key,
    limits_key,
    queue_key,
    requests_key,
    running_key,
    twins_key,
    usage_key,
    wake_channel,
)
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.request_queue import encode_entry
from serve_app.settings import Settings
from serve_app.webhooks.events import event_of, subject_of
from serve_app.webhooks.outbox import telling

SCRIPT = Script(files(__package__).joinpath("lifecycle.lua").read_text())
_NOTHING = encode_used(Usage())

_APPEND = b"*14\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$10\r\nNOMKSTREAM\r\n$%d\r\n%b\r\n"
_APPEND_PLAIN = _APPEND + b"".join(b"$1\r\n%b\r\n$%%d\r\n%%b\r\n" % name for name in PLAIN)

_STREAM_BYTES = 4_700
"""What Redis needs for a stream besides the fields (docs/redis.md)."""


class Offer(NamedTuple):
    """A request that is accepted if its tenant's limits permit what its facts reserve.

    Args:
        asks: accept nothing, only say whether the limits would permit it.
    """

    request_id: str
    line: RequestLine
    body: bytes
    facts: RequestFacts
    work: Work
    limits: Limits = NO_LIMITS
    asks: bool = False


class Answer(NamedTuple):
    """What has become of an offer.

    Args:
        request_id: its id once it is accepted; the id of an equal request, to join that one;
            nothing, if the condition does not hold, or nothing was to be accepted. Nothing was
            written then.
        standing: what its tenant has used of its limits, if it has any.
    """

    request_id: str
    standing: Standing | None = None

    @property
    def refused(self) -> bool:
        return self.standing is not None and self.standing.over is not Over.NONE


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


class Condition(NamedTuple):
    """What stood in Redis when an idempotency key was read: the string that names its request, and
    the id of the last entry of that one's journal; empty for what did not exist. A request is
    accepted only if the same still stands under `keys`.
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
    offer: Offer,
    condition: Condition = ALWAYS,
    naming: Sequence[Command] = (),
) -> Answer:
    """Write a request: queue entry, journal, body and deadline.

    Args:
        naming: commands that give an idempotency key to the request.

    Raises:
        RedisUnavailable: nothing was accepted; if it is `AnswerLost`, that is unknown.
    """
    request_id, line, body, facts, work, *_ = offer
    namespace, kept_ms = settings.namespace, keep_ms(settings, facts)
    key, first = journal_key(namespace, request_id), Entry.request(line, facts)
    whose = (request_id, facts.tenant, facts.session, facts.deadline_ms)
    queued = chain.from_iterable(encode_entry(*whose, work, facts.trace).items())
    commands: list[Command] = [
        ("XADD", queue_key(namespace, facts.model, facts.request_class), "*", *queued),
        ("XADD", key, str(first.id), *flatten(first)),
        ("PEXPIRE", key, kept_ms),
        ("SET", body_key(namespace, request_id), body, "PX", kept_ms),
        ("ZADD", due_key(namespace), facts.deadline_ms, request_id),
    ]
    commands += [*_list(settings, offer), *naming]
    commands = [*_limit(settings, offer), *([] if offer.asks else commands)]
    keys, *given = condition
    if facts.twins:
        keys, lifetime_ms = (twins_key(namespace, facts.twins),), _twins_ms(settings)
        twin = f"{facts.admitted_ms + lifetime_ms} {request_id} {facts.wake_channel}\n"
        given = [b"%d" % lifetime_ms, twin.encode()]
    script = ("EVAL", SCRIPT, len(keys), *keys, "accept", *given)
    (reply,) = all_answered(await link.call([(*script, *as_arguments(commands))]))
    done, *used = reply if isinstance(reply, list) else [reply]
    standing = Standing(offer.limits, Over(used[0]), *used[1:]) if used else None
    joined = done.decode() if isinstance(done, bytes) else ""
    return Answer(request_id if done == 1 else joined, standing)


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
    what the signals add.

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
    began_ms = summary.began_ms or summary.ended_ms
    queued_ms = max(0, began_ms - facts.admitted_ms) if facts else 0
    running_ms = max(0, summary.ended_ms - began_ms) if facts else 0
    *before, terminal = ended.entries
    if not ended.trimmed:
        terminal = terminal.counting(ended.size)
    commands: list[Command] = [
        ("XADD", key, "NOMKSTREAM", str(entry.id), *flatten(entry)) for entry in (*before, terminal)
    ]
    commands.append(("ZREM", due_key(settings.namespace), ended.request_id))
    commands += [*_expire(settings, ended), *_retain(settings, ended)]
    # in this order, since a claim goes with the queue entry
    commands += [*_announce(settings, ended), *_remove_from_queue(settings, ended)]
    commands += [*_leave_twins(settings, ended), *_settle(settings, ended), *_tell(settings, ended)]
    return (
        *("EVAL", SCRIPT, 2, key, ledger, "end", len(ended.entries), whose.encode()),
        FINAL.index(ended.terminal.state or State.FAILED) + 1,
        f"{queued_ms} {running_ms}",
        summary.attempts,
        b"" if ended.from_outside else ended.terminal.used or _NOTHING,
        int(settings.journal.usage_retention_days * 24 * timings.HOUR_MS),
        *as_arguments(commands),
    )


# -- what else happens -----------------------------------------------------------------------------


def _list(settings: Settings, offer: Offer) -> list[Command]:
    """List the request; the oldest ones beyond `journal.listed_requests` go. The lines of a batch
    are not listed: they would displace all others.
    """
    facts = offer.facts
    if facts.batch:
        return []
    keys = [requests_key(settings.namespace, facts.tenant)]
    if offer.line.path == CHATS and facts.stored:
        keys.append(chats_key(settings.namespace, facts.tenant))
    ingress, journal = settings.ingress, settings.journal
    longest_s = max(ingress.max_request_timeout_s, ingress.background_timeout_s)
    commands: list[Command] = []
    for key in keys:
        commands += [
            ("ZADD", key, facts.admitted_ms, offer.request_id),
            ("ZREMRANGEBYRANK", key, 0, -1 - journal.listed_requests),
            ("PEXPIRE", key, int((longest_s + journal.max_retention_s) * 1000)),
        ]
    return commands


def _limit(settings: Settings, offer: Offer) -> list[Command]:
    """Check the tenant's limits, and take from them what the request reserves."""
    facts, reserved = offer.facts, offer.facts.reserved
    if reserved is None:
        return []
    limits, whose = offer.limits, (settings.namespace, facts.tenant)
    counted = limits.concurrent_requests or limits.background_tokens
    ended_ms = facts.deadline_ms + int(timings.ENDED_WITHIN_S * 1000) if counted else 0
    used = limits_key(*whose), running_key(*whose), timings.LIMITS_KEPT_MS
    asked = reserved.month, reserved.tokens, reserved.background_tokens, int(not facts.batch)
    its = facts.admitted_ms, ended_ms, offer.request_id
    return [("LIMIT", *used, *its, *asked, *in_order(limits))]


def _settle(settings: Settings, ended: Ended) -> list[Command]:
    """Give back what the request has taken of its tenant's limits."""
    facts = ended.summary.request
    if facts is None or facts.reserved is None:
        return []
    its, whose = facts.reserved, (settings.namespace, facts.tenant)
    used = limits_key(*whose), running_key(*whose), timings.LIMITS_KEPT_MS
    given = its.month, its.tokens, its.background_tokens, int(not facts.batch)
    return [("SETTLE", *used, ended.request_id, *given)]


def not_joined(settings: Settings, request_id: str, facts: RequestFacts) -> Command:
    """The command after which no retry joins a request: its client has left."""
    twins = twins_key(settings.namespace, facts.twins)
    return ("EVAL", SCRIPT, 1, twins, "leave", request_id, _twins_ms(settings))


def _twins_ms(settings: Settings) -> int:
    """How long the newest of equal requests may run, and wait for a retry then."""
    ingress = settings.ingress
    return int((ingress.max_request_timeout_s + ingress.lost_reader_grace_s) * 1000)


def _leave_twins(settings: Settings, ended: Ended) -> list[Command]:
    """No retry joins the request any more, unless its reader died before it got the answer."""
    facts = ended.summary.request
    if facts is None or not facts.twins:
        return []
    twins = twins_key(settings.namespace, facts.twins)
    until_ms = ended.summary.ended_ms + int(settings.ingress.lost_reader_grace_s * 1000)
    return [("LEAVE", twins, ended.request_id, facts.wake_channel, until_ms, _twins_ms(settings))]


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
    commands: list[Command] = [("PUBLISH", facts.wake_channel, wakes)]
    if ended.queued:
        line = queue_key(settings.namespace, facts.model, facts.request_class)
        channels = wake_channel(settings.namespace, "")
        commands.append(("TELL", line, QUEUE_GROUP, ended.queued, channels, wakes))
    return commands


def _remove_from_queue(settings: Settings, ended: Ended) -> list[Command]:
    """Remove the queue entry, which is acknowledged only here or later: nobody would take the
    request up again.
    """
    facts = ended.summary.request
    if facts is None or not ended.queued:
        return []
    line = queue_key(settings.namespace, facts.model, facts.request_class)
    return [("XDEL", line, ended.queued), ("XACK", line, QUEUE_GROUP, ended.queued)]


def _tell(settings: Settings, ended: Ended) -> list[Command]:
    """Write the event for the receivers of webhooks."""
    facts, its = ended.summary.request, ended.summary
    if facts is None or not facts.tells:
        return []
    event = event_of(facts.tells, ended.terminal.state or State.FAILED, its.cut)
    subject = subject_of(facts.tells, ended.request_id)
    return telling(settings, event, subject, facts.tenant, its.ended_ms, facts.webhook)
