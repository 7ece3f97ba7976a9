"""How a request ended, as a reader of its journal knows it, and what the caller is told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.contract import Reason, State
from serve_app.journal.facts import Summary

MESSAGES = {
    Reason.CANCELLED: "The request was cancelled.",
    Reason.CLIENT_DISCONNECTED: "The client disconnected and did not reconnect.",
    Reason.DEADLINE: "The request's deadline passed before it was finished.",
    Reason.ATTEMPT_LOST: "The engine that worked on this request died and it cannot be continued; "
    "please try again.",
    Reason.JOURNAL_LOST: "Redis lost a part of this request's journal, so nothing can continue it; "
    "a new request starts from the beginning.",
    Reason.POISON: "This request killed every engine that worked on it and will not be retried.",
    Reason.EVENT_LOOP_BLOCKED: "One step of this request blocked all other requests of its "
    "engine; make it smaller or simpler.",
    Reason.ANSWER_TOO_LARGE: "The answer is larger than this service stores; ask for fewer answers "
    "or inputs, shorter ones, or without log probabilities.",
    Reason.MODEL_NOT_FOUND: "The model that this request waited for is not served any more.",
    Reason.ENGINE_ERROR: "The engine failed on this request.",
    Reason.INTERNAL: "The service failed on this request.",
}
"""Messages to the caller, by the reason of the ending."""


@dataclass(slots=True)
class Ending:
    """How a request ended."""

    state: State
    reason: Reason | None
    """None if the request was completed."""
    summary: Summary | None

    @property
    def message(self) -> str:
        if self.summary and self.summary.message:
            return self.summary.message
        if self.reason is Reason.ATTEMPT_LOST and self.summary and self.summary.why:
            return (
                "The engine that worked on this request died, and the answer cannot be continued "
                f"because {self.summary.why}; please try again."
            )
        return MESSAGES.get(self.reason, "The request failed.") if self.reason else ""
