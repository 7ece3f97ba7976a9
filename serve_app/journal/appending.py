"""The commands that append an entry to a journal that exists. Pure."""

from __future__ import annotations

from serve_app.journal.entries import Entry, flatten
from serve_app.redis.connection import Command

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


def append(key: str, entry: Entry) -> Command:
    """Append an entry, unless the journal has gone."""
    return ("XADD", key, "NOMKSTREAM", str(entry.id), *flatten(entry))


def append_though_full(key: str, entry: Entry) -> Command:
    """The same for an entry with which a request ends, or that comes before that one, after a full
    Redis has refused it. The end frees more than it takes.
    """
    return ("EVAL", _THOUGH_FULL, 1, key, str(entry.id), *flatten(entry))
