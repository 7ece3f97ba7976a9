"""Ctrl-C and SIGTERM end the command in order, at any moment, and only the first one counts."""

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

import uvloop

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Result = TypeVar("_Result")


def install() -> None:
    """From now on the first signal raises KeyboardInterrupt in the main thread."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run ``coroutine`` on an event loop; a signal cancels it and becomes a KeyboardInterrupt."""
    try:
        return uvloop.run(_cancelled_by_signal(coroutine))
    except asyncio.CancelledError:
        _ignore()
        raise KeyboardInterrupt from None
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # The loop puts Python's own handlers back in place when it closes.
            install()


async def _cancelled_by_signal(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    # An exception raised by a handler within a protocol's callback would be taken for that
    # connection's error.
    task = asyncio.ensure_future(coroutine)
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    _ignore()
    raise KeyboardInterrupt


def _ignore() -> None:
    # A second Ctrl-C must not interrupt the ending, which takes seconds and no more.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
