"""Waiting for what nothing announces. There is one deadline for every wait, because a busy machine
keeps anything waiting for seconds; a time that is promised is a test of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 180.0


def until(what: str, look: Callable[[], T | None], within_s: float = PATIENCE_S) -> T:
    """The first true answer of `look`; fails with `what` and the last answer if none comes.

    Args:
        within_s: a longer deadline, for services and nodes that start.
    """
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:g} s: {what} (last: {found!r})")
        time.sleep(0.05)
    return found


async def eventually(look: Callable[[], Awaitable[Any] | Any]) -> Any:
    """The first true answer of `look`, which may be a coroutine; fails with its source and the last
    answer if none comes.
    """
    found: Any = None
    try:
        async with asyncio.timeout(PATIENCE_S) as patience:
            while True:
                found = look()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.005)
    except TimeoutError:
        if not patience.expired():
            raise
        raise AssertionError(
            f"not within {PATIENCE_S:g} s: {_source(look)} (last: {found!r})"
        ) from None


def _source(look: Callable[[], Any]) -> str:
    try:
        return " ".join(inspect.getsource(look).split())
    except (OSError, TypeError):
        return repr(look)
