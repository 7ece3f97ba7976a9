"""The scheduler of vLLM's engine: which sequences a step holds, and what the step changes. Pure.

As vLLM's: running sequences come first and get one token each, or the next chunk of their prompt;
what is left of `max_num_batched_tokens` goes to waiting ones. A sequence that finds no block
preempts the one that came last (or has the least priority), which begins again later.
"""

from __future__ import annotations

import heapq

from serve_app.contract import EngineReport
from workers.engine_model.kv_blocks import KvBlocks
from workers.engine_model.parameters import EngineParameters
from workers.engine_model.sequence import Sequence
from workers.engine_model.step import Step, timed


class EngineModel:
    """An engine between two steps: `add` what arrives, `schedule` a step, then say that it has
    ended (`complete`).
    """

    def __init__(self, parameters: EngineParameters) -> None:
        self.parameters = parameters
        self.kv = KvBlocks(
            parameters.num_gpu_blocks, parameters.block_size, parameters.enable_prefix_caching
        )
        self.running: list[Sequence] = []
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrivals = 0
        self._preemptions = 0
        self._queries = self._hits = self._prompt_tokens = self._generated = self._succeeded = 0

    @property
    def waiting(self) -> int:
        """Sequences that are not in the batch."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self._waiting

    def metrics(self) -> dict[str, float]:
        """vLLM's gauges and counters, under vLLM's names."""
        return {
            "vllm:num_requests_running": len(self.running),
            "vllm:num_requests_waiting": len(self._waiting),
            "vllm:kv_cache_usage_perc": self.kv.used / self.kv.total,
            "vllm:num_preemptions_total": self._preemptions,
            "vllm:prefix_cache_queries_total": self._queries,
            "vllm:prefix_cache_hits_total": self._hits,
            "vllm:prompt_tokens_total": self._prompt_tokens,
            "vllm:generation_tokens_total": self._generated,
            "vllm:request_success_total": self._succeeded,
        }

    def report(self, name: str) -> EngineReport:
        """What the engine of this name would report."""
        block_tokens = self.kv.block_tokens
        return EngineReport(
            name,
            self.kv.total * block_tokens,
            self.parameters.max_model_len,
            self.kv.used * block_tokens,
            len(self.running),
            len(self._waiting),
            self._preemptions,
        )

    def add(self, sequence: Sequence) -> None:
        """A sequence arrives.

        Raises:
            ValueError: it can never fit.
        """
        tokens = sequence.prompt_tokens + sequence.output_tokens
        if tokens > self.parameters.longest() or min(sequence.prompt_tokens, tokens) < 1:
            raise ValueError(f"{tokens} tokens do not fit: at most {self.parameters.longest()}")
        self._arrivals += 1
        sequence.arrived = self._arrivals
        self._queue(sequence)

    def abort(self, sequence: Sequence) -> None:
        """A sequence leaves before its end."""
        if sequence.running:
            self.running.remove(sequence)
            sequence.running = False
            self.kv.release(sequence)
            return
        self._waiting = [item for item in self._waiting if item[2] is not sequence]
        heapq.heapify(self._waiting)

    def schedule(self) -> Step | None:
        """The next step; None if there is nothing to do.

        `complete` must follow before anything is aborted; sequences may be added meanwhile, and
        then no more of the step's repetitions may be completed than had begun.
        """
        chunks: list[tuple[Sequence, int]] = []
        decoding: list[Sequence] = []
        preempted, budget = self._continue_running(chunks, decoding)
        fresh = 0 if preempted else self._begin_waiting(chunks, budget)
        if not chunks and not decoding:
            # The only one whose turn came was preempted; vLLM makes an empty step.
            return self.schedule() if preempted else None
        repeats = 1
        if not chunks and not preempted and len(decoding) == len(self.running):
            repeats = self._repeats(decoding)
        return timed(self.parameters.timing, chunks, decoding, fresh, repeats)

    def complete(self, step: Step, steps: int = 1) -> list[Sequence]:
        """`steps` repetitions of a step have ended. Returns the sequences that ended with them."""
        for sequence, tokens in step.chunks:
            sequence.computed += tokens
            if not sequence.missing:
                sequence.produced += 1
                self._generated += 1
        block_tokens = self.kv.block_tokens
        for sequence in step.decoding:
            sequence.computed += steps
            sequence.produced += steps
            if sequence.computed >= sequence.blocks * block_tokens:
                self.kv.grow(sequence, sequence.computed)
        self._generated += steps * len(step.decoding)
        ended = [one for one in step.decoding if one.ended]
        ended += [one for one, _ in step.chunks if one.ended]
        for sequence in ended:
            self.kv.release(sequence)
            sequence.running = False
        if ended:
            self._succeeded += len(ended)
            self.running = [sequence for sequence in self.running if sequence.running]
        return ended

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
        sequence.running = False
        sequence.computed = 0
        sequence.preemptions += 1
        self._preemptions += 1
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
            self._count_hits(sequence, known)
            sequence.running = sequence.started = True
            self.running.append(sequence)
            chunks.append((sequence, tokens))
            budget -= tokens
            fresh += 1
        return fresh

    def _count_hits(self, sequence: Sequence, known: int) -> None:
        if sequence.started:
            return  # begun again after a preemption
        sequence.hit_tokens = known
        self._queries += sequence.tokens
        self._hits += known
        self._prompt_tokens += sequence.prompt_tokens

    def _repeats(self, decoding: list[Sequence]) -> int:
        """How many steps in a row hold these sequences: until one ends, or the blocks do not
        suffice. Meanwhile nobody who waits can begin, because blocks only become fewer. (One could
        that begins with the very text that is being generated; this is neglected.)
        """
        most = min(sequence.output_tokens - sequence.produced for sequence in decoding)
        while most > 1 and self._needs(decoding, most) > self.kv.free:
            most //= 2
        return max(1, most)

    def _needs(self, decoding: list[Sequence], steps: int) -> int:
        size = self.kv.block_tokens
        return sum(-(-(one.computed + steps) // size) - one.blocks for one in decoding)
