"""What a request will probably read and write, and how long it will run. Pure.

Three things are learnt from the requests that have ended: how much is written (`prediction.py`),
how many tokens a prompt really has (`prompts.py`), and how long a token takes (`pace.py`).
"""

from __future__ import annotations

from typing import Generic, TypeVar

from serve_app.contract import Written
from serve_app.policy.pace import Pace
from serve_app.policy.prediction import Lengths
from serve_app.policy.prompts import Prompts
from serve_app.policy.rules import Rules
from serve_app.policy.running import Running
from serve_app.policy.tenants import MOST_PROMPT_TOKENS
from serve_app.policy.waiting import Claimed, Waiting

C = TypeVar("C", bound=Claimed)


class Estimates(Generic[C]):
    """The estimates of one ingress."""

    def __init__(self, rules: Rules) -> None:
        self.lengths = Lengths()
        self.pace = Pace()
        self.prompts = Prompts()
        self._rules = rules

    def waiting(self, entry: C) -> Waiting[C]:
        """A request begins to wait: its place among others, and what it will need."""
        predicted, prompt_tokens = self.lengths.predict(entry), _prompt(entry)
        output_tokens = predicted.mean
        handicap_ms = self._rules.handicap_ms(entry, output_tokens) if self.lengths.useful else 0.0
        return Waiting(
            entry,
            rank_ms=entry.enqueued_ms + handicap_ms,
            latest_ms=entry.deadline_ms - self.pace.predict_ms(prompt_tokens, output_tokens),
            since_ms=entry.enqueued_ms,
            prompt_tokens=self.prompts.predict(entry, prompt_tokens),
            output_tokens=predicted.p90,
        )

    def again(self, running: Running[C], rank_ms: float, now_ms: int) -> Waiting[C]:
        """A request that has yielded waits: to continue, it has to read what it has written."""
        left_ms = self.pace.predict_ms(0, running.expected(running.tokens) - running.tokens)
        return Waiting(
            running.entry,
            rank_ms=rank_ms,
            latest_ms=running.entry.deadline_ms - left_ms,
            since_ms=now_ms,
            prompt_tokens=running.prompt_tokens + running.tokens,
            output_tokens=running.left_at_most,
            resumes=running,
        )

    def new(self, entry: C) -> Running[C]:
        """A request starts for the first time."""
        prompt_tokens = self.prompts.predict(entry, _prompt(entry))
        return Running(entry, self.lengths.predict(entry), prompt_tokens)

    def left(self, waiting: Waiting[C]) -> float:
        """How many tokens a waiting request will probably write."""
        before = waiting.resumes
        if before is None:
            return self.lengths.predict(waiting.entry).mean
        return before.expected(before.tokens) - before.tokens

    def learn(self, running: Running[C], written: Written, now_ms: int | None) -> None:
        """A request has ended. The length of an answer that was broken off is learnt only if it is
        already longer than expected: otherwise a tenant whose answers all break off would always
        look like a short one.
        """
        self.prompts.learn(running.entry, _prompt(running.entry), written.prompt_tokens)
        if written.whole or written.tokens > running.predicted.mean:
            self.lengths.learn(running.entry, running.predicted, written.tokens)
        if written.whole:
            self.learn_pace(running, written, now_ms)

    def learn_pace(self, running: Running[C], written: Written, now_ms: int | None) -> None:
        """A request has run until now."""
        if now_ms is not None and running.started_ms is not None:
            prompt_tokens = 0 if running.tokens else _prompt(running.entry)
            took_ms = now_ms - running.started_ms
            self.pace.learn(prompt_tokens, written.tokens - running.tokens, took_ms)


def _prompt(entry: Claimed) -> int:
    return min(entry.prompt_tokens, MOST_PROMPT_TOKENS)
