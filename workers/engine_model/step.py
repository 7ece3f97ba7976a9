"""What an engine does next: one step, or many in a row that differ in their context alone. Pure."""

from __future__ import annotations

from typing import NamedTuple

from workers.engine_model.parameters import Timing
from workers.engine_model.sequence import Sequence


class Step(NamedTuple):
    """One step; or, if nothing but time can change them, up to `repeats` equal ones."""

    chunks: list[tuple[Sequence, int]]
    """Sequences and how many of their tokens are computed, except those of `decoding`."""
    decoding: list[Sequence]
    """Sequences of which one token is computed and the next one generated."""
    repeats: int
    first_s: float
    """Duration of the first step."""
    growth_s: float
    """How much longer each step takes than the one before it, because the contexts grow."""

    def duration_s(self, steps: int) -> float:
        """How long the first `steps` steps take."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_by(self, elapsed_s: float) -> int:
        """How many steps have ended when the one that runs `elapsed_s` after the start ends."""
        low, high = 1, self.repeats
        while low < high:
            middle = (low + high) // 2
            if self.duration_s(middle) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        return low


def timed(
    timing: Timing,
    chunks: list[tuple[Sequence, int]],
    decoding: list[Sequence],
    fresh: int,
    repeats: int,
) -> Step:
    """A step with its duration. `fresh`: how many sequences begin in it."""
    prefill = pairs = 0
    for sequence, tokens in chunks:
        prefill += tokens
        pairs += tokens * sequence.computed + tokens * tokens // 2
    context = sum(sequence.computed for sequence in decoding) if timing.context_token_ns else 0
    first_s = (
        timing.step_ms * 1e-3
        + (
            timing.prefill_token_us * prefill
            + timing.decode_sequence_us * len(decoding)
            + timing.new_sequence_us * fresh
        )
        * 1e-6
        + timing.context_token_ns * context * 1e-9
        + timing.prefill_context_token_ps * pairs * 1e-12
    )
    growth_s = timing.context_token_ns * len(decoding) * 1e-9
    return Step(chunks, decoding, repeats, first_s, growth_s)
