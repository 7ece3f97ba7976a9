"""One batch, from the check of its file to its output files, in the ingress that leads.

    check ─▶ work: lines are taken, answered, and marked in segments ─▶ close ─▶ join ─▶ over

A job may be broken off between any two commands. Whoever leads next makes a new one, which goes on
from what Redis has: it finds the requests of the lines that are taken by their ids.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from serve_app import timings
from serve_app.batches import joining
from serve_app.batches.check import Checks
from serve_app.batches.leading import FIRST_TRY, Closed, Deposed, Leading, T, insist
from serve_app.batches.line_requests import LineAnswer, LineRequests
from serve_app.batches.lines import Asked, LineError, Row, answered_line, asked_by
from serve_app.batches.progress import Pace, Progress
from serve_app.batches.record import Batch, BatchState
from serve_app.batches.segments import SEGMENT_BYTES, Result, Results
from serve_app.clock import RedisClock
from serve_app.contract import Reason, State
from serve_app.errors import REASONS, RedisUnavailable, RequestRefused
from serve_app.files.files import Files, new_file_id
from serve_app.files.storage import Storage, StorageUnavailable
from serve_app.ingress.exchange import Exchange
from serve_app.loops import backoff, ended
from serve_app.observability.ingress_metrics import BatchTelemetry
from serve_app.policy.day_windows import DayWindow

log = logging.getLogger("hermes.batches")

_MOST_UNMARKED_BYTES = 4 * SEGMENT_BYTES
"""Of results that are not in a segment: no more lines begin."""
_A_TAKE, _FEW = 64, 16
"""Lines that are taken at a time, and how few are left then."""
_A_LOOK = 250
"""Requests that are looked up at a time."""
_MOST_FAILURES = 3
"""A line is given up after this many requests, or defects of ours."""


_GONE = (LineError("input_file_not_found", "The input file is gone."),)
_LOST = (LineError("results_lost", "The storage has lost results of the batch."),)


class BatchParts(NamedTuple):
    """What all jobs of an ingress use."""

    leading: Leading
    storage: Storage
    files: Files
    checks: Checks
    requests: LineRequests
    clock: RedisClock
    telemetry: BatchTelemetry


@dataclass(eq=False)
class Line:
    """One that is taken and has no result."""

    place: int
    number: int = FIRST_TRY
    """Of its try."""
    row: Row | None = None
    request_id: str = ""
    """Empty until it is accepted."""
    ended: bool = False
    """Whether that has ended already, when it was found."""
    failures: int = 0


@dataclass(eq=False)
class Job:
    """A batch that is worked on. `changed` is called when another line may begin."""

    parts: BatchParts
    batch: Batch
    changed: Callable[[], None]
    ready: deque[Line] = field(default_factory=deque)
    """Taken, and not submitted."""
    running: dict[Line, asyncio.Task[None]] = field(default_factory=dict)
    _working: bool = False
    _beside: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Beside the lines: whether it `refills`, and whether it `writes` a segment."""

    def __post_init__(self) -> None:
        self._window: DayWindow | None = None
        self._results = Results(self.parts, self.batch)
        self._next, self._total = self.batch.next, self.batch.total
        self._done_before = self.batch.completed + self.batch.failed
        self._state, self._pace = self.batch.state, Pace()
        self._cancelled = self._expired = self._without_input = False
        self._woken = asyncio.Event()
        self._failed: BaseException | None = None
        self._at_once = math.inf
        """Lines that may run, for what its tenant has left of its tokens of the month."""
        self._no_more: RequestRefused | None = None
        """Why no line is submitted any more: these tokens are used up."""
        self.told(self.batch)

    # -- what the feeding asks --------------------------------------------------------------------

    @property
    def deadline_ms(self) -> int:
        return self.batch.facts.expires_ms

    @property
    def wants(self) -> bool:
        """Whether a line could begin now."""
        left = self.ready or (self._next < self._total and "refills" not in self._beside)
        room = self._results.bytes < _MOST_UNMARKED_BYTES and len(self.running) < self._at_once
        return bool(left) and room and self._begins

    @property
    def refilling(self) -> bool:
        """Whether its next lines are being read."""
        return "refills" in self._beside and self._begins

    @property
    def _begins(self) -> bool:
        now_ms = self.parts.clock.now_ms()
        within = self._window is None or self._window.is_open(now_ms)
        return self._working and not self._stopping and within

    @property
    def _stopping(self) -> bool:
        """Whether no line begins any more."""
        return self._cancelled or self._late or self._without_input

    @property
    def _late(self) -> bool:
        return self._expired or self.parts.clock.now_ms() >= self.deadline_ms

    @property
    def _gives_up(self) -> bool:
        """Whether what the storage lacks will not come back."""
        until_ms = self.deadline_ms + timings.BATCH_LINE_KEPT_S * 1000
        return self.parts.clock.now_ms() >= until_ms

    @property
    def _outcome(self) -> BatchState:
        if self._cancelled:
            return BatchState.CANCELLED
        if self._without_input and not self._late:
            return BatchState.FAILED
        unfinished = self.ready or self._next < self._total
        return BatchState.EXPIRED if unfinished else BatchState.COMPLETED

    def progress(self) -> Progress | None:
        """For the metrics; None if it is over."""
        state = self._state
        if state.over:
            return None
        if self._cancelled or self._late:
            state = BatchState.CANCELLING if self._cancelled else BatchState.FINALIZING
        now_ms, now_s = self.parts.clock.now_ms(), self.parts.clock.local.monotonic_s()
        left_s = (self.deadline_ms - now_ms) / 1000
        if self._window is not None:
            left_s = self._window.open_s(now_ms, self.deadline_ms)
        left = self._total - self._done_before - self._pace.done
        return Progress(
            self.batch.facts.id,
            state,
            len(self.running),
            left,
            self._window is not None and not self._window.is_open(now_ms),
            left_s - self._pace.needed_s(left, now_s),
        )

    def told(self, batch: Batch) -> None:
        """It may have been cancelled since."""
        self._cancelled = self._cancelled or batch.state is BatchState.CANCELLING
        self._woken.set()

    def begin(self) -> bool:
        """Begin a line, and take more of them if few are left. Returns whether one begins."""
        if begins := bool(self.ready):
            self._start(self.ready.popleft())
        if len(self.ready) < _FEW and self._next < self._total and "refills" not in self._beside:
            self._begin("refills", self._refill())
        return begins

    async def _refill(self) -> None:
        places = await insist(
            self.batch, "take lines", lambda: self.parts.leading.take(self.batch, _A_TAKE)
        )
        if places.start != self._next:  # an answer was lost, or Redis has older data
            raise Deposed("batches: Redis has other lines than were taken")
        if not places:  # it was cancelled
            found = await insist(
                self.batch, "read", lambda: self.parts.leading.read([self.batch.facts.id])
            )
            if not found:
                raise Deposed("batches: a batch is gone")
            self.told(found[0])
            return
        self._next = places.stop
        rows: Sequence[Row | None] = [None] * len(places)
        with suppress(FileNotFoundError):  # then so will the lines be, each by itself
            rows = await insist(
                self.batch, "read the index", lambda: self._rows(places.start, len(places))
            )
        self.ready += [Line(place, row=row) for place, row in zip(places, rows, strict=True)]

    def _begin(self, what: str, work: Coroutine[None, None, None]) -> None:
        def over(task: asyncio.Task[None]) -> None:
            del self._beside[what]
            self._over(task)

        self._beside[what] = asyncio.create_task(work)
        self._beside[what].add_done_callback(over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """A task has ended; what it could not handle ends the job."""
        if not task.cancelled():
            self._failed = self._failed or task.exception()
        self._woken.set()
        self.changed()

    # -- the whole --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work on it until nothing is left to do. Raises `Deposed`."""
        try:
            await self._whole()
        finally:
            self._working = False
            await ended([*self.running.values(), *self._beside.values()])

    async def _whole(self) -> None:
        batch, leading = self.batch, self.parts.leading
        if batch.facts.window:
            self._window = DayWindow.parse(batch.facts.window)
        if not (batch.outcome or batch.in_progress_ms):
            errors = await insist(self.batch, "check", self._checked)
            if errors or self._cancelled:
                outcome = BatchState.FAILED if errors else BatchState.CANCELLED
                closed = Closed(outcome, "", "")
                return await insist(self.batch, "end", lambda: self._end(closed, 0, errors))
        if not batch.outcome:
            await self._recover()
            await self._work()
        self._state = BatchState.FINALIZING
        closed = Closed(self._outcome, new_file_id(), new_file_id())
        closed = await insist(self.batch, "close", lambda: leading.close(batch, closed))
        await insist(self.batch, "join", lambda: self._join(closed))

    async def _checked(self) -> Sequence[LineError]:
        """Check its file, unless it is cancelled. Returns what is wrong with it."""
        async with self.parts.checks.turn(self.batch.facts.tenant):
            if self._cancelled:
                return ()
            try:
                check = partial(self.parts.checks.check, self.batch)
                checked = await self._kept(check, self.batch.facts.retried_path)
            except FileNotFoundError:
                return _GONE
        if checked.errors:
            return checked.errors
        tenant = self.parts.requests.tenant(self.batch.facts.tenant)
        most = tenant.limits.background_tokens if tenant is not None else 0
        others = await self.parts.leading.checked(self.batch, checked.lines, checked.tokens, most)
        if others is not None:
            message = (
                f"Your other batches that are not over take {others:,} tokens, and this one "
                f"{checked.tokens:,}, of at most {most:,}."
            )
            return [LineError("token_limit_exceeded", message)]
        self._total = checked.lines
        return ()

    async def _recover(self) -> None:
        """Find the requests of the lines that are taken; the others wait to begin."""
        batch, requests = self.batch, self.parts.requests
        taken = await insist(batch, "read", lambda: self.parts.leading.lines(batch))
        lines = [Line(place, number) for place, number in sorted(taken.items())]
        for at in range(0, len(lines), _A_LOOK):
            some = lines[at : at + _A_LOOK]
            ids = [requests.request_id(batch, line.place, line.number) for line in some]
            records = await insist(batch, "find requests", partial(requests.store.records, ids))
            for line, request_id, record in zip(some, ids, records, strict=True):
                if record is None:
                    self.ready.append(line)
                else:
                    line.request_id, line.ended = request_id, record.ended
                    self._start(line)

    async def _work(self) -> None:
        self._working, self._state = True, BatchState.IN_PROGRESS
        while not self._done:
            self.changed()
            with suppress(TimeoutError):
                async with asyncio.timeout(timings.BATCH_TICK_S):
                    await self._woken.wait()
            self._woken.clear()
            if self._failed is not None:
                raise self._failed
            if "writes" not in self._beside and self._results.due(not self.running):
                self._begin("writes", self._write_segment())
            await self._stop_lines()

    @property
    def _done(self) -> bool:
        left = self.ready or self._next < self._total
        busy = self.running or self._results or self._beside
        return not busy and (self._stopping or not left)

    async def _stop_lines(self) -> None:
        """End the requests of lines that shall not go on: all of them, or those that no worker has
        begun although the window has closed.
        """
        waiting = [one.request_id for one in self.running if one.request_id and not one.ended]
        if self._cancelled:
            reason = Reason.CANCELLED
        elif self._late:
            reason = Reason.DEADLINE
        elif not self._begins:
            reason = Reason.WITHDRAWN
        else:
            return
        for at in range(0, len(waiting), _A_LOOK):
            try:
                await self.parts.requests.end(waiting[at : at + _A_LOOK], reason)
            except RedisUnavailable as error:
                log.debug("batch %s: cannot end its lines yet: %s", self.batch.facts.id, error)
        if waiting:  # until they have ended there is nothing new to end
            await asyncio.sleep(timings.BATCH_STOP_AGAIN_S)

    async def _write_segment(self) -> None:
        self._pace.done += await self._results.write()

    async def _join(self, closed: Closed) -> None:
        """Write the output files, and tell that it is over."""
        leading = self.parts.leading
        taken = sorted((await leading.lines(self.batch)).items())
        (now,) = await leading.read([self.batch.facts.id])
        unfinished = [*(place for place, _ in taken), *range(now.next, now.total)]
        closed, errors = await self._joined(now, closed, unfinished)
        requests = self.parts.requests
        for at in range(0, len(taken), _A_LOOK):
            some = taken[at : at + _A_LOOK]
            await requests.release([requests.request_id(self.batch, *one) for one in some])
        await self._end(closed, len(unfinished), errors)
        done = now.completed + now.failed
        log.info(
            "batch %s is over: %s lines=%d done=%d", now.facts.id, closed.outcome, now.total, done
        )

    async def _joined(
        self, now: Batch, closed: Closed, unfinished: Sequence[int]
    ) -> tuple[Closed, Sequence[LineError]]:
        """Write the output files, without the names of unfinished lines if the input file is gone.
        If a segment is, it may come back, as with a volume.
        """
        segments = await self.parts.leading.segments(self.batch)
        if closed.outcome is not BatchState.FAILED:
            with suppress(FileNotFoundError):
                join = partial(joining.join, self.parts, now, closed, segments, unfinished)
                return await self._kept(join), ()
        try:
            return await joining.join(self.parts, now, closed, segments, ()), _GONE
        except FileNotFoundError:
            if not self._gives_up:
                raise StorageUnavailable("the storage has lost results") from None
        return Closed(BatchState.FAILED, "", ""), _LOST

    async def _end(self, closed: Closed, unfinished: int, errors: Sequence[LineError] = ()) -> None:
        await self.parts.leading.over(self.batch, closed, unfinished, errors)
        self._state = closed.outcome
        self.parts.telemetry.done(closed.outcome, unfinished)

    # -- lines ------------------------------------------------------------------------------------

    def _start(self, line: Line) -> None:
        name = f"batch-line-{self.batch.facts.id}-{line.place}"
        task = self.running[line] = asyncio.create_task(self._line(line), name=name)
        now_s = self.parts.clock.local.monotonic_s
        self._pace.runs(True, now_s())

        def over(task: asyncio.Task[None]) -> None:
            self.running.pop(line, None)
            self._pace.runs(bool(self.running), now_s())
            self._over(task)

        task.add_done_callback(over)

    async def _line(self, line: Line) -> None:
        """Answer a line. Without a result, it waits to begin again."""
        result = None
        try:
            asked = await insist(self.batch, "read a line", lambda: self._load(line))
            result = await self._whatever_fails(line, asked)
        except FileNotFoundError:
            self._without_input = True
        if result is None:
            self.ready.appendleft(line)
        else:
            self._results.add(result)
            self._at_once += 1

    async def _whatever_fails(self, line: Line, asked: Asked) -> Result | None:
        """`_answered`, again after a defect of ours."""
        while True:
            try:
                return await insist(
                    self.batch, "answer a line", lambda: self._answered(line, asked)
                )
            except (Deposed, FileNotFoundError):
                raise
            except Exception:
                log.exception("batch %s: line at %d fails", self.batch.facts.id, line.place)
                line.failures += 1
                if line.failures >= _MOST_FAILURES:
                    internal = RequestRefused(Reason.INTERNAL, "The request failed.")
                    return self._refused(line, asked.custom_id, internal)
            await asyncio.sleep(backoff(timings.DEFECT_RETRY_S, line.failures))

    async def _load(self, line: Line) -> Asked:
        """What the file has in a line; of a large one without its body."""
        if line.row is None:
            (line.row,) = await self._rows(line.place, 1)
        if line.row.length <= timings.LARGE_BYTES:
            return await self._read(line.row)
        async with self.parts.requests.large:
            return (await self._read(line.row))._replace(body=b"")

    async def _read(self, row: Row) -> Asked:
        path, end = self.batch.facts.input_path, row.offset + row.length
        read = partial(self.parts.storage.read, path, row.offset, end)
        return asked_by(await self._kept(read))

    async def _rows(self, first: int, many: int) -> Sequence[Row]:
        return await self._kept(partial(self.parts.checks.rows, self.batch, first, many))

    async def _kept(self, read: Callable[[], Awaitable[T]], also: str = "") -> T:
        """Read what the storage has unless the input file, or the one at `also`, was deleted. What
        else is not there may come back, as with a volume.

        Raises:
            FileNotFoundError: it is gone for good.
        """
        try:
            return await read()
        except FileNotFoundError:
            whose, files = self.batch.facts.tenant, self.parts.files
            paths = self.batch.facts.input_path, also or self.batch.facts.input_path
            if self._gives_up or not all([await files.knows(whose, path) for path in paths]):
                raise
        raise StorageUnavailable("it lacks a file that nobody has deleted")

    async def _submitted(self, line: Line, body: bytes) -> Exchange:
        """Submit the request of a line, whose body is read again if it is large."""
        assert line.row is not None, "it was read"
        its = self.batch, line.place, line.number
        if body:
            return await self.parts.requests.submit(*its, body)
        async with self.parts.requests.large:
            return await self.parts.requests.submit(*its, (await self._read(line.row)).body)

    async def _answered(self, line: Line, asked: Asked) -> Result | None:
        """The result of a line; None if it shall begin again later, or never."""
        assert line.row is not None, "it was read"
        while True:
            try:
                if line.row.bad:
                    raise line.row.refusal
                exchange = await self._exchange(line, asked.body)
            except RequestRefused as refusal:
                return self._refused(line, asked.custom_id, refusal)
            if exchange is None:
                return None
            answer = await self.parts.requests.answer(self.batch, exchange)
            state = answer.ending.state
            self._expired = self._expired or state is State.EXPIRED
            if state is State.EXPIRED or (state is State.CANCELLED and self._cancelled):
                return None  # it is told as one that was not worked on
            if await self._again(line, answer):
                continue
            return self._result(line, asked.custom_id, answer.status, answer.body)

    async def _exchange(self, line: Line, body: bytes) -> Exchange | None:
        """That of the line's request; None if it must not begin now."""
        requests = self.parts.requests
        if line.request_id:
            return await requests.attach(self.batch, line.request_id, line.ended)
        for refusals in count(1):
            if not self._begins:
                return None
            if self._no_more is not None:
                raise self._no_more
            try:
                found = await self._submitted(line, body)
            except RequestRefused as refusal:
                if refusal.reason is Reason.QUOTA_EXCEEDED:
                    if len(self.running) > 1:  # these may give back what they do not use
                        self._at_once = max(1, sum(bool(one.request_id) for one in self.running))
                        return None
                    self._no_more, self._at_once = refusal, math.inf
                if REASONS[refusal.reason].line != "later":
                    raise
            else:
                line.request_id = found.follower.request_id
                if not self._begins:  # since: `_stop_lines` may have looked already
                    self._woken.set()
                return found
            await asyncio.sleep(backoff(timings.BATCH_REFUSED_S, refusals))
        raise AssertionError("it counts without an end")

    async def _again(self, line: Line, answer: LineAnswer) -> bool:
        """Whether a line needs another request; its next try is written down then."""
        reason = answer.ending.reason
        said = REASONS[reason].line if reason else ""
        if said not in ("again", "resumed"):
            return False
        line.failures += said == "again"
        if line.failures >= _MOST_FAILURES:
            return False
        _, releasing = await self.parts.requests.releasing([line.request_id])
        following = line.number + 1
        await self.parts.leading.turn(self.batch, line.place, line.number, following, releasing)
        line.number, line.request_id, line.ended = following, "", False
        return True

    def _refused(self, line: Line, custom_id: str, refusal: RequestRefused) -> Result:
        path = self.batch.facts.endpoint
        return self._result(line, custom_id, refusal.status_at(path), refusal.body(path))

    def _result(self, line: Line, custom_id: str, status: int, body: bytes) -> Result:
        text = answered_line(self.batch.facts.id, line.request_id, custom_id, status, body)
        return Result(line.place, line.request_id, 200 <= status < 300, text)
