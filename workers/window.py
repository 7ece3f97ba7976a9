"""How many sequences an engine may run at a time. Pure.

vLLM takes what it is given: what does not fit into its KV cache waits in it, where tenants and
classes count no more, or is preempted and computed again. So the window follows what the engine
says of itself twice a second: it grows by a thirty-second while all of it is used and the cache is
not, and shrinks by a quarter, from what runs, after a preemption or while sequences wait in it at
two readings, at most once in ten seconds.

Beside the window there are spare slots (`serve_app/policy/capacity.py`).
"""

from __future__ import annotations

import math

from serve_app.contract import EngineReport
from serve_app.policy.capacity import KV_FULL, spare_slots

_ROOM = 0.5
"""What waits while less of the cache is used waits for its prefill, which fewer slots would not
hasten.
"""
_IN_USE = 0.9
"""The part of the window that counts as all of it."""
_MORE = 1 / 32
_KEPT = 3 / 4
_WAITING = 2
"""So many sequences wait between two steps of an engine that is not short of anything."""
_CALM_READINGS = 20
"""For so many readings after it was cut the window stays: what was started before still runs."""


class Window:
    """The window of one engine.

    Args:
        most: `max_num_seqs`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._spare = spare_slots(most)
        self._preemptions = 0
        self._waited = False
        self._calm = 0
        self.size = most - self._spare

    @property
    def slots(self) -> int:
        return self.size + self._spare

    def reported(self, engine: EngineReport) -> None:
        """Twice a second: what the engine says."""
        if not engine.kv_tokens:  # an encoder keeps no KV
            return
        preempted = engine.preemptions > self._preemptions
        used = engine.used_tokens / engine.kv_tokens
        # With all slots in use, they wait for a slot: a request of several sequences brings more.
        short_of_memory = used > _ROOM and engine.running < self._most
        waited, self._waited = self._waited, short_of_memory and engine.waiting > _WAITING
        self._preemptions = engine.preemptions
        self._calm -= 1
        if preempted or (waited and self._waited):
            if self._calm <= 0:
                self.size = max(1, math.floor(_KEPT * min(self.size, engine.running)))
                self._calm = _CALM_READINGS
        elif self._calm <= 0 and used < KV_FULL and engine.running >= _IN_USE * self.size:
            more = math.ceil(_MORE * self.size)
            self.size = min(self._most - self._spare, self.size + more)
