"""Between an engine and the journal: engine outputs and response bytes become one attempt's entries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from serve_app.journal.attempt import Attempt
from serve_app.journal.entries import AttemptFacts, Head, RequestFacts, Summary
from serve_app.journal.events import EventNumberer
from serve_app.telemetry import Telemetry

_KEPT_HEADERS = ("content-type",)

current: ContextVar[Recorder | None] = ContextVar("hermes_recorder", default=None)
"""The recorder of the request that the running task serves."""


class Recorder:
    """Receives a request's engine outputs and, as an ASGI `send`, the bytes that came of them.

    A record is an engine output with the bytes that it led to. It is closed, and goes to the journal, when the
    serving layer pulls the next output: that is right after it has sent the bytes, so nothing waits for a token.
    The bytes behind the last output ride in the terminal entry.
    """

    __slots__ = (
        "_attempt", "_body", "_facts", "_head_kept", "_last_s", "_numberer", "_opened", "_opened_s", "_outputs",
        "_recording", "_telemetry", "broken", "first_output_ms", "head", "output_tokens",
    )  # fmt: skip

    def __init__(self, attempt: Attempt, facts: RequestFacts, opened: AttemptFacts, telemetry: Telemetry) -> None:
        self.broken = False
        self.head: Head | None = None
        self.first_output_ms: int | None = None
        self.output_tokens = 0
        self._attempt = attempt
        self._facts = facts
        self._opened = opened
        self._telemetry = telemetry
        self._numberer = EventNumberer()
        self._recording = False
        self._head_kept = False
        self._outputs: list[Any] = []
        self._body: list[bytes] = []
        self._opened_s = time.monotonic()
        self._last_s: float | None = None

    @property
    def request_id(self) -> str:
        """Of the request that is recorded."""
        return self._attempt.request_id

    def record(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: int | str | None,
        cached_tokens: int | None,
        prompt_tokens: int = 0,
    ) -> None:
        """An engine output came: a delta, never the whole.

        Args:
            index: which of `n` sequences.
            token_ids: ids of the tokens in `text`, new since the last output.
            cached_tokens: prompt tokens found in the prefix cache; kept with the first output only.
            prompt_tokens: length of the prompt; counted with the first output only.
        """
        now = time.monotonic()
        if self.first_output_ms is None:
            self.first_output_ms = int(time.time() * 1000)
            self._telemetry.first_token(
                self._facts.request_class, (self.first_output_ms - self._facts.admitted_ms) / 1000
            )
            self._telemetry.prompt(prompt_tokens)
        else:
            cached_tokens = None
        self._recording = True
        self._outputs.append([index, text, list(token_ids), finish_reason, stop_reason, cached_tokens])
        self.output_tokens += len(token_ids)
        self._telemetry.output(len(token_ids), None if self._last_s is None else now - self._last_s)
        self._last_s = now

    def pulled(self) -> None:
        """The serving layer asks for the next output: the record before is complete."""
        self._recording = False
        self._flush()

    async def send(self, message: Any) -> None:
        """ASGI `send` of the engine's server."""
        if self.broken:
            return
        if message["type"] == "http.response.start":
            headers = [(k.decode().lower(), v.decode("latin-1")) for k, v in message["headers"]]
            self.head = Head(message["status"], [(k, v) for k, v in headers if k in _KEPT_HEADERS])
            return
        body: bytes = message.get("body", b"")
        if not body:
            return
        assert self.head is not None
        self._body.append(self._numberer.number(body) if self.head.streamed else body)
        if not self._recording and self.head.streamed and message.get("more_body", False) and not self.output_tokens:
            self._flush()  # events before the first output, such as `response.created`, need not wait for it

    def _flush(self) -> None:
        if self.broken or not (self._outputs or self._body):
            return
        head = self.head if self._body and not self._head_kept else None
        self._head_kept = self._head_kept or head is not None
        self._attempt.append(self._outputs, self._body, self._numberer.last, head)
        self._outputs, self._body = [], []

    def fail(self) -> None:
        """The engine failed while answering: what its server still sends is not for the client."""
        self.broken = True
        self._outputs, self._body = [], []

    def end(self, state: str, reason: str, compression_level: int | None) -> None:
        """Everything was sent: the rest and the terminal entry go together."""
        self._attempt.append(self._outputs, self._body, self._numberer.last, self.head)
        summary = Summary(
            request=self._facts,
            attempt=self._opened,
            attempts=self._attempt.epoch,
            ended_ms=int(time.time() * 1000),
            first_output_ms=self.first_output_ms,
            output_tokens=self.output_tokens,
        )
        self._attempt.finish(state, reason, summary, compression_level)
        self._telemetry.processed(
            self._facts.request_class,
            time.monotonic() - self._opened_s,
            (summary.ended_ms - self._facts.admitted_ms) / 1000,
        )
        self._telemetry.ended(self._facts.request_class, state, reason)
