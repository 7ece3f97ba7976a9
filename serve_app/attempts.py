"""The words in which carriers, workers and Ray's calls between them speak of attempts. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple

NOT_OPENED = "not_opened"
"""A call went out, and no worker has opened the attempt."""
LOST = "lost"
"""An attempt's engine or worker died under it."""


class Outcome(StrEnum):
    """What a worker says of an attempt."""

    ENDED = "ended"
    FENCED = "fenced"
    """Another attempt holds the journal, or it is gone."""


Execute = Callable[[str, int, str, str], Awaitable[Outcome]]
"""`execute(request_id, epoch, session, cause)`. Raises `WorkerLost` if nobody can tell how it went."""


class WorkerLost(Exception):
    """The replica died or became unreachable under a call."""


class Next(NamedTuple):
    """The attempt to run: its epoch, and why the one before ended."""

    epoch: int
    cause: str = ""
    refused: int = 0
    """How often it could not even be opened."""
    suspect: bool = False
    """Whether the next lost attempt would be the last: such requests run one at a time."""


class NotOurs(Exception):
    """Another ingress has taken the claim over while this one slept."""
