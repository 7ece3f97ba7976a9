"""One attempt: turns engine outputs and response bytes into journal entries, and decides how it
stops.

Its states are those of its log (`AttemptState`): it is open until the first `stop`, whose kind is

- a `State`: the request ends. The engine's server has answered (`COMPLETED`) or failed, the answer
  cannot be continued or stored (`FAILED`), or the deadline has passed (`EXPIRED`);
- a `Cause`: the engine has failed. The request goes on in another attempt;

or until the journal fences it. Whatever the engine and its server make after that is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import Cause, CompletionStats, NotResumed, Reason, State
from serve_app.errors import REASONS, RequestRefused, failed
from serve_app.journal.attempt_log import AttemptLog, AttemptState
from serve_app.journal.entries import REQUEST_ID, AttemptFacts, Head, RequestFacts, Summary
from serve_app.journal.events import EventNumberer
from serve_app.journal.usage import Usage, reasoning_tokens
from serve_app.loops import first
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry
from workers.replay import AnswerTooLarge, CannotContinue, Recorded

log = logging.getLogger("hermes.worker")

_ERROR_EVENTS = b'data: {"error"', b"event: error"
"""With one of these begins what vLLM's server sends when it fails after the status of a stream."""

Why = Reason | RequestRefused | CannotContinue | AnswerTooLarge

current: ContextVar[Attempt | None] = ContextVar("hermes_attempt", default=None)
"""The attempt that the running task serves."""


class EngineFailed(Exception):
    """The engine failed during a request; another replica may serve it."""


class Attempt:
    """Receives a request's engine outputs and, as an ASGI `send`, the response bytes that they
    produce.

    A record is an engine output with the bytes that it produced. It is complete, and goes to the
    journal, when the serving layer pulls the next output, right after it has sent the bytes. So
    recording delays no token. The bytes after the last output go into the terminal entry.

    Of several generations (a completion of several prompts), each takes `one_at_a_time` for as long
    as the serving layer has an output of it. So every attempt consumes the outputs in the order of
    the journal, and produces the bytes in one order.

    If older attempts have left a part of the response (`recorded`; None for the first), the serving
    layer produces its bytes again from the recorded outputs. They are compared with the journal's
    bytes and not appended; later bytes are new.
    """

    def __init__(
        self,
        journal: AttemptLog,
        facts: RequestFacts,
        opened: AttemptFacts,
        telemetry: Telemetry,
        clock: RedisClock,
        recorded: Recorded | None = None,
    ) -> None:
        self.journal, self.facts = journal, facts
        self.request_id, self.pause = journal.request_id, journal.pause
        self.path = ""
        """Of the request, once it is known: whose protocol an error has."""
        self.created_s = facts.admitted_ms / 1000
        """The response's creation time, which is the same in every attempt."""
        self.stopped: State | Cause | None = None
        """The kind of the first stop."""
        self.lost: CannotContinue | AnswerTooLarge | None = None
        """Why the answer cannot be continued or stored."""
        self.failure: RequestRefused | None = None
        """What the engine's server has failed with, once it has."""
        self.one_at_a_time = asyncio.Lock()
        self.recorded = recorded or Recorded()
        self.head: Head | None = None
        self.first_output_ms: int | None = None
        if recorded is not None:
            journal.continue_from(recorded.last, recorded.body, recorded.events, recorded.head)
        self._count(self.recorded.usage)
        self._opened = opened
        self._telemetry = telemetry
        self._clock = clock
        self._numberer = EventNumberer()
        self._streamed = False
        self._cut = False
        self._error_sent = False
        self._generations = 0
        self._values = 0
        self._replayed = 0
        self._regenerated = 0
        self._waiting: dict[int, asyncio.Event] = {}
        self._matched = 0
        self._left_bytes = journal.settings.max_answer_bytes - self.recorded.bytes
        self._outputs: list[Any] = []
        self._body: list[bytes] = []
        self._monotonic_s = clock.local.monotonic_s  # read for every output
        self._count_output = telemetry.tokens.output
        self._opened_s = self._monotonic_s()
        self._last_s: float | None = None

    @property
    def open(self) -> bool:
        return self.journal.state is AttemptState.OPEN

    @property
    def engine_failed(self) -> bool:
        return self.stopped is Cause.ENGINE_FAILED

    @property
    def answered(self) -> bool:
        """Whether the engine's server has answered, and not with an error."""
        return self.head is not None and self.head.status < 400 and not self._error_sent

    @property
    def written(self) -> CompletionStats:
        """What the request has written so far."""
        whole = self.stopped is State.COMPLETED and self.first_output_ms is not None
        return CompletionStats(self.output_tokens, whole, True, self.prompt_tokens)

    @property
    def usage(self) -> tuple[int, ...]:
        """The numbers of a `Usage`, which is not made for every token (hot path)."""
        return (
            self.prompt_tokens,
            self._cached_tokens,
            self.output_tokens,
            self._reasoning_tokens,
            self._recomputed_tokens,
        )

    def _count(self, usage: Usage) -> None:
        self.prompt_tokens, self._cached_tokens = usage.prompt, usage.cached
        self.output_tokens, self._reasoning_tokens = usage.output, usage.reasoning
        self._recomputed_tokens = usage.recomputed

    def next_value(self) -> bytes:
        """A deterministic replacement for a random value, the same in every attempt."""
        self._values += 1
        key = self.request_id.encode()[:64]
        return hashlib.blake2b(b"%d" % self._values, key=key, digest_size=16).digest()

    def next_generation(self) -> int:
        """Number of the call to the engine's `generate`, from 0."""
        self._generations += 1
        return self._generations - 1

    # -- how it stops -----------------------------------------------------------------------------

    async def run(
        self,
        serving: asyncio.Task[None],
        sick: asyncio.Future[None],
        blocked: asyncio.Future[float],
    ) -> None:
        """Let the engine serve until the first of: its answer, the deadline, the log is closed, the
        engine is `sick`, the request has `blocked` the event loop.

        Raises:
            EngineFailed: another attempt goes on.
            Fenced: another attempt goes on, or somebody else has ended the request.
        """
        left_s, closed = self.facts.deadline_ms / 1000 - self._clock.now_s(), self.journal.closed
        await first(max(0.0, left_s), serving, closed, sick, blocked)
        why = "the engine has failed"
        if serving.done():
            why = self._served(serving.exception())
        elif sick.done() and not closed.done():
            self.stop(Cause.ENGINE_FAILED)
            serving.add_done_callback(lambda task: task.cancelled() or task.exception())
            serving.cancel()  # do not wait: a sick engine may never answer the abort
        else:
            if blocked.done():
                self.stop(Reason.EVENT_LOOP_BLOCKED)
            else:
                self.stop(Reason.DEADLINE)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        if self.engine_failed:
            raise EngineFailed(why)
        await closed

    def _served(self, error: BaseException | None) -> str:
        """The engine's server is done. Returns what the engine has failed with, if it has."""
        if isinstance(error, EngineFailed):
            self.stop(Cause.ENGINE_FAILED)
        elif error is None and self.answered:
            self.stop()
        elif self.open:
            failure = self.failure or failed(Reason.ENGINE_ERROR)
            level = logging.INFO if self.failure else logging.ERROR
            what = failure if error is None else repr(error)
            extra = about(self.request_id, self.facts.tenant, failure.reason)
            text = "request %s failed: %s: %s"
            log.log(level, text, self.request_id, failure.reason, what, extra=extra)
            self.stop(failure)
        return str(error)

    def stop(self, why: Cause | Why | None = None) -> None:
        """Append the last entry; later stops are nothing. The record that is not complete goes with
        it, unless the engine or its server has failed, or the answer is cut at another place.

        Args:
            why: the request goes on in another attempt, or ends without an answer; None: the
                engine's server has answered.
        """
        if not self.open:
            return
        if isinstance(why, Cause | Exception):
            self._outputs, self._body = [], []
        if isinstance(why, Cause):
            self.stopped = why
            self.journal.stop(why)
            return
        reason = why.reason if isinstance(why, Exception) else why
        state = self.stopped = State.COMPLETED if reason is None else REASONS[reason].state
        if isinstance(why, RequestRefused):
            self._refuse(why)
        elif isinstance(why, Exception):
            self.lost = why
        if isinstance(why, CannotContinue):
            self._telemetry.count("hermes_requests_not_resumed", why.cause)
            extra = about(self.request_id, self.facts.tenant, why.reason)
            log.warning("request %s cannot be continued: %s", self.request_id, why, extra=extra)
        completed = why is None
        if completed and b'"reasoning_tokens"' in (last := b"".join(self._body)):
            self._reasoning_tokens = reasoning_tokens(last, self._streamed)
        used = self.usage
        self.journal.append(self._outputs, self._body, self._numberer.last, self.head, used)
        summary = Summary(
            request=self.facts,
            attempt=self._opened,
            attempts=self.journal.epoch,
            ended_ms=self._clock.now_ms(),
            first_output_ms=self.first_output_ms,
            began_ms=self.recorded.began_ms or self._opened.opened_ms,
            why=self.lost.why if self.lost else "",
            message=why.message if isinstance(why, RequestRefused) else "",
            cut=completed and self._is_cut,
        )
        level = self.journal.settings.transcript_compression_level if completed else None
        if self.facts.kept and level is None:
            level = 1  # an error, too, is kept for whoever comes later
        self.journal.stop(state, reason, summary, level)
        took_s, request_class = self._monotonic_s() - self._opened_s, self.facts.request_class
        in_all_s = (summary.ended_ms - self.facts.admitted_ms) / 1000
        self._telemetry.observe("hermes_batch_processing_time_seconds", took_s, request_class)
        self._telemetry.observe("hermes_end_to_end_time_seconds", in_all_s, request_class)
        self._telemetry.count("hermes_requests_ended", request_class, state, reason or "")

    @property
    def _is_cut(self) -> bool:
        """Whether an answer has met its `max_tokens`, also in what an earlier attempt has left."""
        return self._cut or any(one.finish_reason == "length" for one in self.recorded.outputs)

    def _refuse(self, failure: RequestRefused) -> None:
        """If no client can have seen any of a stream, the answer is the one that a request without
        `stream` gets: a status and JSON.
        """
        if self.journal.head is None:
            status = failure.status_at(self.path)
            self.head = Head(status, [("content-type", "application/json")])
            self._body, self._numberer = [failure.body(self.path)], EventNumberer()
        elif self.recorded.head is not None:
            self.head = self.recorded.head  # what was sent stays true

    def _end_early(self, why: CannotContinue | AnswerTooLarge) -> NoReturn:
        """End the request, and the engine's work on it."""
        self.stop(why)
        raise self.lost or why

    # -- going on where an older attempt stopped --------------------------------------------------

    def check_recorded(self) -> None:
        """Go on from what is recorded only if it is complete, and of an equal engine. Otherwise
        begin again, or stop if a client has seen a part.
        """
        part = self.recorded
        if not part.complete and part.body:
            why = "Redis has lost a part of its journal"
            self.stop(CannotContinue(NotResumed.JOURNAL_INCOMPLETE, why))
        elif part.complete and (not part.outputs or part.fingerprint == self._opened.fingerprint):
            return
        elif part.seen:
            why = "it was begun by an engine with another configuration"
            self.stop(CannotContinue(NotResumed.ENGINE_CONFIG_CHANGED, why))
        else:
            self.restart()

    async def wait_for_replay(self, number: int) -> None:
        """Wait until the serving layer has consumed the first `number` recorded outputs, of which
        several generations have each a part.
        """
        if self._replayed < number:
            await self._waiting.setdefault(number, asyncio.Event()).wait()

    def mark_replayed(self) -> None:
        """The serving layer has consumed a recorded output."""
        self._replayed += 1
        if waiting := self._waiting.pop(self._replayed, None):
            waiting.set()

    def regenerate(self, tokens: int, allowed: int) -> None:
        """That many tokens are generated a second time, of `allowed` in the whole request."""
        self._regenerated += tokens
        if self._regenerated > allowed:
            why = f"more than {allowed} tokens would have to be generated again"
            self.fail_continuation(NotResumed.REGENERATION_LIMIT, why)

    def count_recompute(self, tokens: int) -> None:
        """The engine has computed that many tokens that an older attempt had."""
        self._recomputed_tokens += tokens
        self._telemetry.tokens.recomputed(tokens)

    def restart(self) -> None:
        """Forget what was recorded, because no client has seen any of it."""
        assert not self.recorded.seen
        self.journal.continue_from(REQUEST_ID, b"", 0, None)
        lost = self.recorded.usage
        self._count(Usage(recomputed=lost.recomputed))
        self.count_recompute(lost.prompt + lost.output)
        self.recorded = Recorded(began_ms=self.recorded.began_ms)

    def fail_continuation(self, cause: NotResumed, why: str) -> NoReturn:
        """The recorded part cannot be continued exactly: end the request."""
        self._end_early(CannotContinue(cause, why))

    # -- what the engine produces -----------------------------------------------------------------

    def read(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has read a prompt, and had so many of its tokens in the prefix cache."""
        self._telemetry.tokens.prompt(prompt_tokens)
        self.prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def record(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: int | str | None,
        cached_tokens: int | None,
        more: Sequence[Any] = (),
    ) -> None:
        """Record an engine output, always a delta, by the fields of an `Output`. `cached_tokens` is
        kept with the first of a generation only, `more` has those that differ from the usual.
        """
        now = self._monotonic_s()
        self._cut |= finish_reason == "length"
        if self.first_output_ms is None:
            self.first_output_ms = self._clock.now_ms()
            if not self.recorded.outputs:
                waited_s = (self.first_output_ms - self.facts.admitted_ms) / 1000
                its_class = self.facts.request_class
                self._telemetry.observe("hermes_time_to_first_token_seconds", waited_s, its_class)
        elif index >= 0:
            cached_tokens = None
        self._outputs.append(
            [index, text, list(token_ids), finish_reason, stop_reason, cached_tokens, *more]
        )
        self.output_tokens += len(token_ids)
        self._count_output(len(token_ids), None if self._last_s is None else now - self._last_s)
        self._last_s = now

    def flush_previous(self) -> None:
        """The serving layer asks for the next output, so the previous record is complete."""
        if not (self._outputs or self._body) or not self.open:
            return
        head = self.head if self._body and self.journal.head is None else None
        used = self.usage if self._outputs else ()
        self.journal.append(self._outputs, self._body, self._numberer.last, head, used)
        self._outputs, self._body = [], []
        most = self.journal.settings.max_answer_bytes
        self._left_bytes = most - self.recorded.bytes - self.journal.bytes
        if self._left_bytes < 0:
            self._end_early(AnswerTooLarge())

    async def send(self, message: Any) -> None:
        """ASGI `send` of the engine's server."""
        if not self.open:
            return
        if message["type"] == "http.response.start":
            headers = [(k.decode().lower(), v.decode("latin-1")) for k, v in message["headers"]]
            kept = [(k, v) for k, v in headers if k == "content-type"]
            self.head = Head(message["status"], kept)
            self._streamed = self.head.streamed
            return
        body: bytes = message.get("body", b"")
        if not body:
            return
        self._error_sent |= self._streamed and body.startswith(_ERROR_EVENTS)
        if not self.answered:
            return  # an error, whose words are ours
        if len(body) > self._left_bytes:
            self._end_early(AnswerTooLarge())
        if self._streamed:
            if body := self._new_part(self._numberer.number(body)):
                self._body.append(body)
        else:
            body, step = self._new_part(body), timings.ENTRY_BYTES
            self._body += [body[at : at + step] for at in range(0, len(body), step)]

    def _new_part(self, body: bytes) -> bytes:
        """The part of `body` that is not in the journal yet."""
        expected = self.recorded.body[self._matched : self._matched + len(body)]
        if not expected:
            return body
        if not body.startswith(expected):
            why = f"the response differs from the journal after byte {self._matched}"
            self.fail_continuation(NotResumed.OUTPUT_MISMATCH, why)
        self._matched += len(expected)
        return body[len(expected) :]
