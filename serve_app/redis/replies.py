"""The meaning of Redis's replies. Replies to raw commands contain errors as exception objects.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.errors import RedisRefuses, RedisUnavailable, RefusedForNow

Reply = Any

_DEMOTED = ("READONLY ", "MASTERDOWN ")
_FOR_NOW = (
    "OOM ",
    "LOADING ",
    "BUSY ",
    "TRYAGAIN ",
    "NOREPLICAS ",
    "MISCONF ",
    (_NO_MORE_CLIENTS := "ERR max number of clients"),
    *_DEMOTED,
)
_RIGHTS = ("NOPERM ", "NOAUTH ")


def answered(reply: Reply, what: str = "Redis") -> Any:
    """Return a reply that is not an error.

    Raises:
        RedisUnavailable: the reply is an error; the message is `what` and Redis's own text.
    """
    if isinstance(reply, Exception):
        raise RedisUnavailable(f"{what}: {reply}")
    return reply


def all_answered(replies: Sequence[Reply], what: str = "Redis") -> Sequence[Any]:
    """Return replies none of which is an error; see `answered`."""
    for reply in replies:
        answered(reply, what)
    return replies


def owned_by_another(namespace: str, owner: bytes | None, service: str) -> str:
    """Why a service may not use a namespace, in a sentence; empty if it may.

    Args:
        owner: what the key of the namespace's service holds.
        service: the name of this one; if it is empty, it is not compared.
    """
    name = (owner or b"").decode(errors="replace")
    if not service or name in ("", service):
        return ""
    return (
        f"the namespace '{namespace}' of this Redis belongs to the service '{name}', and this one "
        f"is '{service}' (settings `namespace`, `service`)"
    )


def check_refused(what: str, reply: Reply) -> None:
    """Check the reply to a command that Redis must accept.

    Raises:
        RedisRefuses: the reply is an error.
        RefusedForNow: the same, but it will pass by itself: Redis is full, loads, or fails over.
    """
    if isinstance(reply, Exception):
        check_passes(what, str(reply))
        raise RedisRefuses(what, str(reply))


def check_passes(what: str, error: str) -> None:
    """Check an error of Redis, which must be one that does not pass by itself.

    Raises:
        RefusedForNow: it does.
    """
    if error.startswith(_NO_MORE_CLIENTS):
        raise RefusedForNow(RefusedForNow.CLIENTS, error)
    if error.startswith(_FOR_NOW):
        raise RefusedForNow(what, error)


def _passes(reply: Reply) -> bool:
    return isinstance(reply, Exception) and str(reply).startswith(_FOR_NOW)


def is_refused_for_now(reply: Reply) -> bool:
    """Whether Redis may accept the same command later: when the error has passed, or when its
    operator has given a right back.
    """
    return _passes(reply) or (isinstance(reply, Exception) and str(reply).startswith(_RIGHTS))


def is_demoted(reply: Reply) -> bool:
    """Whether this Redis is not the primary (any more)."""
    return isinstance(reply, Exception) and str(reply).startswith(_DEMOTED)


def is_full(reply: Reply) -> bool:
    """Whether Redis has reached its `maxmemory`."""
    return isinstance(reply, Exception) and str(reply).startswith("OOM ")


def is_unknown_script(reply: Reply) -> bool:
    """Whether Redis has forgotten the script, and therefore executed nothing of it."""
    return isinstance(reply, Exception) and str(reply).startswith("NOSCRIPT ")


def is_of_another_type(reply: Reply) -> bool:
    """Whether the key has another type than the command expects, so that it is not one of ours."""
    return isinstance(reply, Exception) and str(reply).startswith("WRONGTYPE")


def is_id_taken(reply: Reply) -> bool:
    """Whether Redis rejected an `XADD` because its id is not above the last one in the stream."""
    return isinstance(reply, Exception) and (
        "exhausted" in str(reply) or "equal or smaller" in str(reply)
    )
