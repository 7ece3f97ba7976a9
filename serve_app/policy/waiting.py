"""A claimed request that waits for its start, and what the policies consider of it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from serve_app.policy.running import Running


class Claimed(Protocol):
    """The properties of a request that the policies consider."""

    @property
    def request_class(self) -> str:
        """One of `CLASSES`."""
        ...

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        ...

    @property
    def enqueued_ms(self) -> int:
        """Unix milliseconds, by Redis's clock."""
        ...

    @property
    def deadline_ms(self) -> int:
        """Unix milliseconds, by Redis's clock."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """An estimate of the tokens that it reads."""
        ...

    @property
    def max_output_tokens(self) -> int:
        """The most that it may write; 0 if the client gave no limit."""
        ...

    @property
    def kind(self) -> str:
        """What else shows of its length before it is computed, see `Work`."""
        ...


C = TypeVar("C", bound=Claimed)


class Waiting(Generic[C]):
    """One of them, from its claim to its start, or from the end of a slice to the next."""

    __slots__ = (
        "entry",
        "latest_ms",
        "left",
        "output_tokens",
        "prompt_tokens",
        "rank_ms",
        "resumes",
        "since_ms",
    )

    def __init__(
        self,
        entry: C,
        rank_ms: float,
        latest_ms: float,
        since_ms: int,
        prompt_tokens: float = 0.0,
        output_tokens: float = 0.0,
        resumes: Running[C] | None = None,
    ) -> None:
        self.entry = entry
        self.latest_ms = latest_ms
        """Until when it must start to meet its deadline, as predicted."""
        self.rank_ms = rank_ms
        """Its place among its tenant's requests: the least goes first."""
        self.since_ms = since_ms
        """Since when it waits, in Unix milliseconds."""
        self.prompt_tokens = prompt_tokens
        """What it will probably read, for the room in the engines' memory."""
        self.output_tokens = output_tokens
        """What it will probably write at most."""
        self.resumes = resumes
        """If it has run before: that request."""
        self.left = False
        """Whether it has started."""
