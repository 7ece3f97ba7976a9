"""Responses that go on from earlier ones: what their engines are given, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from serve_app import timings
from serve_app.contract import State, item_name
from serve_app.journal.entries import Head, RequestFacts, Summary, decode_facts
from tests.journal.in_process import Door, door
from tests.journal.journal_helpers import OPENED, World
from tests.tables import Failures
from workers.journal_writer import JournalWriter

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "A lighthouse.", "annotations": []}],
}


class Service:
    """An ingress, and a worker that answers what the test says."""

    def __init__(self, at: Door, writer: JournalWriter, w: World) -> None:
        self.at = at
        self._writer = writer
        self._w = w

    async def ask(self, given: Any, **fields: Any) -> Any:
        """Ask in the background; returns the answer to the POST."""
        body = {"input": given, "background": True, **fields}
        return await self.at.http.post("/v1/responses", json=body)

    async def answered(
        self,
        given: Any,
        output: list[Any] | Callable[[str], list[Any]],
        *,
        streamed: bool = False,
        state: State = State.COMPLETED,
        **fields: Any,
    ) -> str:
        """The id of a response with this output, which may depend on that id."""
        response_id = str((await self.ask(given, **fields)).json()["id"])
        request_id = response_id.removeprefix("resp_")
        attempt, entries = await self._writer.open(request_id, 1, b"nonce", OPENED)
        items = output(response_id) if callable(output) else output
        response = {"id": response_id, "object": "response", "output": items}
        body, kind = json.dumps(response).encode(), "application/json"
        if streamed:
            event = json.dumps({"type": "response.completed", "response": response}).encode()
            body, kind = (
                b"id: 1\nevent: response.completed\ndata: %b\n\n" % event,
                "text/event-stream",
            )
        head = Head(200, [("content-type", kind)])
        attempt.append([], [body], int(streamed), head)
        facts = decode_facts(entries[0], RequestFacts)
        summary = Summary(facts, OPENED, 1, facts.admitted_ms)
        attempt.stop(state, None, summary, 1)
        await attempt.closed
        return response_id

    async def input_of(self, response_id: str) -> list[Any]:
        """What the engine gets."""
        body, _ = await self._w.store.asked(response_id.removeprefix("resp_"))
        assert body is not None
        found: list[Any] = json.loads(body)["input"]
        return found


@asynccontextmanager
async def serving(w: World, **sections: Any) -> AsyncIterator[Service]:
    settings = w.settings
    async with door(settings.redis.url, settings.namespace, **sections) as at:
        yield Service(at, await w.writer(), w)


async def test_every_turn_holds_all_turns_before_it(w: World) -> None:
    async with serving(w, model={"aliases": ["gpt-*"]}) as s:
        first = await s.answered("Where?", [THOUGHT, CALL])
        result = {"type": "function_call_output", "call_id": "c1", "output": "the coast"}
        for streamed in (False, True):
            second = await s.answered(
                [result], [SAID], streamed=streamed, previous_response_id=first
            )
            third = (await s.ask("Why?", previous_response_id=second, model="gpt-5")).json()
            assert third["model"] == "gpt-5"
            asked = await s.input_of(third["id"])
            assert asked[0]["content"] == [{"type": "input_text", "text": "Where?"}]
            assert asked[1:5] == [THOUGHT, CALL, result, SAID]
            assert asked[5]["content"][0]["text"] == "Why?"


def said(number: int, response_id: str) -> dict[str, Any]:
    """An item with an id as a worker gives it."""
    name = item_name(f"{number:016x}", response_id.removeprefix("resp_"))
    content = [{"type": "output_text", "text": f"Lighthouse {number}.", "annotations": []}]
    return {**SAID, "id": f"msg_{name}", "content": content}


def referring(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


async def test_the_id_of_an_item_stands_for_the_item(w: World) -> None:
    async with serving(w) as s:
        for streamed in (False, True):
            first = await s.answered("Where?", lambda its: [said(1, its), CALL], streamed=streamed)
            second = await s.answered("Who?", lambda its: [said(1, its), said(2, its)])
            one, two, three = said(1, first), said(1, second), said(2, second)
            bare = {"type": None, "id": one["id"]}
            asked = [CALL, referring(three), bare, referring(two), {"id": one["id"]}, THOUGHT]
            answer = (await s.ask(asked)).json()["id"]
            assert await s.input_of(answer) == [CALL, three, one, two, one, THOUGHT]
            later = (await s.ask([referring(two)], previous_response_id=first)).json()["id"]
            assert (await s.input_of(later))[1:] == [one, CALL, two]


async def test_an_item_that_is_not_stored_is_not_found(w: World, tmp_path: Path) -> None:
    digests = [f"{name} sha256:{hashlib.sha256(name.encode()).hexdigest()}" for name in "ab"]
    (file := tmp_path / "keys").write_text("\n".join(digests))
    async with serving(w, auth={"required": True, "keys_file": str(file)}) as s:
        s.at.http.headers["authorization"] = "Bearer b"
        others = await s.answered("Hi", lambda its: [said(1, its)])
        s.at.http.headers["authorization"] = "Bearer a"
        found, failed, gone = [
            await s.answered("Hi", lambda its: [said(1, its)], state=state)
            for state in (State.COMPLETED, State.FAILED, State.COMPLETED)
        ]
        await s.at.http.delete(f"/v1/responses/{gone}")
        waiting = (await s.ask("Hi")).json()["id"]
        cases = {
            "OpenAI's": "msg_68af4030baa48193b0b43b4c2a176a1a0e6967589f08e78d",
            "empty": "",
            "long": "msg_" + "0" * 5_000,
            "another of the same response": said(9, found)["id"],
            "another tenant's": said(1, others)["id"],
            "failed": said(1, failed)["id"],
            "deleted": said(1, gone)["id"],
            "not ended": said(1, waiting)["id"],
        }
        with Failures() as failures:
            for name, item_id in cases.items():
                with failures.of(name):
                    answer = await s.ask([referring(said(1, found)), {"id": item_id}])
                    error = answer.json()["error"]
                    expected = f"Item with id '{item_id[:80]}' not found."
                    assert (answer.status_code, error["param"]) == (404, "input")
                    assert error["message"] == expected
        assert (await s.ask([referring(said(1, found))])).status_code == 200
        many = [{"id": f"msg_{'0' * 16}{number:032x}"} for number in range(129)]
        refused = await s.ask(many)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        assert "128 responses" in refused.json()["error"]["message"]


async def test_what_nothing_can_go_on_from_is_refused(w: World) -> None:
    async with serving(w) as s:
        waiting = (await s.ask("Hi")).json()["id"]
        failed = await s.answered("Hi", [SAID], state=State.FAILED)
        gone = await s.answered("Hi", [SAID])
        await s.at.http.delete(f"/v1/responses/{gone}")
        not_found = (400, "previous_response_not_found", "previous_response_id")
        no_answer = (400, "invalid_request", "previous_response_id")
        cases = {
            "unknown": ("resp_req_0", not_found),
            "no id": ("abc", not_found),
            "long": ("resp_" + "x" * 190, not_found),
            "deleted": (gone, not_found),
            "not ended": (waiting, no_answer),
            "failed": (failed, no_answer),
            "too long": ("resp_" + "x" * 200, no_answer),
            "a number": (5, no_answer),
        }
        with Failures() as failures:
            for name, (previous, expected) in cases.items():
                with failures.of(name):
                    answer = await s.ask("Go on", previous_response_id=previous)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["code"], error["param"]) == expected


async def test_a_conversation_is_bounded_as_every_body(w: World) -> None:
    async with serving(w, ingress={"max_body_bytes": 2_000}) as s:
        first = await s.answered("x" * 1_200, [SAID])
        answer = await s.ask("y" * 1_200, previous_response_id=first)
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            413,
            "previous_response_id",
        )
        one = said(1, await s.answered("Hi", lambda its: [said(1, its)]))
        answer = await s.ask([referring(one)] * 20)
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "input")


async def test_input_items_come_in_pages(w: World) -> None:
    async with serving(w) as s:
        given = [{"role": "user", "content": f"{n}", "id": None} for n in range(5)]
        found = await s.answered([*given, CALL], [SAID])
        page = f"/v1/responses/{found}/input_items"
        every = (await s.at.http.get(page, params={"order": "asc"})).json()
        assert [one.get("content") for one in every["data"]] == ["0", "1", "2", "3", "4", None]
        assert every["data"][0]["type"] == "message"
        assert (
            every["first_id"] == every["data"][0]["id"] == f"item_{found.removeprefix('resp_')}_0"
        )
        assert every["data"][5]["id"] == "fc_1"
        assert not every["has_more"]
        newest = (await s.at.http.get(page, params={"limit": 4})).json()
        assert (newest["data"], newest["has_more"]) == (every["data"][:1:-1], True)
        wrong = await s.at.http.get(page, params={"after": "nobody"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after")


async def test_responses_are_stored_unless_they_say_otherwise(w: World) -> None:
    """One that waits for its answer is no other, but that its client's leaving ends it."""
    async with serving(w) as s:
        stored = {}
        for name, fields in {"": {}, "no": {"store": False}, "yes": {"store": True}}.items():
            body = {"input": "Hi", **fields}
            posted = asyncio.create_task(s.at.http.post("/v1/responses", json=body))
            (one,) = await s.at.waiting(1)
            request = await w.store.read_request(one)
            assert request is not None
            facts = decode_facts(request, RequestFacts)
            assert not facts.detached
            stored[name] = facts.stored and facts.kept
            await s.at.http.delete(f"/v1/requests/{one}")
            assert (await posted).status_code == 499
        assert stored == {"": True, "no": False, "yes": True}


async def test_without_room_a_response_is_answered_and_not_stored(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(w, journal={"max_retained_share": 1e-7}) as s:
        monkeypatch.setattr(timings, "KEPT_LOOK_S", 0.0)
        await s.answered("Hi", [SAID])
        refused = await s.ask("Hi")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "results_full")
        posted = asyncio.create_task(s.at.http.post("/v1/responses", json={"input": "Hi"}))
        (one,) = await s.at.waiting(1)
        request = await w.store.read_request(one)
        assert request is not None
        facts = decode_facts(request, RequestFacts)
        assert (facts.kept, facts.stored) == (False, False)
        await s.at.http.delete(f"/v1/requests/{one}")
        await posted
