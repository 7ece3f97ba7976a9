"""Batches on services whose processes die by `kill -9`: real Ray Serve, Redis and HAProxy."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest

from scripts.chaos_testing.parts import Parts
from tests.service.disturbance import on_disk, simulated_text, whole_again
from tests.service.support import CHAT, Running, replicas
from tests.waiting import until

pytestmark = pytest.mark.disturbs
LINES, KILLED_AT, TOKENS = 64, 27, 200
REAL_TOKENS = 40
OVER = ("completed", "failed", "expired", "cancelled")


class Batch:
    """A batch with a line for each prompt, and what the service books meanwhile."""

    def __init__(
        self, service: Running, prompts: Mapping[str, str], tokens: int, bad: Collection[str] = ()
    ) -> None:
        self.service, self.prompts, self.tokens, self.bad = service, prompts, tokens, bad
        self.sdk = service.sdk.with_options(max_retries=10)
        self._before = self._booked()
        lines = [
            {
                "custom_id": name,
                "method": "POST",
                "url": CHAT,
                "body": service.body(prompt, tokens, **({"n": 0} if name in bad else {})),
            }
            for name, prompt in prompts.items()
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self.sdk.files.create(file=("lines.jsonl", content), purpose="batch")
        self.id = self.sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id

    def _booked(self) -> dict[str, int]:
        buckets = self.service.http.get("/v1/usage?bucket_width=1d").json()["data"]
        found = [result for bucket in buckets for result in bucket["results"]]
        names = ("num_model_requests", "output_tokens")
        return {name: sum(one[name] for one in found) for name in names}

    def requests(self, ended: bool) -> Iterator[tuple[str, str]]:
        """The ingress and the worker of each line's request that Redis still has; of an ended one
        whatever there is.
        """
        for key in self.service.redis.scan_iter(match=self.service.journal_key("*")):
            told = [fields for _, fields in self.service.entries(key.decode())]
            facts = [json.loads(fields[b"m"]) for fields in told if b"m" in fields]
            first = facts[0].get("request", facts[0]) if facts else {}
            if first.get("batch") == self.id and any(b"k" in fields for fields in told) == ended:
                yield first["wake"], facts[-1].get("replica", "")

    def done(self) -> int:
        counts = self.sdk.batches.retrieve(self.id).request_counts
        return (counts.completed if counts else 0) + len([*self.requests(ended=True)])

    def check(self, text: Callable[[str], str]) -> None:
        """Every line was answered once, with this text, and computed once."""
        ended = until(
            "the batch ends",
            lambda: next(
                (b for b in [self.sdk.batches.retrieve(self.id)] if b.status in OVER), None
            ),
        )
        assert ended.status == "completed"
        answers = self._lines(ended.output_file_id)
        refused = self._lines(ended.error_file_id) if self.bad else {}
        assert answers.keys() | refused.keys() == self.prompts.keys()
        assert refused.keys() == set(self.bad)
        assert {one["status_code"] for one in refused.values()} <= {400}
        counts = ended.request_counts
        assert counts is not None
        assert counts.completed == len(answers)
        assert (counts.failed, counts.total) == (len(self.bad), len(self.prompts))
        for name, answer in answers.items():
            said = answer["body"]["choices"][0]["message"]["content"]
            assert (name, said) == (name, text(self.prompts[name]))
        new = {name: now - self._before[name] for name, now in self._booked().items()}
        assert new["num_model_requests"] == len(answers)
        assert new["output_tokens"] == len(answers) * self.tokens

    def _lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """The responses in a file by the ids of their lines, each of which is there once."""
        assert file_id is not None
        lines = self.sdk.files.content(file_id).text.splitlines()
        found = {one["custom_id"]: one["response"] for one in map(json.loads, lines)}
        assert len(found) == len(lines)
        return found


def holders(batch: Batch) -> list[int] | None:
    """The processes that hold a running line: the ingress that submitted it, and its worker."""
    for wake, worker in batch.requests(ended=False):
        if worker:
            found = []
            for kind, name in (("Ingress", wake), ("Worker", worker)):
                alive = replicas(batch.service.service.dashboard_url, kind)
                found += [one["pid"] for one in alive if one["replica_id"] in name]
            return found
    return None


def test_a_batch_outlives_the_ingress_and_the_worker_that_hold_it(simulated: Running) -> None:
    whole_again(simulated, 3)
    prompts = {f"line-{number}": f"Tell me of the sea, {number}." for number in range(LINES)}
    batch = Batch(simulated, prompts, TOKENS)
    until("some lines are done", lambda: batch.done() >= KILLED_AT)
    holding = until("a line runs", lambda: holders(batch))
    assert len(holding) == 2
    for pid in holding:
        Parts(simulated.service).kill(pid)
    batch.check(lambda prompt: simulated_text(prompt, TOKENS))
    whole_again(simulated, 3)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_lines_on_the_real_engine_are_answered_as_without_kills(service: Running) -> None:
    """Ingresses, workers, engine cores and Redis die while 300 lines are worked on."""
    prompts = {f"line-{number}": f"What is {number} times {number}?" for number in range(300)}
    unbroken = {prompt: service.text(prompt, REAL_TOKENS) for prompt in prompts.values()}
    batch, parts = Batch(service, prompts, REAL_TOKENS), Parts(service.service)
    for number, kind in enumerate(("worker", "ingress", "redis", "engine"), 1):
        until("lines are done", lambda number=number: batch.done() >= 55 * number)  # type: ignore[misc]
        if kind == "redis":
            on_disk(service)
            parts.kill(*parts.pids("redis"))
            service.service.restart_redis()
        else:
            parts.kill(parts.pids(kind)[-1])
    batch.check(unbroken.__getitem__)
    whole_again(service, 2)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_lines_outlive_fifty_kills(simulated: Running) -> None:
    """Ingresses, workers and Redis die in turn; one line of a hundred is refused."""
    whole_again(simulated, 3)
    prompts = {f"line-{number}": f"Tell me of the sea, {number}." for number in range(10_000)}
    batch, parts = Batch(simulated, prompts, 8, [*prompts][::100]), Parts(simulated.service)
    for number in range(1, 51):
        until(f"{number}", lambda least=190 * number: batch.done() >= least)  # type: ignore[misc]
        kind = ("ingress", "worker", "redis")[number % 3]
        if kind == "redis":
            on_disk(simulated)
            parts.kill(*parts.pids("redis"))
            simulated.service.restart_redis()
        elif alive := parts.pids(kind):
            parts.kill(alive[-1])
    batch.check(lambda prompt: simulated_text(prompt, 8))
    whole_again(simulated, 3)
