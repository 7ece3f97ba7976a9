"""The engine model in real time: the batch of a simulated engine that computes like vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Iterable

from serve_app.clock import SYSTEM
from serve_app.contract import EngineReport
from workers.engine_model.model import EngineModel
from workers.engine_model.parameters import EngineParameters
from workers.engine_model.sequence import Sequence

_TOKEN_BYTES = 4
_TEXTS_APART = 1 << 32


class Running:
    """One request in a batch: `steps` counts the tokens that it may take."""

    __slots__ = ("ready", "steps")

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.ready = asyncio.Event()


class ModelledBatch:
    """Steps of the engine model; each lasts as long as the model says.

    Args:
        on_step: called after each step.
    """

    def __init__(self, parameters: EngineParameters, on_step: Callable[[], None]) -> None:
        self._model = EngineModel(parameters)
        self._on_step = on_step
        self._work = asyncio.Event()
        self._texts = itertools.count(1)
        self._running: dict[Sequence, Running] = {}
        self._in_step = False
        self._left: list[Sequence] = []

    def room(self, prompt: bytes) -> int:
        """How many tokens can follow a prompt; below 1 if it is too long."""
        return self._model.parameters.longest() - _tokens(prompt)

    def report(self, name: str) -> EngineReport:
        """What the engine's memory holds, see `Engine.report`."""
        return self._model.report(name)

    def join(self, prompt: bytes, already: int, limit: int) -> Running:
        """A request begins to compute.

        Args:
            already: tokens that an earlier attempt has generated; they are computed like a prompt.
            limit: tokens of the whole answer; at most the `room`.
        """
        sequence = Sequence(
            _tokens(prompt) + already,
            max(1, limit - already),
            base=-next(self._texts) * _TEXTS_APART,
            prefix=self._contents(prompt),
        )
        self._model.add(sequence)
        self._running[sequence] = running = Running(already)
        self._work.set()
        return running

    def leave(self, running: Running) -> None:
        """A request has all of its tokens, or is cancelled."""
        for sequence, one in self._running.items():
            if one is running:
                del self._running[sequence]
                self._left.append(sequence)
                break
        if not self._in_step:
            self._remove_left()

    async def step(self) -> None:
        """Make steps for ever. A late step does not delay the next."""
        due_s = SYSTEM.monotonic_s()
        while True:
            step = self._model.schedule()
            if step is None:
                self._work.clear()
                await self._work.wait()
                due_s = SYSTEM.monotonic_s()
                continue
            self._in_step = True
            due_s = max(due_s + step.first_s, SYSTEM.monotonic_s())
            await asyncio.sleep(due_s - SYSTEM.monotonic_s())
            self._model.complete(step)
            self._in_step = False
            self._on_step()
            self._hand_out(step.decoding)
            self._hand_out(sequence for sequence, _ in step.chunks if not sequence.missing > 1)
            self._remove_left()

    def _hand_out(self, sequences: Iterable[Sequence]) -> None:
        """Each of these has one token more."""
        for sequence in sequences:
            running = self._running.get(sequence)
            if running is not None:
                running.steps += 1
                running.ready.set()

    def _remove_left(self) -> None:
        for sequence in self._left:
            if not sequence.ended:
                self._model.abort(sequence)
        self._left.clear()

    def _contents(self, prompt: bytes) -> tuple[int, ...]:
        """Identities of the blocks of a prompt: equal beginnings have equal ones."""
        size = self._model.parameters.block_size * _TOKEN_BYTES
        text = hashlib.blake2b(digest_size=7)
        found: list[int] = []
        for end in range(size, len(prompt) + 1, size):
            text.update(prompt[end - size : end])
            found.append(int.from_bytes(text.digest(), "big"))
        return tuple(found)


def _tokens(prompt: bytes) -> int:
    return max(1, len(prompt) // _TOKEN_BYTES)
