"""The one step that accepts a request: it writes journal, body and queue entry, or nothing.

The journal's first entry names the queue entry, whose id only Redis knows, so that whoever ends the
request can remove both. A transaction cannot depend on its own replies, nor on what an idempotency
key stands for, so this is a Lua script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from serve_app.redis.connection import Command, Script
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered

_ACCEPT = Script("""
if #KEYS > 0 then
  local named = redis.call('GET', KEYS[1]) or ''
  local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
  if named ~= ARGV[1] or (last and last[1] or '') ~= ARGV[2] then return 0 end
end
local at, queued = 3, nil
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  local command = {unpack(ARGV, at + 1, at + words)}
  if queued then
    command[#command + 1] = 'i'
    command[#command + 1] = queued
    queued = nil
  end
  local reply = redis.pcall(unpack(command))
  if type(reply) == 'table' and reply.err then return reply end
  if at == 3 then queued = reply end
  at = at + 1 + words
end
return 1
""")
"""Executes commands, and adds the reply of the first to the second, as its field `i`.

KEYS: none; or the string of an idempotency key and the journal of its request, and then nothing is
executed unless that string (ARGV[1]) and the id of the journal's last entry (ARGV[2]) are as given.
Further ARGV: for each command the number of its words and the words.
"""


class Condition(NamedTuple):
    """That nothing has changed: the string of an idempotency key, and the last entry of its
    request's journal.

    Args:
        keys: both Redis keys; none for a request without an idempotency key.
        named: the value of the string; empty if there is none.
        last: the id of the entry; empty if there is none.
    """

    keys: tuple[str, ...] = ()
    named: bytes = b""
    last: bytes = b""


ALWAYS = Condition()


async def accept(
    link: RedisLink,
    enqueueing: Command,
    first: Sequence[Command],
    condition: Condition = ALWAYS,
) -> bool:
    """Write a request, in one round trip. When it returns True, the request is accepted.

    Args:
        first: the commands that write the journal's first entry and whatever belongs to it; the
            entry's comes first.

    Returns:
        False: nothing was written, because the condition does not hold.

    Raises:
        RedisUnavailable: nothing was accepted; if it is `AnswerLost`, that is unknown.
    """
    keys, named, last = condition
    words = [word for command in (enqueueing, *first) for word in (len(command), *command)]
    script = ("EVAL", _ACCEPT, len(keys), *keys, named, last, *words)
    (accepted,) = all_answered(await link.call([script]))
    return bool(accepted)
