"""Every command that the service sends to Redis, with the options that it uses, on keys that nobody
else uses. Pure: `check.py` sends them and judges the answers.

The tests' Redis permits its user these commands and no others, so none can be missing here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from redis.asyncio.lock import Lock

from serve_app import timings
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import trial_channel, trial_key

_RELEASE, _REACQUIRE = Lock.LUA_RELEASE_SCRIPT, Lock.LUA_REACQUIRE_SCRIPT


_PARTS = ("journal", "queue", "text", "set", "sums")


class Trial(NamedTuple):
    """What to send, in this order. `listening` needs a connection of its own, on which the message
    of the one `PUBLISH` must arrive.
    """

    listening: Sequence[Command]
    commands: Sequence[Command]


def trial(namespace: str, process: str, db: int) -> Trial:
    """The commands of one trial.

    Args:
        process: a name that no other process uses.
        db: the database of the connections.
    """
    keys = [trial_key(namespace, process, part) for part in _PARTS]
    journal, queue, text, leases, sums = keys
    channel = trial_channel(namespace, process)
    commands: list[Command] = [
        ("SELECT", db),
        ("PING",),
        ("TIME",),
        ("UNLINK", *keys),  # of a trial that was interrupted
        *_acceptance(journal, queue, text, leases),
        *_journal(journal, text),
        *_queue(queue, journal),
        *_leases(leases),
        *_sums(sums),
        *_lock(text),
        ("PUBLISH", channel, "x"),
        ("UNLINK", *keys),
    ]
    return Trial([("SUBSCRIBE", channel), ("PING",)], commands)


def _acceptance(journal: str, queue: str, text: str, listed: str) -> list[Command]:
    """A request is accepted by a script, which sends these. It goes as `EVALSHA` (`_lock` has it),
    and as `EVAL` where Redis does not have it.
    """
    return [
        ("EVAL", "return 1", 0),
        ("XADD", journal, "0-1", "f", "x"),
        ("PEXPIRE", journal, timings.REDIS_TRIAL_MS),
        ("SET", text, "x", "PX", timings.REDIS_TRIAL_MS),
        ("XADD", queue, "MAXLEN", 10, "*", "f", "x"),
        ("PEXPIRE", queue, timings.REDIS_TRIAL_MS),
        ("ZADD", listed, 1, "x"),
        ("ZREMRANGEBYRANK", listed, 0, -2),
        ("PEXPIRE", listed, timings.REDIS_TRIAL_MS),
    ]


def _journal(journal: str, text: str) -> list[Command]:
    return [
        ("XADD", journal, "NOMKSTREAM", "1-0", "f", "x"),
        ("XRANGE", journal, "(0-1", "+", "COUNT", 1),
        ("XREVRANGE", journal, "+", "-", "COUNT", 1),
        ("EXISTS", journal),
        ("PTTL", journal),
        ("XTRIM", journal, "MINID", "1-0"),
        ("GET", text),
        ("GETRANGE", text, 0, 1),
        ("MGET", text, journal),
    ]


def _queue(queue: str, other: str) -> list[Command]:
    return [
        ("XGROUP", "CREATE", queue, "g", "0", "MKSTREAM"),
        ("XGROUP", "CREATE", other, "g", "$", "MKSTREAM"),
        (
            "XREADGROUP",
            "GROUP",
            "g",
            "c",
            "COUNT",
            1,
            "BLOCK",
            1,
            "STREAMS",
            queue,
            other,
            ">",
            ">",
        ),
        ("XPENDING", queue, "g"),
        ("XPENDING", queue, "g", "IDLE", 0, "-", "+", 1, "c"),
        ("XINFO", "GROUPS", queue),
        ("XLEN", queue),
        ("XCLAIM", queue, "g", "c", 0, "0-1"),
        ("XACK", queue, "g", "0-1"),
        ("XDEL", queue, "0-1"),
    ]


def _leases(leases: str) -> list[Command]:
    return [
        ("ZADD", leases, 1, "x"),
        ("PEXPIRE", leases, timings.REDIS_TRIAL_MS),
        ("ZRANK", leases, "x"),
        ("ZRANGE", leases, 0, 0),
        ("ZREVRANK", leases, "x"),
        ("ZREVRANGE", leases, 0, 0),
        ("ZRANGEBYSCORE", leases, 0, "+inf"),
        ("ZREMRANGEBYSCORE", leases, "-inf", 0),
        ("ZREM", leases, "x"),
    ]


def _sums(sums: str) -> list[Command]:
    return [
        ("HINCRBY", sums, 1, 1),
        ("HGETALL", sums),
        ("HGET", sums, 1),
        ("HSET", sums, 1, 1),
        ("HDEL", sums, 1),
    ]


def _lock(lock: str) -> list[Command]:
    """redis-py's lock, whose scripts send GET, PEXPIRE and DEL."""
    return [
        ("DEL", lock),
        ("SET", lock, "x", "NX", "PX", timings.REDIS_TRIAL_MS),
        ("SCRIPT", "LOAD", _REACQUIRE),
        ("SCRIPT", "LOAD", _RELEASE),
        ("EVALSHA", _sha(_REACQUIRE), 1, lock, "x", timings.REDIS_TRIAL_MS),
        ("EVALSHA", _sha(_RELEASE), 1, lock, "x"),
    ]


def _sha(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
