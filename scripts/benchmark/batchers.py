"""The batchers, each a pure object that says which waiting jobs start now, and what they get."""

import math
import random
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from typing import NamedTuple

INTERACTIVE_SHARE = 0.7
DEFAULT = "serial,static:4,dynamic:32/50/8192,async:32,continuous,tuned,hybrid:64"
SMALLEST = 8
LARGEST = 64
LOOK_EVERY_S = 0.1
_GROW_ABOVE = 0.7
_SHRINK_BELOW = 0.5
_SHORTEST_PART = 16
_HYBRID_SLOTS = 64

ABOUT = """\
batchers (--batching): each stands between the users and the endpoint, in this process.
  serial                    one request at a time
  static:N                  waits for N requests, runs them, waits for all to end, and only then
                            takes the next N (of fewer than N users: all of them)
  dynamic:N/wait_ms/tokens  the same, but a batch is complete at N requests, or when the next one
                            would make more than so many tokens (prompt and output), or when its
                            oldest request has waited for wait_ms
  async:N                   N at a time, first in, first out; one that ends makes room for the next
  continuous                everything straight to the engine's own continuous batching
  tuned                     async with a window that doubles from 8 to 64 above a load of 0.7 and
                            halves below 0.5; load: requests that run or wait, per slot; looked at
                            ten times a second
  hybrid:N                  N slots (64); while both wait, interactive requests get 70 % of them and
                            batch work 30 %; whoever waits alone gets all
  split:N/size/wait_ms/tokens
                            interactive requests as with async:N, batch work as with dynamic, each
                            in slots of its own
  Output lengths are mixed: log-uniform from a sixteenth of --max-tokens to all of it; 70 % of the
  requests are interactive. All batchers of a round get the same lengths and arrivals. A run sends
  for --duration-s; what was sent gets as long again to end, the rest is unfinished, and counts in
  the latencies with the time that it had waited by then (≥)."""


class Job(NamedTuple):
    """One request that waits for a batcher, or runs at the engine."""

    number: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    interactive: bool

    @property
    def tokens(self) -> int:
        """What the request adds to the tokens of a batch."""
        return self.prompt_tokens + self.output_tokens


def mix(seed: str, longest_tokens: int, prompt_tokens: int = 0) -> Iterator[Job]:
    """Requests without end, equal for equal seeds; whoever takes one says when it arrives.

    Output lengths are log-uniform from a sixteenth of ``longest_tokens`` to all of it: half of the
    requests are shorter than a quarter. 70 % are interactive, whatever their length.
    """
    rng = random.Random(seed)
    low, high = math.log(max(1, longest_tokens // _SHORTEST_PART)), math.log(longest_tokens)
    for number in count():
        tokens = round(math.exp(rng.uniform(low, high)))
        yield Job(number, 0.0, prompt_tokens, tokens, rng.random() < INTERACTIVE_SHARE)


def alike(output_tokens: int) -> Iterator[Job]:
    """Requests without end that are all alike."""
    return (Job(number, 0.0, 0, output_tokens, True) for number in count())


class Batcher:
    """First in, first out, with at most ``slots`` at a time (None: as many as come). It knows no
    clock and does no I/O: whoever turns it says what time it is. serial, async:N, continuous.
    """

    def __init__(self, slots: int | None) -> None:
        self.slots = slots
        self.running = 0
        """How many jobs have started and not ended."""
        self._queue: deque[Job] = deque()

    @property
    def waiting(self) -> int:
        """How many jobs have been added and have not started."""
        return len(self._queue)

    def add(self, job: Job) -> None:
        self._queue.append(job)

    def next(self, now_s: float) -> list[Job]:
        """The jobs that start now; each runs until ``ended`` is called for it."""
        free = len(self._queue)
        if self.slots is not None:
            free = min(free, max(0, self.slots - self.running))
        return self._start(free)

    def ended(self, job: Job) -> None:
        self.running -= 1

    def wake_s(self) -> float | None:
        """When ``next`` may start something although nothing arrives and nothing ends."""
        return None

    def _start(self, number: int) -> list[Job]:
        self.running += number
        return [self._queue.popleft() for _ in range(number)]


class Batches(Batcher):
    """Closed batches: static:N, dynamic:N/…. None means that this never completes a batch. A job
    that alone has more than ``max_tokens`` is a batch of its own.
    """

    def __init__(self, size: int, wait_s: float | None, max_tokens: int | None) -> None:
        super().__init__(size)
        self._size = size
        self._wait_s = wait_s
        self._max_tokens = math.inf if max_tokens is None else max_tokens

    def next(self, now_s: float) -> list[Job]:
        if self.running or not self._queue:
            return []
        sums = accumulate(job.tokens for job in self._queue)
        within = sum(1 for tokens in sums if tokens <= self._max_tokens)
        fitting = max(1, min(self._size, within))
        full = fitting == self._size or fitting < len(self._queue)
        wake_s = self.wake_s()
        return self._start(fitting) if full or (wake_s is not None and now_s >= wake_s) else []

    def wake_s(self) -> float | None:
        """See `Batcher`: when the oldest job has waited long enough."""
        if self.running or not self._queue or self._wait_s is None:
            return None
        return self._queue[0].arrived_s + self._wait_s


class Tuned(Batcher):
    """A window that follows the demand. One of 70 to 100 % of a window makes it grow and shrink in
    turn. That holds no job back, because the demand fits into the smaller window, too.
    """

    def __init__(self) -> None:
        super().__init__(SMALLEST)
        self._window = SMALLEST
        self._looked_s = -math.inf

    def next(self, now_s: float) -> list[Job]:
        if now_s >= self._looked_s + LOOK_EVERY_S:
            self._looked_s = now_s
            load = (self.running + self.waiting) / self._window
            if load > _GROW_ABOVE:
                self._window = min(LARGEST, 2 * self._window)
            elif load < _SHRINK_BELOW:
                self._window = max(SMALLEST, self._window // 2)
            self.slots = self._window
        return super().next(now_s)

    def wake_s(self) -> float | None:
        """See `Batcher`: the next look, if a larger window would start something."""
        if not self.waiting or self._window == LARGEST:
            return None
        return self._looked_s + LOOK_EVERY_S


class Hybrid(Batcher):
    """Two queues in front of ``slots`` slots, none of which stays free while anything waits."""

    def __init__(self, slots: int = _HYBRID_SLOTS) -> None:
        super().__init__(slots)
        self._shared = slots
        self._queues: dict[bool, deque[Job]] = {True: deque(), False: deque()}
        self._running = {True: 0, False: 0}

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, job: Job) -> None:
        self._queues[job.interactive].append(job)

    def next(self, now_s: float) -> list[Job]:
        started: list[Job] = []
        while self.waiting and sum(self._running.values()) < self._shared:
            interactive = self._running[True] < INTERACTIVE_SHARE * self._shared
            job = (self._queues[interactive] or self._queues[not interactive]).popleft()
            self._running[job.interactive] += 1
            started.append(job)
        return started

    def ended(self, job: Job) -> None:
        self._running[job.interactive] -= 1


class Split(Batcher):
    """A window for interactive jobs beside closed batches for batch work, as where each kind has
    engines of its own. Neither may use what the other leaves free.
    """

    def __init__(self, window: int, batches: Batches) -> None:
        super().__init__(window + (batches.slots or 0))
        self._parts = {True: Batcher(window), False: batches}

    @property
    def waiting(self) -> int:
        return sum(part.waiting for part in self._parts.values())

    def add(self, job: Job) -> None:
        self._parts[job.interactive].add(job)

    def next(self, now_s: float) -> list[Job]:
        return [job for part in self._parts.values() for job in part.next(now_s)]

    def ended(self, job: Job) -> None:
        self._parts[job.interactive].ended(job)

    def wake_s(self) -> float | None:
        """See `Batcher`: a window needs no time of its own."""
        return self._parts[False].wake_s()


class Specification(NamedTuple):
    """One batcher of the command line: `static:4` names it. Every run makes a new one of it."""

    name: str
    kind: str
    numbers: list[int]

    def make(self, users: int | None) -> Batcher:
        """A batcher in which nothing waits yet.

        ``users`` is how many jobs there can be at a time, if that is known: a static batch of more
        would never be complete, and is as large as all of them instead.
        """
        if self.kind == "static" and users is not None:
            return Batches(min(self.numbers[0], users), None, None)
        return _KINDS[self.kind](*self.numbers)


def _dynamic(size: int, wait_ms: int, tokens: int) -> Batches:
    return Batches(size, wait_ms / 1e3, tokens)


def _split(window: int, size: int, wait_ms: int, tokens: int) -> Split:
    return Split(window, _dynamic(size, wait_ms, tokens))


_KINDS: dict[str, Callable[..., Batcher]] = {
    "serial": lambda: Batcher(1),
    "static": lambda size: Batches(size, None, None),
    "dynamic": _dynamic,
    "async": Batcher,
    "continuous": lambda: Batcher(None),
    "tuned": Tuned,
    "hybrid": Hybrid,
    "split": _split,
}


def parse(text: str) -> list[Specification]:
    """Batchers from `serial,static:4,…`, each once.

    Raises:
        ArgumentTypeError: names the part that is no batcher, and the forms that are.
    """
    return [_parse_one(part) for part in dict.fromkeys(text.split(","))]


def _parse_one(part: str) -> Specification:
    kind, _, written = part.partition(":")
    try:
        one = Specification(part, kind, [int(n) for n in written.split("/") if n])
        one.make(None)
        if min(one.numbers, default=1) < 1:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ArgumentTypeError(
            f"'{part}' is no batcher: serial, static:N, dynamic:N/wait_ms/tokens, async:N, "
            "continuous, tuned, hybrid, hybrid:N or split:N/size/wait_ms/tokens"
        ) from None
    return one
