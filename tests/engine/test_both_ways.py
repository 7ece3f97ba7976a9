"""Streamed equals unstreamed: the same status while nothing was sent, the same state, reason, words
and metrics, for generated requests through an ingress, its journal, a worker and the real engine.

Every error is one that OpenAI's clients understand, and no request is answered with a 5xx.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from prometheus_client.parser import text_string_to_metric_families

from serve_app.contract import Reason
from tests.engine.both_ways import CHAT, COMPLETIONS, RESPONSES, generated
from tests.engine.resume_helpers import EngineThread
from tests.journal.in_process import in_process, settings_of
from tests.tables import Failures
from tests.waiting import eventually

EACH_PATH, AT_ONCE = 80, 8
PYTHON = re.compile(
    r"\bNone\b|\bTrue\b|NoneType|Traceback|pydantic|object has no|\{'|validation err"
)
ROOTS = {"messages", "prompt", "input", "model"}
ENDED = "hermes_requests_ended"


class Started:
    """An engine that runs already, and goes on after its worker."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        """It has."""

    async def stop(self) -> None:
        """It does not."""


class Answer:
    """What a client saw of an answer, and what is known of its request."""

    def __init__(self, answer: httpx.Response, known: dict[str, Any]) -> None:
        self.headers, self.text = answer.headers, answer.text
        self.status = answer.status_code
        self.ended = (known.get("state"), known.get("reason"))
        self.error: dict[str, Any] = {}
        if self.status >= 400:
            self.error = answer.json()["error"]
        elif self.ended[0] != "completed":
            last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
            found = json.loads(last.removeprefix("data: "))
            self.error = found.get("error", found)

    @property
    def told(self) -> Any:
        """What must be equal both ways."""
        return self.ended, {k: v for k, v in self.error.items() if k != "sequence_number"}


async def ask(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    answer = await http.post(path, json=body)
    request_id = answer.headers.get("x-request-id", "")
    known = {}
    if request_id.startswith("req_"):
        known = (await http.get(f"/v1/requests/{request_id}")).json()
    return Answer(answer, known)


async def counted(http: httpx.AsyncClient) -> Counter[tuple[str, str]]:
    """How many requests have ended, by state and reason."""
    page = (await http.get("/metrics")).text
    return Counter(
        {
            (sample.labels["state"], sample.labels["reason"]): int(sample.value)
            for family in text_string_to_metric_families(page)
            if family.name == ENDED
            for sample in family.samples
            if sample.name == f"{ENDED}_total"
        }
    )


def check_error(answer: Answer, path: str, body: dict[str, Any]) -> None:
    """OpenAI's shape and words; what cannot succeed is not sent again."""
    error = answer.error
    if not error:
        return
    assert answer.status < 500
    assert error["type"] == "invalid_request_error"
    assert error["code"] in set(Reason)
    assert PYTHON.search(error["message"]) is None
    assert "\n" not in error["message"]
    if answer.status >= 400:
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers["x-hermes-reason"] == error["code"]
    field = re.split(r"[.\[]", error["param"])[0] if error["param"] else None
    assert field is None or field in body or field in ROOTS, field


async def both_ways(world: EngineThread, redis_url: str, namespace: str) -> None:
    settings = settings_of(redis_url, namespace, workers={"stall_s": 600.0})
    seen: list[list[Counter[tuple[str, str]]]] = []
    few, found = asyncio.Semaphore(AT_ONCE), []
    async with in_process(settings, Started(world.engine)) as door:

        async def one(path: str, body: dict[str, Any]) -> Answer:
            async with few:
                return await ask(door.http, path, body)

        asked = list(generated(EACH_PATH))
        for stream in (False, True):
            before = await counted(door.http)
            answers = await asyncio.gather(*(one(p, {**b, "stream": stream}) for p, b in asked))
            found.append(answers)
            ended = Counter(str(answer.ended[0]) for answer in answers)
            del ended["None"]  # refused by the ingress

            async def all_are_counted(before: Any = before, ended: Any = ended) -> bool:
                new = sum((await counted(door.http) - before).values())
                return bool(new >= ended.total())

            await eventually(all_are_counted)
            seen.append([before, await counted(door.http)])
    with Failures() as failures:
        for (path, body), plain, streamed in zip(asked, *found, strict=True):
            with failures.of(path, {k: str(v)[:99] for k, v in body.items()}):
                check_error(plain, path, body)
                check_error(streamed, path, body)
                assert streamed.told == plain.told
                assert streamed.status in (plain.status, 200)
                assert streamed.status == plain.status or "data: " in streamed.text
    unstreamed, streamed_counts = (after - before for before, after in seen)
    assert unstreamed == streamed_counts
    for path in (CHAT, COMPLETIONS, RESPONSES):
        of_path = [a.status for (p, _), a in zip(asked, found[0], strict=True) if p == path]
        assert min(of_path.count(200), of_path.count(400)) >= EACH_PATH // 5


@pytest.mark.timeout(600)
def test_streamed_equals_unstreamed(world: EngineThread, redis_url: str, namespace: str) -> None:
    assert 3 * EACH_PATH >= 200
    world.run(both_ways(world, redis_url, namespace), timeout_s=500)
