"""The commands that append an entry to a journal that exists, and the one way in which a request
ends: a transaction that closes its journal, books what it has used, and drops what is no longer
needed. Pure.

A worker that ends its attempt, and whoever ends a request from outside, send the same script. The
first ending counts: a second one changes nothing, and is not booked.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app import timings
from serve_app.contract import FINAL, State
from serve_app.journal.entries import PLAIN, Entry, encode_wakes, flatten, wake_of
from serve_app.journal.facts import RequestFacts, Summary
from serve_app.journal.ids import TERMINAL_ID
from serve_app.journal.kept import keeping, size_of
from serve_app.journal.usage import Usage, Whose
from serve_app.redis.connection import Command, Script
from serve_app.redis.keyspace import (
    QUEUE_GROUP,
    body_key,
    journal_key,
    queue_key,
    usage_key,
    wake_channel,
)
from serve_app.settings import Settings

_THOUGH_FULL = """
redis.pcall('XDEL', KEYS[1], '0-0')
local reply = redis.pcall('XADD', KEYS[1], 'NOMKSTREAM', unpack(ARGV))
if type(reply) ~= 'table' then return reply end
return redis.error_reply((string.gsub(reply.err, '^@user_script: %d+: %-?', '')))
"""
"""Appends an entry although Redis has reached its `maxmemory`: of a script's writes it refuses only
the first one, if that may need memory, and this one deletes what no stream has. Errors are as
without a script, which Redis 6.2 names in them.
Source: https://redis.io/docs/latest/develop/programmability/eval-intro
"""
_FINISH = Script("""
redis.pcall('XDEL', KEYS[1], '0-0')
local at, attempts, used = 8, ARGV[5], ARGV[6]
local function command()
  local words = tonumber(ARGV[at])
  at = at + words + 1
  return {unpack(ARGV, at - words, at - 1)}
end

local outside = used == ''
if outside then
  used = '0 0 0 0 0'
  local before, last = '+', nil
  while true do
    local entry = redis.call('XREVRANGE', KEYS[1], before, '-', 'COUNT', 1)[1]
    if not entry then break end
    last = last or entry[1]
    local fields = {}
    for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
    if fields['k'] then return 0 end
    if fields['u'] then
      used = fields['u']
      break
    end
    before = '(' .. entry[1]
  end
  attempts = last and string.match(last, '^%d+') or '0'
end

for _ = 1, tonumber(ARGV[1]) do
  local append = command()
  if outside then
    append[#append + 1] = 'u'
    append[#append + 1] = used
  end
  local reply = redis.pcall(unpack(append))
  if type(reply) == 'table' and reply.err then
    return redis.error_reply((string.gsub(reply.err, '^@user_script: %d+: %-?', '')))
  end
  if not reply then return false end
end

local more = {0, 0, 0, 0}
more[tonumber(ARGV[3])] = 1
for number in string.gmatch(used .. ' ' .. attempts .. ' ' .. ARGV[4], '%d+') do
  more[#more + 1] = tonumber(number)
end
local row, column, booked = {}, 0, redis.call('HGET', KEYS[2], ARGV[2])
for number in string.gmatch(booked or '', '%d+') do
  column = column + 1
  more[column] = (more[column] or 0) + tonumber(number)
end
for i = 1, #more do row[i] = string.format('%.0f', more[i]) end
redis.call('HSET', KEYS[2], ARGV[2], table.concat(row, ' '))
if not booked then redis.call('PEXPIRE', KEYS[2], ARGV[7]) end
while at <= #ARGV do
  local one = command()
  if one[1] == 'TELL' then
    local claims = redis.pcall('XPENDING', one[2], one[3], one[4], one[4], 1)
    if claims[1] then redis.call('PUBLISH', one[5] .. claims[1][2], one[6]) end
  else
    redis.call(unpack(one))
  end
end
return 1
""")
"""Appends the entries that end a request, adds to a row of the ledger, and executes commands.

The first command is what makes a full Redis take all of it, see `_THOUGH_FULL`.

KEYS: the journal; the ledger of the hour. ARGV: how many entries; the row's name; the column of the
state, from 1; the times in ms, queued and running; the attempts; the usage, empty if the journal
says it, as for an ending from outside; the ledger's lifetime in ms; for each command, the entries'
first, the number of its words and the words. Returns 1; 0 if the request had ended; nil if its
journal has gone; the error if an entry was refused.

`TELL` is a command of its own: it publishes to whoever has claimed a queue entry. Its words: the
stream, the group, the entry's id, the channel without the name of the ingress, and the message.
"""


_NOTHING = Usage().encode()


_APPEND = b"*14\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$10\r\nNOMKSTREAM\r\n$%d\r\n%b\r\n"
_APPEND_PLAIN = _APPEND + b"".join(b"$1\r\n%b\r\n$%%d\r\n%%b\r\n" % name for name in PLAIN)


def append(key: str, entry: Entry) -> Command:
    """Append an entry, unless the journal has gone (hot path)."""
    if tuple(entry.fields) != PLAIN:
        return ("XADD", key, "NOMKSTREAM", str(entry.id), *flatten(entry))
    of, at = key.encode(), b"%d-%d" % entry.id
    n, o, b, e, u = entry.fields.values()
    lengths = len(n), n, len(o), o, len(b), b, len(e), e, len(u), u
    return _APPEND_PLAIN % (len(of), of, len(at), at, *lengths)


def append_though_full(key: str, entry: Entry) -> Command:
    """The same for an entry with which a request ends, or that comes before that one, after a full
    Redis has refused it. The end frees more than it takes.
    """
    return ("EVAL", _THOUGH_FULL, 1, key, str(entry.id), *flatten(entry))


def by_worker(
    settings: Settings,
    request_id: str,
    seal: Entry,
    terminal: Entry,
    summary: Summary,
    size: int,
    queued: bytes,
) -> Command:
    """The command with which an attempt ends its request: the fenced seal, and the terminal entry.
    Its queue entry goes with it.

    Args:
        size: bytes of the journal, if its entries remain.
        queued: the id of its queue entry; empty if it is not known.
    """
    facts = summary.request
    trimmed = terminal.packed is not None
    if facts is not None and facts.kept and terminal.state is not State.COMPLETED:
        trimmed = True  # nobody wants what was broken off for that long
    after = _afterwards(settings, request_id, facts, trimmed)
    after += keeping(settings, summary, size_of(terminal) if trimmed else size)
    if facts is not None and queued:
        after += _dequeueing(settings, facts, queued)
    return _command(settings, request_id, [seal, terminal], summary, seal.used or _NOTHING, after)


def from_outside(
    settings: Settings,
    request_id: str,
    terminal: Entry,
    summary: Summary,
    queued: bytes,
    unreadable: Whose | None = None,
) -> Command:
    """The command with which anybody else ends a request: cancelled, expired, lost. Its queue entry
    goes with it, and who reads the answer is told.

    Args:
        queued: the id of its queue entry; empty if it is not known.
        unreadable: whose it is, if its journal cannot be decoded.
    """
    facts = summary.request
    if facts is None:
        after = _afterwards(settings, request_id, None, trimmed=False)
        return _command(settings, request_id, [terminal], summary, b"", after, unreadable)
    after = _afterwards(settings, request_id, facts, trimmed=facts.kept)
    after += keeping(settings, summary, size_of(terminal))
    wakes = encode_wakes([wake_of(request_id, terminal)])
    after.append(("PUBLISH", facts.wake, wakes))
    if queued:  # nobody waits for a claim of it any more
        line = queue_key(settings.namespace, facts.model, facts.request_class)
        channels = wake_channel(settings.namespace, "")
        after.append(("TELL", line, QUEUE_GROUP, queued, channels, wakes))  # it shall not start it
        after += _dequeueing(settings, facts, queued)
    return _command(settings, request_id, [terminal], summary, b"", after)


def _dequeueing(settings: Settings, facts: RequestFacts, queued: bytes) -> list[Command]:
    """A queue entry is acknowledged only here or later: nobody would take the request up again."""
    line = queue_key(settings.namespace, facts.model, facts.request_class)
    return [("XDEL", line, queued), ("XACK", line, QUEUE_GROUP, queued)]


def _afterwards(
    settings: Settings, request_id: str, facts: RequestFacts | None, trimmed: bool
) -> list[Command]:
    """What becomes of journal and body."""
    key, body = (make(settings.namespace, request_id) for make in (journal_key, body_key))
    keep_ms = int(((facts and facts.retention_s) or settings.journal.retention_s) * 1000)
    trim: list[Command] = [("XTRIM", key, "MINID", str(TERMINAL_ID))] if trimmed else []
    stored = facts is not None and facts.stored
    its_body: Command = ("PEXPIRE", body, keep_ms) if stored else ("UNLINK", body)
    return [*trim, ("PEXPIRE", key, keep_ms), its_body]


def _command(
    settings: Settings,
    request_id: str,
    entries: Sequence[Entry],
    summary: Summary,
    used: bytes,
    after: Sequence[Command],
    unreadable: Whose | None = None,
) -> Command:
    key = journal_key(settings.namespace, request_id)
    commands = [*(append(key, entry) for entry in entries), *after]
    words = [word for command in commands for word in (len(command), *command)]
    ledger = usage_key(settings.namespace, summary.ended_ms // timings.HOUR_MS)
    state = FINAL.index(entries[0].state or State.FAILED) + 1
    row, times = unreadable or whose(summary), " ".join(map(str, times_ms(summary)))
    return (
        *("EVAL", _FINISH, 2, key, ledger),
        *(len(entries), row.encode(), state, times, summary.attempts, used),
        *(int(settings.journal.usage_retention_days * 24 * timings.HOUR_MS), *words),
    )


def whose(summary: Summary) -> Whose:
    """The row of the ledger that a request belongs to."""
    facts = summary.request
    if facts is None:
        return Whose("?", "", "?", "?")
    return Whose(facts.tenant, facts.key, facts.request_class, facts.model)


def times_ms(summary: Summary) -> tuple[int, int]:
    """How long a request waited and ran."""
    if summary.request is None:
        return 0, 0
    began_ms = summary.began_ms or summary.ended_ms
    queued_ms = max(0, began_ms - summary.request.admitted_ms)
    return queued_ms, max(0, summary.ended_ms - began_ms)
