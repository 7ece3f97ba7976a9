"""`--kill`: what clients lose when a process that makes tokens is killed halfway through a run."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence

from .client import SystemFailed, fetch
from .processes import apart, classify, read_processes
from .systems import System

_MAKERS = ("engine core", "worker replica", "ingress replica")
"""The kinds of process that make tokens: of a system, the first kind that it has."""
_WHOLE_WITHIN_S = 120.0


class Kills:
    """Knows how many such processes every system had at first."""

    def __init__(self, systems: Sequence[System]) -> None:
        self._systems = systems
        self._at_first = {system.name: len(self._makers(system)) for system in systems}

    def until_whole(self, system: System) -> list[int]:
        """The pids of its processes that make tokens, once they are as many as at first.

        Raises:
            SystemFailed: they do not come back.
        """
        deadline_s = time.monotonic() + _WHOLE_WITHIN_S
        while True:
            makers = self._makers(system)
            if len(makers) == self._at_first[system.name] and fetch(f"{system.url}/models"):
                return makers
            if time.monotonic() > deadline_s:
                raise SystemFailed(f"{system.name} has not come back after a kill")
            time.sleep(0.5)  # a replica tells nobody outside that it is ready

    def _makers(self, system: System) -> list[int]:
        table = read_processes()
        others = [one.marks for one in self._systems if one is not system]
        mine, _ = apart(table, system.marks, others)
        kinds = {pid: classify(table[pid].command_line) for pid in mine}
        maker = next((kind for kind in _MAKERS if kind in kinds.values()), None)
        return [pid for pid, kind in kinds.items() if kind == maker]


async def kill_halfway(pids: Sequence[int], duration_s: float) -> None:
    """`kill -9` one of them in the middle of a run."""
    await asyncio.sleep(duration_s / 2)
    os.kill(pids[0], signal.SIGKILL)
