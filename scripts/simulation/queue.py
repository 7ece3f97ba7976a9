"""The queue of each class in memory, with the promises of the live one: oldest first, up to so many
of each class in one claim, and a claim that waits is answered by the first arrival.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from serve_app import timings
from serve_app.policy.classes import CLASSES
from serve_app.policy.work import Work as Asked
from serve_app.request_queue.entry import QueueEntry, decode_entry, encode_entry

from .work import Work


class VirtualQueue:
    """All ingresses share it. A claim takes `claim_s`, as a round trip to Redis does. One that may
    wait for arrivals and has some waits another `gather_s` for more.
    """

    def __init__(self, claim_s: float, gather_s: float = 0.0) -> None:
        self._claim_s = claim_s
        self._gather_s = gather_s
        self._waiting: dict[str, deque[QueueEntry]] = {name: deque() for name in CLASSES}
        self._blocked: deque[tuple[Sequence[str], asyncio.Future[list[QueueEntry]]]] = deque()
        self._last_ids = dict.fromkeys(CLASSES, (0, 0))
        self.round_trips = 0

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._waiting.values())

    def enqueue(self, request_id: str, work: Work, now_ms: int) -> None:
        """A request has been accepted."""
        name = work.request_class
        last_ms, last = self._last_ids[name]
        self._last_ids[name] = entry_id = (now_ms, last + 1 if now_ms == last_ms else 0)
        fields = encode_entry(
            request_id,
            work.tenant,
            work.session,
            now_ms + int(work.deadline_s * 1000),
            Asked(work.prompt_tokens, work.max_tokens, f"chat/completions {work.kind}"),
        )
        raw = {key.encode(): str(value).encode() for key, value in fields.items()}
        entry = decode_entry(f"queue:{name}", name, b"%d-%d" % entry_id, raw)
        for place, (classes, answer) in enumerate(self._blocked):
            if name in classes:
                del self._blocked[place]
                answer.set_result([entry])
                return
        self._waiting[name].append(entry)

    async def claim(
        self,
        of_each: int,
        classes: Sequence[str] = CLASSES,
        wait: bool = True,
    ) -> list[QueueEntry]:
        """See `RequestQueue.claim`."""
        self.round_trips += 1
        await asyncio.sleep(self._claim_s)
        taken = self._take(of_each, classes)
        if not wait or (taken and not self._gather_s):
            return taken
        block_ms = timings.CLAIM_BLOCK_MS
        taken = taken or await self._first(classes, block_ms)
        if taken and self._gather_s:
            await asyncio.sleep(self._gather_s)
            taken += self._take(max(0, of_each - len(taken)), classes)
        return taken

    def _take(self, of_each: int, classes: Sequence[str]) -> list[QueueEntry]:
        taken: list[QueueEntry] = []
        for name in classes:
            waiting = self._waiting[name]
            taken += [waiting.popleft() for _ in range(min(of_each, len(waiting)))]
        return taken

    async def _first(self, classes: Sequence[str], block_ms: int) -> list[QueueEntry]:
        answer: asyncio.Future[list[QueueEntry]] = asyncio.get_running_loop().create_future()
        blocked = (classes, answer)
        self._blocked.append(blocked)
        try:
            async with asyncio.timeout(block_ms / 1000):
                return await answer
        except TimeoutError:
            return []
        finally:
            if blocked in self._blocked:
                self._blocked.remove(blocked)
