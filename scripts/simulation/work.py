"""A request before and after: what a client asks for, and what became of it."""

from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """What one client asks for. `output_tokens` is the truth, which no decision may use."""

    prompt_tokens: int
    output_tokens: int
    """Of each sequence."""
    tenant: str = "tenant-0"
    session: str = ""
    request_class: str = "standard"
    base: int = 0
    """Identity of the text: equal for all turns of a conversation. 0: like no other."""
    kind: str = ""
    """As `serve_app.policy.work.Work`: what else shows of its length."""
    sequences: int = 1
    """Answers to the one prompt, as with `n`."""
    within_s: float = 3_600.0
    """Its deadline, from its arrival."""


@dataclass(slots=True)
class Record:
    """One request of a simulation. Times are virtual seconds; None: it has not happened."""

    request_id: str
    work: Work
    arrived_s: float
    started_s: float | None = None
    """When an ingress sent it to an engine."""
    first_token_s: float | None = None
    ended_s: float | None = None
    tokens: int = 0
    """Generated so far, by all sequences together."""
    preemptions: int = 0
    refused: bool = False
    """Too long for the engine."""
    retry_after_s: float | None = None
    """Refused with this `Retry-After`."""
    expired: bool = False
    """Accepted, and not answered before its deadline."""
    retry_of: "Record | None" = None
    """The refused request that its client has sent again as this one."""

    @property
    def answered(self) -> bool:
        return self.ended_s is not None and not self.expired

    @property
    def wait_s(self) -> float:
        assert self.started_s is not None
        return self.started_s - self.arrived_s

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None
        return self.first_token_s - self.arrived_s

    @property
    def per_token_s(self) -> float:
        assert self.first_token_s is not None
        assert self.ended_s is not None
        return (self.ended_s - self.first_token_s) / max(1, self.tokens / self.work.sequences - 1)

    @property
    def whole_s(self) -> float:
        assert self.ended_s is not None
        return self.ended_s - self.arrived_s
