"""A batch of a running service: its lines, what is known of them, and what it must have become."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tests.service.support import CHAT, Running, replicas
from tests.waiting import PATIENCE_S, until

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

    def holders(self) -> list[int] | None:
        """The processes that hold a running line: the ingress that submitted it, and its worker."""
        for wake, worker in self.requests(ended=False):
            if worker:
                found = []
                for kind, name in (("Ingress", wake), ("Worker", worker)):
                    alive = replicas(self.service.service.dashboard_url, kind)
                    found += [one["pid"] for one in alive if one["replica_id"] in name]
                return found
        return None

    def completed(self) -> int:
        """How many lines have an answer in a segment."""
        counts = self.sdk.batches.retrieve(self.id).request_counts
        return counts.completed if counts else 0

    def done(self) -> int:
        """How many have one, there or in a journal."""
        return self.completed() + len([*self.requests(ended=True)])

    def over(self, within_s: float = PATIENCE_S) -> Any:
        """It, once it has ended."""

        def look() -> Any:
            found = self.sdk.batches.retrieve(self.id)
            return found if found.status in OVER else None

        return until("the batch ends", look, within_s)

    def check(
        self,
        text: Callable[[str], str],
        within_s: float = PATIENCE_S,
        besides: tuple[int, int] = (0, 0),
    ) -> None:
        """Every line was answered once, with this text, and computed once. `besides`: requests and
        tokens of others that the tenant has booked meanwhile.
        """
        ended = self.over(within_s)
        assert ended.status == "completed"
        answers = self.lines(ended.output_file_id)
        refused = self.lines(ended.error_file_id) if self.bad else {}
        assert answers.keys() | refused.keys() == self.prompts.keys()
        assert refused.keys() == set(self.bad)
        assert {one["response"]["status_code"] for one in refused.values()} <= {400}
        counts = ended.request_counts
        assert counts is not None
        assert counts.completed == len(answers)
        assert (counts.failed, counts.total) == (len(self.bad), len(self.prompts))
        for name, answer in answers.items():
            said = answer["response"]["body"]["choices"][0]["message"]["content"]
            assert (name, said) == (name, text(self.prompts[name]))
        new = {name: now - self._before[name] for name, now in self._booked().items()}
        lines = len(answers), len(answers) * self.tokens
        assert tuple(new.values()) == tuple(map(sum, zip(lines, besides, strict=True)))

    def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """What a file has of each line, which is there once."""
        assert file_id is not None
        lines = self.sdk.files.content(file_id).text.splitlines()
        found = {one["custom_id"]: one for one in map(json.loads, lines)}
        assert len(found) == len(lines)
        return found
