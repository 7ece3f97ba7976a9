"""Puts functions of ours around vLLM's: each gets vLLM's own first, and then its arguments."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """A method of a class, or a function where it is defined; once in a process."""
    if not hasattr(function := getattr(owner, name), "__wrapped__"):
        setattr(owner, name, _wrapped(function, around))


def replace(function: Callable[..., Any], around: Callable[..., Any]) -> None:
    """In all modules of vLLM, which import it by name; once in a process."""
    if hasattr(function, "__wrapped__"):
        return
    wrapped = _wrapped(function, around)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get(function.__name__) is function:
            setattr(module, function.__name__, wrapped)


def _wrapped(function: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(function, *args, **options)

    @functools.wraps(function)
    async def awaited(*args: Any, **options: Any) -> Any:
        return await around(function, *args, **options)

    return awaited if inspect.iscoroutinefunction(function) else wrapped
