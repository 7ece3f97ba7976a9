"""Turns engine outputs and response bytes into the journal entries of one attempt."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import CompletionStats, NotResumed, Reason, State
from serve_app.errors import RequestRefused
from serve_app.journal.attempt import Attempt
from serve_app.journal.events import EventNumberer
from serve_app.journal.facts import AttemptFacts, Head, RequestFacts, Summary
from serve_app.journal.ids import REQUEST_ID
from serve_app.journal.pause import Pause
from serve_app.journal.usage import Usage, reasoning_tokens
from serve_app.observability.metrics import Telemetry
from serve_app.settings.sections import JournalSettings
from workers.replay import AnswerTooLarge, CannotContinue, Recorded

_KEPT_HEADERS = ("content-type",)
_ERROR_EVENT = b'data: {"error"'
"""With this begins what vLLM's server sends when it fails after the status of a stream."""

current: ContextVar[Recorder | None] = ContextVar("hermes_recorder", default=None)
"""The recorder of the request that the running task serves."""


class Recorder:
    """Receives a request's engine outputs and, as an ASGI `send`, the response bytes that they
    produce.

    A record is an engine output with the bytes that it produced. It is complete, and goes to the
    journal, when the serving layer pulls the next output, right after it has sent the bytes. So
    recording delays no token. The bytes after the last output go into the terminal entry.

    Of several generations (a completion of several prompts), each takes `one_at_a_time` for as long
    as the serving layer has an output of it. So every attempt consumes the outputs in the order of
    the journal, and produces the bytes in one order.

    If older attempts have left a part of the response (`recorded`), the serving layer produces its
    bytes again from the recorded outputs. They are compared with the journal's bytes and not
    appended; later bytes are new.
    """

    __slots__ = (
        "_attempt",
        "_body",
        "_cached_tokens",
        "_clock",
        "_count_output",
        "_facts",
        "_generations",
        "_head_kept",
        "_last_s",
        "_left_bytes",
        "_matched",
        "_max_bytes",
        "_monotonic_s",
        "_numberer",
        "_opened",
        "_opened_s",
        "_outputs",
        "_passed",
        "_reasoning_tokens",
        "_recomputed_tokens",
        "_repeated",
        "_stream_failed",
        "_streamed",
        "_telemetry",
        "_turns",
        "_values",
        "broken",
        "completed",
        "failure",
        "first_output_ms",
        "head",
        "lost",
        "one_at_a_time",
        "output_tokens",
        "prompt_tokens",
        "recorded",
    )

    def __init__(
        self,
        attempt: Attempt,
        facts: RequestFacts,
        opened: AttemptFacts,
        telemetry: Telemetry,
        clock: RedisClock,
        recorded: Recorded | None = None,
        max_bytes: int = JournalSettings().max_answer_bytes,
    ) -> None:
        self.broken = False
        self.completed = False
        self.lost: CannotContinue | AnswerTooLarge | None = None
        self.one_at_a_time = asyncio.Lock()
        self.recorded = recorded or Recorded()
        self.head: Head | None = None
        self.failure: RequestRefused | None = None
        """What the engine's server has failed with, once it has."""
        self.first_output_ms: int | None = None
        self._count(self.recorded.usage)
        self._attempt = attempt
        self._facts = facts
        self._opened = opened
        self._telemetry = telemetry
        self._clock = clock
        self._numberer = EventNumberer()
        self._streamed = False
        self._stream_failed = False
        self._generations = 0
        self._values = 0
        self._passed = 0
        self._repeated = 0
        self._turns: dict[int, asyncio.Event] = {}
        self._matched = 0
        self._head_kept = self.recorded.head is not None
        self._max_bytes = max_bytes
        self._left_bytes = max_bytes - self.recorded.bytes
        self._outputs: list[Any] = []
        self._body: list[bytes] = []
        self._monotonic_s = clock.local.monotonic_s  # read for every output
        self._count_output = telemetry.tokens.output
        self._opened_s = self._monotonic_s()
        self._last_s: float | None = None

    @property
    def request_id(self) -> str:
        return self._attempt.request_id

    @property
    def pause(self) -> Pause:
        """When an engine keeps what this request makes."""
        return self._attempt.pause

    @property
    def tenant(self) -> str:
        return self._facts.tenant

    @property
    def request_class(self) -> str:
        """One of `CLASSES`; a newer version may have others."""
        return self._facts.request_class

    @property
    def detached(self) -> bool:
        return self._facts.detached

    @property
    def created_s(self) -> float:
        """The response's creation time in Unix seconds: the admission time, which is the same in
        every attempt.
        """
        return self._facts.admitted_ms / 1000

    @property
    def answered(self) -> bool:
        """Whether the engine's server has answered, and not with an error."""
        return self.head is not None and self.head.status < 400 and not self._stream_failed

    @property
    def written(self) -> CompletionStats:
        """What the request has written so far."""
        whole = self.completed and self.first_output_ms is not None
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
        return hashlib.blake2b(
            b"%d" % self._values, key=self._attempt.request_id.encode()[:64], digest_size=16
        ).digest()

    def next_generation(self) -> int:
        """Number of the call to the engine's `generate`, from 0; a request may make several
        calls.
        """
        self._generations += 1
        return self._generations - 1

    # -- going on where an older attempt stopped --------------------------------------------------

    async def turn(self, number: int) -> None:
        """Wait until the serving layer has consumed the first `number` recorded outputs, of which
        several generations have each a part.
        """
        if self._passed < number:
            await self._turns.setdefault(number, asyncio.Event()).wait()

    def passed(self) -> None:
        """The serving layer has consumed a recorded output."""
        self._passed += 1
        if turn := self._turns.pop(self._passed, None):
            turn.set()

    def repeat(self, tokens: int, allowed: int) -> None:
        """That many tokens are generated a second time, of `allowed` in the whole request.

        Raises:
            CannotContinue: they are too many.
        """
        self._repeated += tokens
        if self._repeated > allowed:
            self.lose(
                NotResumed.REGENERATION_LIMIT,
                f"more than {allowed} tokens would have to be generated again",
            )

    def computed_again(self, tokens: int) -> None:
        """The engine has computed that many tokens that an older attempt had."""
        self._recomputed_tokens += tokens
        self._telemetry.tokens.recomputed(tokens)

    def restart(self) -> None:
        """Forget what was recorded, because no client has seen any of it."""
        assert not self.recorded.seen
        self._attempt.continue_from(REQUEST_ID, b"", 0, None)
        lost = self.recorded.usage
        self._count(Usage(recomputed=lost.recomputed))
        self.computed_again(lost.prompt + lost.output)
        self.recorded = Recorded(began_ms=self.recorded.began_ms)

    def lose(self, cause: NotResumed, why: str) -> NoReturn:
        """The recorded part cannot be continued exactly: end the attempt and the request.

        Raises:
            CannotContinue: always, to end the engine's work on the request.
        """
        self._stop(CannotContinue(cause, why))

    def _stop(self, why: CannotContinue | AnswerTooLarge) -> NoReturn:
        self.lost = self.lost or why
        self._outputs, self._body = [], []
        raise self.lost

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
        """Record an engine output, which is always a delta.

        Args:
            index: see `Output.index`.
            token_ids: ids of the tokens in `text`, new since the last output.
            cached_tokens: prompt tokens found in the prefix cache; kept with the first output of a
                generation only.
            more: the other fields of `Output`, if they have other values than usual.
        """
        now = self._monotonic_s()
        if self.first_output_ms is None:
            self.first_output_ms = self._clock.now_ms()
            if not self.recorded.outputs:
                self._telemetry.first_token(
                    self._facts.request_class,
                    (self.first_output_ms - self._facts.admitted_ms) / 1000,
                )
        elif index >= 0:
            cached_tokens = None
        self._outputs.append(
            [index, text, list(token_ids), finish_reason, stop_reason, cached_tokens, *more]
        )
        self.output_tokens += len(token_ids)
        self._count_output(len(token_ids), None if self._last_s is None else now - self._last_s)
        self._last_s = now

    def pulled(self) -> None:
        """The serving layer asks for the next output, so the previous record is complete."""
        self._flush()

    async def send(self, message: Any) -> None:
        """ASGI `send` of the engine's server."""
        if self.broken or self.lost:
            return
        if message["type"] == "http.response.start":
            headers = [(k.decode().lower(), v.decode("latin-1")) for k, v in message["headers"]]
            kept = [(k, v) for k, v in headers if k in _KEPT_HEADERS]
            self.head = Head(message["status"], kept, logprobs_of_text=True)
            self._streamed = self.head.streamed
            return
        body: bytes = message.get("body", b"")
        if not body:
            return
        assert self.head is not None
        self._stream_failed |= self._streamed and body.startswith(_ERROR_EVENT)
        if not self.answered:
            return  # an error, whose words are ours
        if len(body) > self._left_bytes:
            self._stop(AnswerTooLarge())
        body = self._new_part(self._numberer.number(body) if self._streamed else body)
        if not body:
            return
        if self._streamed:
            self._body.append(body)
        else:
            step = timings.ENTRY_BYTES
            self._body += [body[at : at + step] for at in range(0, len(body), step)]

    def _new_part(self, body: bytes) -> bytes:
        """The part of `body` that is not in the journal yet."""
        expected = self.recorded.body[self._matched : self._matched + len(body)]
        if not expected:
            return body
        if not body.startswith(expected):
            self.lose(
                NotResumed.OUTPUT_MISMATCH,
                f"the response differs from the journal after byte {self._matched}",
            )
        self._matched += len(expected)
        return body[len(expected) :]

    def _flush(self) -> None:
        if self.broken or self.lost or not (self._outputs or self._body):
            return
        head = self.head if self._body and not self._head_kept else None
        self._head_kept = self._head_kept or head is not None
        used = self.usage if self._outputs else ()
        self._attempt.append(self._outputs, self._body, self._numberer.last, head, used)
        self._outputs, self._body = [], []
        self._left_bytes = self._max_bytes - self.recorded.bytes - self._attempt.bytes
        if self._left_bytes < 0:
            self._stop(AnswerTooLarge())

    def fail(self) -> None:
        """The engine failed while it answered: drop whatever its server still sends."""
        self.broken = True
        self.lost = None
        self._outputs, self._body = [], []

    def refuse(self, failure: RequestRefused) -> None:
        """The engine's server has refused the request or failed, which ends the request. If no
        client can have seen any of a stream, the answer is the one that a request without `stream`
        gets: a status and JSON.
        """
        self._outputs, self._body = [], []
        if not self._head_kept:
            self.head = Head(failure.status, [("content-type", "application/json")])
            self._body, self._numberer = [failure.body()], EventNumberer()
        elif self.recorded.head is not None:
            self.head = self.recorded.head  # what was sent stays true
        self.end(State.FAILED, failure.reason, None, failure.message)

    def end(
        self,
        state: State,
        reason: Reason | None,
        compression_level: int | None,
        message: str = "",
    ) -> None:
        """Everything was sent: append the rest together with the ending.

        Args:
            message: what the caller is told, if it is not what the reason says.
        """
        if isinstance(self.lost, CannotContinue):
            self._telemetry.lost(self.lost.cause)
        self.completed = state is State.COMPLETED
        if self._facts.kept and compression_level is None:
            compression_level = 1  # an error, too, is kept for whoever comes later
        if self.completed and b'"reasoning_tokens"' in (last := b"".join(self._body)):
            self._reasoning_tokens = reasoning_tokens(last, self._streamed)
        used = self.usage
        self._attempt.append(self._outputs, self._body, self._numberer.last, self.head, used)
        summary = Summary(
            request=self._facts,
            attempt=self._opened,
            attempts=self._attempt.epoch,
            ended_ms=self._clock.now_ms(),
            first_output_ms=self.first_output_ms,
            began_ms=self.recorded.began_ms or self._opened.opened_ms,
            why=self.lost.why if self.lost else "",
            message=message,
        )
        self._attempt.finish(state, reason, summary, compression_level)
        self._telemetry.processed(
            self._facts.request_class,
            self._monotonic_s() - self._opened_s,
            (summary.ended_ms - self._facts.admitted_ms) / 1000,
        )
        self._telemetry.ended(self._facts.request_class, state, reason)
