"""Which requests may pass one that waits for room in the engines' memory. Pure.

The request whose turn it is keeps its turn while it does not fit. Smaller ones may pass meanwhile,
so that no memory is idle, but only until they have reserved `_PASSES` times what it needs: then
what becomes free is kept for it. So it waits a bounded time, however many small ones come.

A more urgent class is not held up by a less urgent one: `realtime` passes a waiting `batch` request
without that bound, for at most `held_up_s`, and `critical` for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from serve_app.policy.classes import CLASSES, CRITICAL, URGENCY
from serve_app.policy.room import Room
from serve_app.policy.tenants import TenantLines
from serve_app.policy.waiting import Claimed, Waiting

C = TypeVar("C", bound=Claimed)


class Patience(NamedTuple):
    """How long who waits for whom."""

    held_up_s: float = 60.0
    """For so long more urgent requests pass one that waits for room. It is much longer than most
    answers take, so that few of what is urgent ever wait for a `batch` request.
    """
    overdue_s: float = 10.0
    """After so long a request that needs more room than its ingress's share starts when nothing
    else of its ingress runs, even if other ingresses leave it no room: the engine makes it wait
    then.
    """


PATIENCE = Patience()
_URGENT = ("critical", "realtime")
_PASSES = 1.0
"""With 2, the mean wait of long requests grows by half, and no more memory is used."""


class _Held(Generic[C]):
    """A request whose turn it is, and for which there is no room."""

    def __init__(self, waiting: Waiting[C], tokens: int, now_ms: int, patience: Patience) -> None:
        self.waiting = waiting
        self._patience = patience
        self.urgency = _urgency(waiting)
        self.since_ms = now_ms
        self.left_tokens = _PASSES * tokens
        """What others may still reserve before it."""

    def overdue(self, waiting: Waiting[C], now_ms: int) -> bool:
        """Whether it is this one, and has waited for long."""
        return waiting is self.waiting and now_ms - self.since_ms >= 1000 * self._patience.overdue_s

    def lets_pass(self, other: Waiting[C], tokens: int, now_ms: int, own: _Held[C] | None) -> bool:
        """Whether another request may start first. `own`: its turn, if it keeps one.

        Of two that keep their turns, the more urgent goes first, and after `held_up_s` the older:
        otherwise each might wait for the other.
        """
        if other is self.waiting or other.entry.request_class == CRITICAL:
            return True
        held_up_ms = 1000 * self._patience.held_up_s
        if own is not None and own.since_ms <= min(self.since_ms, now_ms - held_up_ms):
            return True
        if (
            _urgency(other) < self.urgency
            and now_ms - self.since_ms < 1000 * self._patience.held_up_s
        ):
            return True
        return tokens <= self.left_tokens


class Overtaking(Generic[C]):
    """Chooses what starts, where the order of work and the room do not agree. At most one request
    of each class keeps its turn.
    """

    def __init__(self, patience: Patience = PATIENCE) -> None:
        self._patience = patience
        self._held: dict[str, _Held[C]] = {}
        self.passes = 0
        """How often a request started before one whose turn it was."""

    @property
    def short(self) -> bool:
        """Whether a request whose turn it is waits for room."""
        return bool(self._held)

    def choose(
        self,
        head: Waiting[C],
        lines: Mapping[str, TenantLines[C]],
        room: Room,
        now_ms: int,
        soon_ms: float,
    ) -> Waiting[C] | None:
        """The request that starts now; None if none may.

        Args:
            head: whose turn it is.
            lines: all that wait, by class.
            soon_ms: as in `TenantLines.next`.
        """
        if not room.bounded:
            self._held.clear()
            return head
        chosen = head.entry.request_class
        if chosen in self._held:
            head = self._held[chosen].waiting
        if self._starts(head, room, now_ms):
            return head
        tokens = room.need(head.prompt_tokens, head.output_tokens)
        if chosen not in self._held and not room.fits(tokens, chosen in _URGENT):
            self._held[chosen] = _Held(head, tokens, now_ms, self._patience)
        keep = sorted((held.waiting for held in self._held.values()), key=_urgency)
        # Whose turn it is in other classes, too: while nothing starts, `head` remains the same.
        for candidate in [*keep, *_others(head, lines, now_ms, soon_ms)]:
            if self._starts(candidate, room, now_ms):
                return candidate
        return None if room.reserved_tokens else self._oldest(now_ms)

    def _oldest(self, now_ms: int) -> Waiting[C] | None:
        """The one that has kept its turn for longest, if that is long: whatever the rules say, an
        ingress that runs nothing starts something.
        """
        oldest = min(self._held.values(), key=lambda held: held.since_ms, default=None)
        if oldest is None or not oldest.overdue(oldest.waiting, now_ms):
            return None
        return oldest.waiting

    def started(self, waiting: Waiting[C], tokens: int) -> None:
        """A request starts, and reserves so much."""
        held = self._held.get(waiting.entry.request_class)
        if held is not None and held.waiting is waiting:
            del self._held[waiting.entry.request_class]
        self.passes += bool(self._held) and tokens > 0
        for other in self._held.values():
            other.left_tokens = max(0.0, other.left_tokens - tokens)

    def _starts(self, waiting: Waiting[C], room: Room, now_ms: int) -> bool:
        tokens = room.need(waiting.prompt_tokens, waiting.output_tokens)
        urgent = waiting.entry.request_class in _URGENT
        own = self._held.get(waiting.entry.request_class)
        if own is not None and own.waiting is not waiting:
            own = None
        overdue = own is not None and own.overdue(waiting, now_ms)
        return room.fits(tokens, urgent, overdue) and all(
            held.lets_pass(waiting, tokens, now_ms, own) for held in self._held.values()
        )


def _others(
    head: Waiting[C], lines: Mapping[str, TenantLines[C]], now_ms: int, soon_ms: float
) -> Iterator[Waiting[C]]:
    """Of each class, the most urgent first: whose turn it is in it, and the one that needs least.
    If that one does not fit, none does.
    """
    for name in CLASSES:
        line = lines[name]
        if len(line):
            if name != head.entry.request_class:
                yield line.next(now_ms, soon_ms)
            yield line.least()


def _urgency(waiting: Waiting[C]) -> int:
    return URGENCY[waiting.entry.request_class]
