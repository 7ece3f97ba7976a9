"""A model of vLLM's engine: which sequences a step holds, what it changes and how long it takes.

As vLLM's scheduler: running sequences come first and get one token each, or the next chunk of their
prompt; what is left of `max_num_batched_tokens` goes to waiting ones. A sequence that finds no
block preempts the one that came last (or has the least priority), which begins again later. A block
whose owner has ended keeps its content until the block is needed again; the least recently used
goes first, and of one sequence its end before its beginning.

What the model must know of an engine, limits under vLLM's names and times, is a file in `engines`.
"""

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from serve_app.contract import EngineReport
from serve_app.errors import SettingsError
from workers.simulated_engine import Timing

_FOLDER = Path(__file__).parent / "engines"


class EngineParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine. The defaults of the limits are vLLM's own."""

    name: str
    timing: Timing
    num_gpu_blocks: int
    """Blocks of KV cache."""
    block_size: int = 16
    """Tokens of one block."""
    max_num_seqs: int = 256
    """Sequences in a step."""
    max_num_batched_tokens: int = 2048
    """Tokens that a step computes; longer prompts are computed in chunks."""
    max_model_len: int = 4096
    """Tokens of a prompt and its answer together."""
    priority_scheduling: bool = False
    """vLLM's `scheduling_policy: priority`; a lower number goes first."""
    async_scheduling: bool = False
    """vLLM's default on GPUs: the next step is chosen when one begins, so who comes meanwhile waits
    for one step more.
    """
    source: str = ""
    """Where the figures come from."""

    def longest(self) -> int:
        """Tokens that one sequence may have: what the model and the KV cache both allow."""
        return min(self.max_model_len, self.num_gpu_blocks * self.block_size)


def engine_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_engine(name: str) -> EngineParameters:
    """One of them, or a file of one's own.

    Raises:
        SettingsError: there is no such engine, or its file is wrong.
    """
    path = Path(name) if name.endswith(".json") else _FOLDER / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineParameters)
    except (OSError, msgspec.DecodeError) as error:
        known = ", ".join(engine_names())
        raise SettingsError(f"no engine {name}: {error}. There are: {known}") from None


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the tokens that follow it.

    The content of a block is an id: equal ids mean that the block and all before it hold the same
    text. The ids of the first blocks are `prefix`; block `i` after them has `base + i`.
    """

    prompt_tokens: int
    output_tokens: int
    """How many tokens it will generate."""
    priority: int = 0
    """For vLLM's priority scheduling; lower goes first."""
    base: int = 0
    """A number that no other text uses for its blocks."""
    prefix: range = range(0)
    """Ids of the blocks at the beginning, which the sequences of its request share."""
    arrived: int = 0
    """Position in the order of arrival."""
    computed: int = 0
    """Tokens whose KV is in the cache."""
    produced: int = 0
    """Tokens generated."""
    blocks: int = 0
    """Blocks of KV that it occupies."""
    held: list[int] = field(default_factory=list)
    """Content of those blocks that others can use, in order."""
    registered: int = 0
    """Blocks at the beginning whose content is known to the cache, or is a duplicate there."""
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.produced

    @property
    def missing(self) -> int:
        """Tokens to compute before the next can be generated."""
        return self.tokens - self.computed

    @property
    def ended(self) -> bool:
        return self.produced >= self.output_tokens

    def content(self, block: int) -> int:
        """The id of a block's content."""
        return self.prefix[block] if block < len(self.prefix) else self.base + block


class KvBlocks:
    """A number of blocks.

    Args:
        total: how many there are.
        block_tokens: tokens in each.
    """

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self._empty = total
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Content of blocks that nobody uses, the least recently used first."""
        self._users: dict[int, int] = {}
        """How many sequences use a block of this content."""

    @property
    def free(self) -> int:
        return self._empty + len(self._unused)

    @property
    def used(self) -> int:
        return self.total - self.free

    def find(self, sequence: Sequence) -> tuple[int, int]:
        """How many blocks at the beginning are there, and how many of those nobody uses now.

        At least one token is left to compute, because its result is the next token.
        """
        users, unused, content = self._users, self._unused, sequence.content
        idle = 0
        most = (sequence.tokens - 1) // self.block_tokens
        for block in range(most):
            name = content(block)
            if name in users:
                continue
            if name not in unused:
                return block, idle
            idle += 1
        return most, idle

    def use(self, sequence: Sequence, found: int) -> None:
        """A sequence begins with the blocks that `find` found."""
        for block in range(found):
            name = sequence.content(block)
            self._unused.pop(name, None)
            self._users[name] = self._users.get(name, 0) + 1
            sequence.held.append(name)
        sequence.blocks = sequence.registered = found

    def lacks(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that a sequence needs beyond its own to hold `tokens` tokens."""
        return -(-tokens // self.block_tokens) - sequence.blocks

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence the blocks for `tokens` tokens. Returns whether there were enough."""
        more = self.lacks(sequence, tokens)
        if more > 0:
            if more > self.free:
                return False
            fresh = min(more, self._empty)
            self._empty -= fresh
            for _ in range(more - fresh):
                self._unused.popitem(last=False)
            sequence.blocks += more
        self._register(sequence, tokens // self.block_tokens)
        return True

    def _register(self, sequence: Sequence, full: int) -> None:
        """From now on others find the blocks that are full."""
        while sequence.registered < full:
            name = sequence.content(sequence.registered)
            sequence.registered += 1
            if name in self._users:
                continue  # a duplicate: somebody computed the same at the same time
            if name in self._unused:
                del self._unused[name]
                self._empty += 1
            self._users[name] = 1
            sequence.held.append(name)

    def release(self, sequence: Sequence) -> None:
        self._empty += sequence.blocks - len(sequence.held)
        for name in reversed(sequence.held):
            if self._users[name] == 1:
                del self._users[name]
                self._unused[name] = None
            else:
                self._users[name] -= 1
        sequence.held.clear()
        sequence.blocks = sequence.registered = 0


class Step(NamedTuple):
    """What one step does, and how long it takes."""

    chunks: list[tuple[Sequence, int]]
    """Sequences and how many of their tokens are computed, except those of `decoding`."""
    decoding: list[Sequence]
    """Sequences of which one token is computed and the next one generated."""
    duration_s: float


class VirtualEngine:
    """An engine on the virtual event loop, which makes step after step while it has sequences."""

    def __init__(self, parameters: EngineParameters) -> None:
        self.parameters = parameters
        self.kv = KvBlocks(parameters.num_gpu_blocks, parameters.block_size)
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.queries = self.hits = 0
        """Tokens that were looked up in the prefix cache, and found there."""
        self.samples: list[tuple[float, float, int, int]] = []
        """After each step: seconds, share of the KV cache used, sequences running and waiting."""
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._too_late: list[Sequence] = []
        """With `async_scheduling`: who came when the next step was chosen already."""
        self._arrivals = 0
        self._loop = asyncio.get_running_loop()
        self._calls: dict[Sequence, tuple[asyncio.Future[None], Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._too_late)

    def report(self, name: str) -> EngineReport:
        block_tokens = self.kv.block_tokens
        return EngineReport(
            name,
            self.kv.total * block_tokens,
            self.parameters.max_model_len,
            self.kv.used * block_tokens,
            len(self.running),
            self.waiting,
            self.preemptions,
        )

    async def run(self, sequence: Sequence, on_first_token: Callable[[], None]) -> None:
        """Generate all tokens of a sequence.

        Raises:
            ValueError: the sequence can never fit.
        """
        await asyncio.sleep(self.parameters.timing.request_ms / 1e3)
        tokens = sequence.prompt_tokens + sequence.output_tokens
        if tokens > self.parameters.longest() or min(sequence.prompt_tokens, tokens) < 1:
            raise ValueError(f"{tokens} tokens do not fit: at most {self.parameters.longest()}")
        self._arrivals += 1
        sequence.arrived = self._arrivals
        if self.parameters.async_scheduling and self._timer is not None:
            self._too_late.append(sequence)
        else:
            self._queue(sequence)
        future: asyncio.Future[None] = self._loop.create_future()
        self._calls[sequence] = future, on_first_token
        if self._timer is None:
            self._begin()
        try:
            await future
        except asyncio.CancelledError:
            sequence.output_tokens = sequence.produced + 1  # it ends with the step that runs
            raise

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        step = self._schedule()
        while self._too_late:
            self._queue(self._too_late.pop())
        step = step or self._schedule()
        if step is not None:
            self._timer = self._loop.call_later(step.duration_s, self._end, step)

    def _end(self, step: Step) -> None:
        self._timer = None
        ended = self._complete(step)
        for sequence, _ in step.chunks:
            if sequence.produced == 1 and sequence.missing == 1:
                self._calls[sequence][1]()
        used = self.kv.used / self.kv.total
        self.samples.append((self._loop.time(), used, len(self.running), self.waiting))
        for sequence in ended:
            future, _ = self._calls.pop(sequence)
            if not future.done():
                future.set_result(None)
        self._begin()

    def _schedule(self) -> Step | None:
        """The next step; None if there is nothing to do. Sequences may come until it has ended."""
        chunks: list[tuple[Sequence, int]] = []
        decoding: list[Sequence] = []
        preempted, budget = self._continue_running(chunks, decoding)
        fresh = 0 if preempted else self._begin_waiting(chunks, budget)
        if not chunks and not decoding:
            # The only one whose turn came was preempted; vLLM makes an empty step.
            return self._schedule() if preempted else None
        return Step(chunks, decoding, self._duration_s(chunks, decoding, fresh))

    def _complete(self, step: Step) -> list[Sequence]:
        """A step has ended. Returns the sequences that ended with it."""
        for sequence, tokens in step.chunks:
            sequence.computed += tokens
            if not sequence.missing:
                sequence.produced += 1
        block_tokens = self.kv.block_tokens
        for sequence in step.decoding:
            sequence.computed += 1
            sequence.produced += 1
            if sequence.computed >= sequence.blocks * block_tokens:
                self.kv.grow(sequence, sequence.computed)
        ended = [one for one in step.decoding if one.ended]
        ended += [one for one, _ in step.chunks if one.ended]
        for sequence in ended:
            self.kv.release(sequence)
        if ended:
            self.running = [sequence for sequence in self.running if not sequence.ended]
        return ended

    def _duration_s(
        self, chunks: list[tuple[Sequence, int]], decoding: list[Sequence], fresh: int
    ) -> float:
        """How long a step takes in which `fresh` sequences begin."""
        timing, prefill, pairs = self.parameters.timing, 0, 0
        for sequence, tokens in chunks:
            prefill += tokens
            pairs += tokens * sequence.computed + tokens * tokens // 2
        context = sum(sequence.computed for sequence in decoding) if timing.context_token_ns else 0
        return timing.step_s(prefill, pairs, len(decoding), context, fresh)

    def _continue_running(
        self, chunks: list[tuple[Sequence, int]], decoding: list[Sequence]
    ) -> tuple[bool, int]:
        """Returns whether a sequence was preempted, and the tokens that the step has left."""
        budget = self.parameters.max_num_batched_tokens
        block_tokens = self.kv.block_tokens
        preempted = False
        turn = 0
        while turn < len(self.running) and budget > 0:
            sequence = self.running[turn]
            missing = sequence.prompt_tokens + sequence.produced - sequence.computed
            if (
                missing == 1
                and sequence.produced
                and sequence.computed + 1 < sequence.blocks * block_tokens
            ):
                # By far the most frequent case: its last block has room.
                decoding.append(sequence)
                budget -= 1
                turn += 1
                continue
            tokens = min(missing, budget)
            while not self.kv.grow(sequence, sequence.computed + tokens):
                preempted = True
                victim = self._victim()
                place = self.running.index(victim)
                budget += self._unschedule(victim, chunks, decoding)
                self._preempt(victim)
                turn -= place < turn
                if victim is sequence:
                    return True, budget
            budget -= tokens
            if sequence.produced and missing == 1:
                decoding.append(sequence)
            else:
                chunks.append((sequence, tokens))
            turn += 1
        return preempted, budget

    def _victim(self) -> Sequence:
        if self.parameters.priority_scheduling:
            return max(self.running, key=lambda one: (one.priority, one.arrived))
        return self.running[-1]

    @staticmethod
    def _unschedule(
        victim: Sequence, chunks: list[tuple[Sequence, int]], decoding: list[Sequence]
    ) -> int:
        """A sequence that is preempted gives the step's tokens back, if it had any."""
        if victim in decoding:
            decoding.remove(victim)
            return 1
        for place, (sequence, tokens) in enumerate(chunks):
            if sequence is victim:
                del chunks[place]
                return tokens
        return 0

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.kv.release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        # A preempted sequence arrived before those that wait, so it is the first again.
        priority = sequence.priority if self.parameters.priority_scheduling else 0
        heapq.heappush(self._waiting, (priority, sequence.arrived, sequence))

    def _begin_waiting(self, chunks: list[tuple[Sequence, int]], budget: int) -> int:
        """Returns how many sequences begin."""
        fresh = 0
        while self._waiting and budget > 0:
            if len(self.running) >= self.parameters.max_num_seqs:
                break
            sequence = self._waiting[0][2]
            found, idle = self.kv.find(sequence)
            known = found * self.kv.block_tokens
            tokens = min(sequence.tokens - known, budget)
            if self.kv.lacks(sequence, known + tokens) - found + idle > self.kv.free:
                break
            heapq.heappop(self._waiting)
            self.kv.use(sequence, found)
            sequence.computed = known
            self.kv.grow(sequence, known + tokens)
            if not sequence.preemptions:
                self.queries += sequence.tokens
                self.hits += known
            self.running.append(sequence)
            chunks.append((sequence, tokens))
            budget -= tokens
            fresh += 1
        return fresh
