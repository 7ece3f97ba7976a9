"""The order of work among claimed requests: classes in order of urgency, then age. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

CLASSES = ("realtime", "standard", "batch")
DEFAULT_CLASS = "standard"

# OpenAI's service_tier: https://platform.openai.com/docs/guides/priority-processing and /flex-processing
SERVICE_TIERS = {"priority": "realtime", "auto": "standard", "default": "standard", "flex": "batch"}


class Waiting(Protocol):
    """What the order looks at."""

    @property
    def request_class(self) -> str:
        """One of `CLASSES`."""
        ...

    @property
    def enqueued_ms(self) -> int:
        """Unix milliseconds."""
        ...


W = TypeVar("W", bound=Waiting)


def in_order(waiting: Iterable[W]) -> list[W]:
    """Most urgent class first, oldest first within a class."""
    return sorted(waiting, key=lambda item: (CLASSES.index(item.request_class), item.enqueued_ms))
