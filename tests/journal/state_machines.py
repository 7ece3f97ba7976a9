"""Shared parts of the state machines: an event loop that persists between steps, and how the
machines are run.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.waiting import PATIENCE_S

T = TypeVar("T")
examples = itertools.count(1)


class LoopThread:
    """One event loop in a thread of its own, so that work started in a step continues between
    steps.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, which must end in bounded time."""

        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()

    def end(self) -> None:
        """Cancel the remaining tasks and end the thread."""
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


MANY = st.integers(1, 3)
Step = Callable[..., Coroutine[Any, Any, None]]


class LoopMachine(RuleBasedStateMachine):
    """A state machine whose steps run on one event loop; `start` and `stop` are the first and the
    last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = LoopThread()
        self.thread.run(self.start())

    async def start(self) -> None:
        """Before the first step."""

    async def stop(self) -> None:
        """After the last step."""

    def teardown(self) -> None:
        self.thread.run(self.stop())
        self.thread.end()


def in_the_loop(step: Step) -> Callable[..., None]:
    """A step that is a coroutine, for `rule` and `invariant`."""

    @wraps(step)
    def run(machine: LoopMachine, **drawn: Any) -> None:
        machine.thread.run(step(machine, **drawn))

    return run


def run_machine(machine: Callable[[], RuleBasedStateMachine], examples: int, steps: int) -> None:
    within = settings(
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(machine, settings=within)  # type: ignore[arg-type] # it calls it
