"""The server's processes: what they use of the machine."""

from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil


class Server:
    """The processes with ``pids``, which stay the same while batchers are compared."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._processes: list[psutil.Process] = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                self._processes.append(psutil.Process(pid))

    def rss_bytes(self) -> int:
        """Their memory."""
        return int(self._sum(lambda process: process.memory_info().rss))

    def cpu_s(self) -> float:
        """The CPU time that they have used so far."""
        return self._sum(lambda process: sum(process.cpu_times()[:2]))

    def _sum(self, of: Callable[[psutil.Process], float]) -> float:
        found = 0.0
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                found += of(process)
        return found
