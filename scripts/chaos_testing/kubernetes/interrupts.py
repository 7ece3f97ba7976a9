"""Ctrl-C and SIGTERM: they end a run between two commands, and never what undoes a fault."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ending_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, and so does Ctrl-C, which a shell may have told this
    process to ignore. Afterwards both do what they did before.
    """
    before = [signal.signal(number, _interrupt) for number in _SIGNALS]
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def deferred() -> Iterator[None]:
    """A signal that comes meanwhile interrupts afterwards."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        # Not print: the signal may come while this process prints, and print cannot be re-entered.
        os.write(sys.stdout.fileno(), b"            the fault is undone first\n")

    before = [signal.signal(number, note) for number in _SIGNALS]
    try:
        yield
    finally:
        _restore(before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def ignored() -> Iterator[None]:
    """A signal that comes meanwhile is ignored."""
    before = [signal.signal(number, signal.SIG_IGN) for number in _SIGNALS]
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: Sequence[object]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        signal.signal(number, handler)  # type: ignore[arg-type]


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
