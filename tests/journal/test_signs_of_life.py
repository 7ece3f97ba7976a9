"""What a waiting stream sends, to clients as their users install them: they see no difference, and
events come while nothing is answered, before the first event, in the middle of an item and after
its worker has died.
"""

from __future__ import annotations

import asyncio
import json
import re
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from serve_app import timings
from serve_app.contract import CHATS, COMPLETIONS, MESSAGE, RESPONSES, State
from serve_app.ingress import exchange
from serve_app.ingress.protocol_events import sign_of_life
from serve_app.journal.entries import EntryId, RequestFacts, Summary, decode_facts
from tests.installed_clients import ENVIRONMENT, of_agent, of_node
from tests.journal.in_process import Door, door, door_of, ingress_process, settings_of
from tests.journal.journal_helpers import HEAD, OPENED, World, world
from tests.waiting import eventually

MODEL = "hermes-tiny"
TEXT = '{"city": "Bern"}'
HALVES = (TEXT[:9], TEXT[9:])
HELLO: Any = [{"role": "user", "content": "Hello"}]
SILENCE_S = 4
SIX_MINUTES_S = 360.0
USAGE = {
    "input_tokens": 1,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 1,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 2,
}


def numbered(first: int, events: list[dict[str, Any] | str]) -> bytes:
    """Events as a worker writes them."""
    made = []
    for number, event in enumerate(events, first):
        name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
        data = event if isinstance(event, str) else json.dumps(event)
        made.append(f"id: {number}\n{name}data: {data}\n\n")
    return "".join(made).encode()


def chat(request_id: str) -> tuple[list[Any], list[Any]]:
    """A call of a tool, cut in the middle of its arguments."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        named = {"id": f"chatcmpl-{request_id}", "object": "chat.completion.chunk", "created": 1}
        return {**named, "model": MODEL, "choices": [choice]}

    def call(**fields: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, **fields}]}

    begun = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": HALVES[0]}}
    first = [chunk({"role": "assistant", "content": ""}), chunk(call(**begun))]
    rest = [chunk(call(function={"arguments": HALVES[1]})), chunk({}, "tool_calls"), "[DONE]"]
    return first, rest


def completion(request_id: str) -> tuple[list[Any], list[Any]]:
    def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        named = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": 1}
        return {**named, "model": MODEL, "choices": [choice]}

    return [chunk(HALVES[0])], [chunk(HALVES[1], "stop"), "[DONE]"]


def response(request_id: str) -> tuple[list[Any], list[Any]]:
    """A call of a function, cut in the middle of its arguments."""
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": ""}
    at: dict[str, Any] = {"output_index": 0, "item_id": "fc_1"}
    arguments = "response.function_call_arguments"
    events = [
        {"type": f"{arguments}.delta", "delta": HALVES[0], **at},
        {"type": f"{arguments}.delta", "delta": HALVES[1], **at},
        {"type": f"{arguments}.done", "arguments": TEXT, "name": "f", **at},
    ]
    return of_response(request_id, call, {**call, "arguments": TEXT}, events)


def of_response(
    request_id: str, item: dict[str, Any], done: dict[str, Any], events: list[dict[str, Any]]
) -> tuple[list[Any], list[Any]]:
    """The events of a response with one item, cut before the last delta."""
    whole = {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": 1,
        "model": MODEL,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": [],
    }
    done = {**done, "status": "completed"}
    ended = {**whole, "status": "completed", "output": [done], "usage": USAGE}
    at = {"output_index": 0}
    all_events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**whole, "status": "in_progress"}},
        {"type": "response.output_item.added", "item": {**item, "status": "in_progress"}, **at},
        *events,
        {"type": "response.output_item.done", "item": done, **at},
        {"type": "response.completed", "response": ended},
    ]
    counted = [{**event, "sequence_number": number} for number, event in enumerate(all_events)]
    cut = max(n for n, event in enumerate(all_events) if event["type"].endswith(".delta"))
    return counted[:cut], counted[cut:]


def message(request_id: str) -> tuple[list[Any], list[Any]]:
    """A message of a response, cut in the middle of its text."""
    part = {"type": "output_text", "text": "", "annotations": []}
    done = {**part, "text": TEXT}
    said: dict[str, Any] = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}
    at: dict[str, Any] = {"output_index": 0, "item_id": "msg_1", "content_index": 0}
    text = {"logprobs": [], **at}
    events = [
        {"type": "response.content_part.added", "part": part, **at},
        {"type": "response.output_text.delta", "delta": HALVES[0], **text},
        {"type": "response.output_text.delta", "delta": HALVES[1], **text},
        {"type": "response.output_text.done", "text": TEXT, **text},
        {"type": "response.content_part.done", "part": done, **at},
    ]
    return of_response(request_id, said, {**said, "content": [done]}, events)


def anthropics_message(request_id: str) -> tuple[list[Any], list[Any]]:
    """A call, cut in the middle of its arguments."""
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    halves = [{"type": "input_json_delta", "partial_json": half} for half in HALVES]
    return of_message(request_id, call, halves, "tool_use")


def anthropics_text(request_id: str) -> tuple[list[Any], list[Any]]:
    halves = [{"type": "text_delta", "text": half} for half in HALVES]
    return of_message(request_id, {"type": "text", "text": ""}, halves, "end_turn")


def of_message(
    request_id: str, block: dict[str, Any], halves: list[dict[str, Any]], reason: str
) -> tuple[list[Any], list[Any]]:
    """The events of a message with one block, cut in its middle."""
    usage = {"input_tokens": 1, "output_tokens": 1}
    begun = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "content": []}
    whole = {**begun, "model": MODEL, "stop_reason": None, "stop_sequence": None, "usage": usage}
    deltas = [{"type": "content_block_delta", "index": 0, "delta": half} for half in halves]
    ended = {"stop_reason": reason, "stop_sequence": None}
    first = [
        {"type": "message_start", "message": whole},
        {"type": "content_block_start", "index": 0, "content_block": block},
        deltas[0],
    ]
    rest = [
        deltas[1],
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ended, "usage": usage},
        {"type": "message_stop"},
    ]
    return first, rest


Script = Callable[[str], tuple[list[Any], list[Any]]]
"""The events of a request, and where they are cut."""
SCRIPTS: dict[str, Script] = {
    CHATS: chat,
    COMPLETIONS: completion,
    RESPONSES: response,
    MESSAGE: anthropics_message,
}


class Sent:
    """The signs of life that an ingress sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.beats: list[bytes] = []
        monkeypatch.setattr(exchange, "sign_of_life", self._sign_of_life)

    def _sign_of_life(self, *about: Any) -> bytes:
        self.beats.append(sign_of_life(*about))
        return self.beats[-1]

    async def more(self, count: int) -> None:
        """Wait for further ones."""
        wanted = len(self.beats) + count
        await eventually(lambda: len(self.beats) >= wanted)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    monkeypatch.setattr(timings, "FOLLOWER_SILENCE_S", 0.05)
    return Sent(monkeypatch)


Ask = Callable[[str], Awaitable[str]]
"""Asks a service at this address."""


async def answered_slowly(
    d: Door,
    w: World,
    sent: Sent,
    script: Script,
    ask: Ask,
    beats: int = 2,
    queue_s: float = 0,
    prefill_s: float = 0,
) -> str:
    """What a client makes of a stream that waits again and again, over the death of its worker.

    Args:
        beats: how many signs of life it gets each time.
        queue_s: how long it waits for its first attempt; `prefill_s`: for the first output of that.

    Returns:
        The id of the request.
    """
    asked = asyncio.ensure_future(ask(f"http://127.0.0.1:{d.port}"))
    await eventually(lambda: d.ingress.followers.request_ids or asked.done())
    if asked.done():
        raise AssertionError(f"it was answered at once: {await asked}")
    (request_id,) = d.ingress.followers.request_ids
    first, rest = script(request_id)
    await sent.more(beats)
    await asyncio.sleep(queue_s)
    writer = await w.writer()
    attempt, entries = await writer.open(request_id, 1, b"one", OPENED)
    await sent.more(beats)
    await asyncio.sleep(prefill_s)
    attempt.append([], [numbered(1, first)], len(first), HEAD)
    await sent.more(beats)
    after, entries = await writer.open(request_id, 2, b"two", OPENED)
    after.continue_from(EntryId(1, 1), numbered(1, first), len(first), HEAD)
    await sent.more(beats)
    after.append([], [numbered(len(first) + 1, rest)], len(first) + len(rest))
    facts = decode_facts(entries[0], RequestFacts)
    after.stop(State.COMPLETED, None, Summary(facts, OPENED, 2, facts.admitted_ms), 1)
    assert json.loads(await asked) == json.loads(TEXT)
    await eventually(lambda: not d.ingress.followers.request_ids)
    return request_id


def waiting_door(w: World) -> AbstractAsyncContextManager[Door]:
    section = {"heartbeat_s": 0.01}
    return door(w.settings.redis.url, w.settings.namespace, ingress=section)


def of_openai(path: str) -> Ask:
    """OpenAI's SDK for Python and its stream helpers: arguments or text."""

    async def ask(url: str) -> str:
        async with openai.AsyncOpenAI(
            api_key="none", base_url=f"{url}/v1", max_retries=0
        ) as client:
            return await _helped(client, path)

    return ask


async def _helped(client: openai.AsyncOpenAI, path: str) -> str:
    if path == CHATS:
        async with client.chat.completions.stream(model=MODEL, messages=HELLO) as chunks:
            (made,) = (await chunks.get_final_completion()).choices
        assert made.message.tool_calls
        assert made.finish_reason == "tool_calls"
        return str(made.message.tool_calls[0].function.arguments)
    if path == RESPONSES:
        async with client.responses.stream(model=MODEL, input="Hello") as events:
            snapshots = [getattr(event, "snapshot", "") async for event in events]
            (item,) = (await events.get_final_response()).output
        assert [one for one in snapshots if one] == [HALVES[0], TEXT]
        assert item.type == "function_call"
        return item.arguments
    stream = await client.completions.create(model=MODEL, prompt="Hello", stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream])


def of_anthropic() -> Ask:
    async def ask(url: str) -> str:
        client = anthropic.AsyncAnthropic(api_key="none", base_url=url, max_retries=0)
        asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 64}
        async with client, client.messages.stream(**asked) as events:
            names = [event.type async for event in events]
            (block,) = (await events.get_final_message()).content
        assert "ping" not in names
        assert block.type == "tool_use"
        return json.dumps(block.input)

    return ask


async def test_the_sdks_helpers_do_not_see_that_a_stream_waits(w: World, sent: Sent) -> None:
    async with waiting_door(w) as d:
        for path, script in SCRIPTS.items():
            ask = of_anthropic() if path == MESSAGE else of_openai(path)
            request_id = await answered_slowly(d, w, sent, script, ask)
            replayed = await d.http.get(f"/v1/requests/{request_id}/events")
            first, rest = script(request_id)
            assert replayed.content == numbered(1, first + rest)


async def test_a_sign_of_life_has_no_number_and_moves_no_place(w: World, sent: Sent) -> None:
    bodies: dict[str, dict[str, Any]] = {
        CHATS: {"messages": HELLO},
        COMPLETIONS: {"prompt": "x"},
        RESPONSES: {"input": "x"},
        MESSAGE: {"messages": HELLO, "max_tokens": 64},
    }
    async with waiting_door(w) as d:
        for path, script in SCRIPTS.items():
            received: list[str] = []

            async def ask(url: str, path: str = path, received: list[str] = received) -> str:
                body = {"model": MODEL, "stream": True, **bodies[path]}
                async with d.http.stream("POST", url + path, json=body) as response:
                    received.extend([piece async for piece in response.aiter_text()])
                return TEXT

            sent.beats.clear()
            request_id = await answered_slowly(d, w, sent, script, ask)
            first, rest = script(request_id)
            text = "".join(received).encode()
            for beat in sent.beats:
                assert re.fullmatch(rb": waiting\n(event: [a-z.]+\n)?data: .+\n\n", beat)
                assert beat in text
                text = text.replace(beat, b"", 1)
            assert text == numbered(1, first + rest)
            events = [json.loads(beat.partition(b"data: ")[2]) for beat in sent.beats]
            if path == RESPONSES:
                places = [(event["type"], event["sequence_number"]) for event in events]
                last = ("keepalive", len(first) - 1)
                assert places[:2] == [("response.created", 0), ("keepalive", 0)]
                assert set(places[2:]) <= {("keepalive", 0), last}
                assert places[-1] == last


def of_command(command: Sequence[str], **variables: str) -> Ask:
    async def ask(url: str) -> str:
        words = [
            url if word == "URL" else f"{url}/v1" if word == "URL/v1" else word for word in command
        ]
        ran = await asyncio.create_subprocess_exec(
            *words, env={**ENVIRONMENT, **variables}, stdin=DEVNULL, stdout=PIPE
        )
        output, _ = await ran.communicate()
        assert ran.returncode == 0
        return output.decode()

    return ask


def of_codex(home: Path, *settings: str) -> Ask:
    """What Codex says.

    Args:
        settings: more of its provider, as TOML.
    """

    async def ask(url: str) -> str:
        command, environment = of_agent("Codex", url, MODEL, home)
        with (home / ".codex" / "config.toml").open("a") as provider:
            provider.writelines(f"{one}\n" for one in (*settings, "stream_max_retries = 0"))
        return await of_command(command, **environment)(url)

    return ask


def of_node_clients() -> list[tuple[Script, Ask]]:
    """Those for Node by each API, and what they are answered."""
    found = []
    for client in ("openai-node", "vercel-ai"):
        command = [*of_node(client, "waiting.js"), "URL/v1", MODEL]
        for api, path in (("chat", CHATS), ("responses", RESPONSES)):
            found.append((SCRIPTS[path], of_command([*command, api])))
    found.append((anthropics_message, of_command([*command, "messages"])))
    command = [*of_node("anthropic-node", "waiting.js"), "URL", MODEL]
    return [*found, (anthropics_message, of_command(command))]


def of_claude_code(home: Path) -> Ask:
    async def ask(url: str) -> str:
        command, environment = of_agent("Claude Code", url, MODEL, home)
        return await of_command(command, **environment)(url)

    return ask


@pytest.mark.nightly  # it concerns the clients
@pytest.mark.timeout(900)
async def test_other_clients_do_not_see_it_either(w: World, sent: Sent) -> None:
    async with waiting_door(w) as d:
        for script, ask in of_node_clients():
            await answered_slowly(d, w, sent, script, ask)


@pytest.mark.nightly  # it concerns the client
@pytest.mark.timeout(900)
async def test_claude_code_does_not_see_it_either(w: World, sent: Sent, tmp_path: Path) -> None:
    async with waiting_door(w) as d:
        await answered_slowly(d, w, sent, anthropics_text, of_claude_code(tmp_path))


@pytest.mark.nightly  # it concerns the client
@pytest.mark.timeout(900)
async def test_codex_waits_for_longer_than_the_silence_that_it_bears(
    w: World, sent: Sent, tmp_path: Path
) -> None:
    async with waiting_door(w) as d:
        beats = round(1.5 * SILENCE_S / timings.FOLLOWER_SILENCE_S)
        ask = of_codex(tmp_path, f"stream_idle_timeout_ms = {SILENCE_S * 1000}")
        await answered_slowly(d, w, sent, message, ask, beats)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_clients_with_their_usual_patience_wait_for_six_minutes(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each in a queue and in a prefill, all at once, at ingresses of their own with the usual
    pauses between signs of life.
    """
    sent = Sent(monkeypatch)

    async def waits(w: World, name: str, client: tuple[Script, Ask], **where: float) -> None:
        (script, ask), settings = client, settings_of(redis_url, namespace)
        async with ingress_process(settings, name=name) as ingress, door_of(ingress) as d:
            await answered_slowly(d, w, sent, script, ask, beats=1, **where)

    async with world(redis_url, namespace, within_s=840) as w, asyncio.TaskGroup() as group:
        for where in ("queue_s", "prefill_s"):
            clients: list[tuple[Script, Ask]] = [
                *of_node_clients(),
                (message, of_codex(tmp_path / where)),
                (anthropics_text, of_claude_code(tmp_path / f"claude-{where}")),
                (anthropics_message, of_anthropic()),
                *((SCRIPTS[path], of_openai(path)) for path in (CHATS, RESPONSES)),
            ]
            for number, client in enumerate(clients):
                name = f"ingress-{where}-{number}"
                group.create_task(waits(w, name, client, **{where: SIX_MINUTES_S}))
