"""What differs between blocking code and asyncio, so that everything else is written once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import httpx

T = TypeVar("T")


class Io(NamedTuple):
    """The differences between blocking code and asyncio. Each call returns a result or an awaitable
    of one.
    """

    give_up_after_s: float
    send: Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]
    pause: Callable[[float], Any]
    load: Callable[[httpx.Request], Any]
    chunks: Callable[[Any], Any]
    next: Callable[[Any, None], bytes | Awaitable[bytes | None] | None]
    close: Callable[[Any], Any]


async def done(call: T | Awaitable[T]) -> T:
    """The result of a call of `Io`."""
    return await call if isinstance(call, Awaitable) else call


def run(steps: Coroutine[Any, Any, T]) -> T:
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("blocking calls left something to wait for")


async def read(io: Io, stream: Any) -> bytes:
    chunks, parts = io.chunks(stream), []
    try:
        while (chunk := await done(io.next(chunks, None))) is not None:
            parts.append(chunk)
    finally:
        await done(io.close(stream))
    return b"".join(parts)
