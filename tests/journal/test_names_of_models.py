"""Aliases of the model, on a real ingress with the simulated engine: answers have the name that was
asked for, and what the service counts has the model's own.
"""

from __future__ import annotations

import json
from typing import Any

from serve_app.ingress.protocol_events import sign_of_life
from tests.journal.in_process import door, in_process, settings_of
from tests.tables import Failures

MODEL, ALIAS = "hermes-tiny", 'gpt-5 "mini"'
SERVED = {"name": MODEL, "aliases": ["claude-*", "gpt-5*", "small", MODEL]}
HELLO = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/embeddings": {"input": "Hello"},
}


def names_in(body: str) -> set[str]:
    """The names of the model in an answer, or in each event of a stream."""
    data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    return {json.loads(one)["model"] for one in data or [body]}


async def test_answers_have_the_name_that_was_asked_for(redis_url: str, namespace: str) -> None:
    async with in_process(settings_of(redis_url, namespace, model=SERVED)) as d:
        with Failures() as failures:
            for path, body in ASKED.items():
                for more in ({}, {"stream": True}) if "max_tokens" in body else ({},):
                    with failures.of(path, more):
                        answer = await d.http.post(path, json={**body, **more, "model": ALIAS})
                        assert (answer.status_code, names_in(answer.text)) == (200, {ALIAS})
                        name = f"/v1/requests/{answer.headers['x-request-id']}"
                        found = (await d.http.get(name)).json()
                        assert found["model"] == ALIAS
                        events = (await d.http.get(f"{name}/events")).text
                        assert names_in(events) == {ALIAS}
        hours = {"start_time": found["admitted_at_ms"] // 1000 - 3600, "group_by": "model"}
        used = (await d.http.get("/v1/usage", params={**hours, "bucket_width": "1h"})).json()
        rows = [row["model"] for bucket in used["data"] for row in bucket["results"]]
        assert set(rows) == {MODEL}
        unknown = await d.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        for path in ("/v1/models/other", "/v1/models/Small"):
            assert (await d.http.get(path)).status_code == 404
        listed = (await d.http.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == [MODEL, "small"]
        for name in (MODEL, "small", "claude-opus/5", ALIAS):
            assert (await d.http.get(f"/v1/models/{name}")).json()["id"] == name


async def test_an_alias_is_the_same_request_and_a_stored_chat_is_found_by_it(
    redis_url: str, namespace: str
) -> None:
    async with in_process(settings_of(redis_url, namespace, model=SERVED)) as d:
        body = {**ASKED["/v1/chat/completions"], "model": ALIAS, "store": True}
        key = {"idempotency-key": "one"}
        first, again = [
            await d.http.post("/v1/chat/completions", json=body, headers=key) for _ in range(2)
        ]
        assert again.headers["x-request-id"] == first.headers["x-request-id"]
        assert again.content == first.content
        for model, count in ((ALIAS, 1), (MODEL, 0), ("", 1)):
            chats = (await d.http.get("/v1/chat/completions", params={"model": model})).json()
            assert [one["model"] for one in chats["data"]] == [ALIAS] * count


async def test_what_waits_has_the_name_that_was_asked_for(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace, model=SERVED) as d:
        body = {"model": ALIAS, "input": "Hello", "background": True}
        created = await d.http.post("/v1/responses", json=body)
        name = created.json()["id"]
        assert created.json()["model"] == ALIAS
        assert (await d.http.get(f"/v1/responses/{name}")).json()["model"] == ALIAS
        request_id = created.headers["x-request-id"]
        record = await d.ingress.base.store.record(request_id)
        assert record is not None
        facts = record.facts
        assert facts is not None
        assert (facts.model, facts.alias) == (MODEL, ALIAS)
        asked, _ = await d.ingress.base.store.asked(request_id)
        assert json.loads(asked or b"")["model"] == MODEL
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert names_in(sign_of_life(path, "r", facts, 1, True).decode()) == {ALIAS}
