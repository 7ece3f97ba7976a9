"""No value of any field that vLLM knows ends the engine, or keeps its other requests waiting.

Every field of vLLM's own request models, at the edges of every kind of JSON value: what the ingress
does not refuse is sent to the real engine through vLLM's real server, alone and then a few fields
together. After each field the engine must still answer a plain request as it did before.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from serve_app.errors import RequestRefused
from serve_app.foundation import freeze_heap
from serve_app.ingress.validation.bodies import parse
from serve_app.settings.limits import RequestLimits
from tests.engine.resume_helpers import AT_ONCE, EngineThread, attempt, request
from tests.running_time import RunningTime
from workers.loop_watch import LoopWatch

pytestmark = [pytest.mark.clock, pytest.mark.timeout(900)]

MODEL = "hermes-tiny"
LIMITS = RequestLimits()
WITHIN_S = 120.0
HELD_S = 1.0
GROWTH_BYTES = 2 << 30
TOGETHER = 300

PATHS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    ),
    "/v1/completions": (CompletionRequest, {"prompt": "Hello", "max_tokens": 4}),
    "/v1/responses": (ResponsesRequest, {"input": "Hello", "max_output_tokens": 4}),
}

SCALARS: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 255, 4096, 2**31 - 1, 2**31, 2**63 - 1, -(2**63)),
    *(0.0, -0.5, 1.5, 1e-300, 1e308, -1e308),
    *("", "a", "\0", "😀" * 50, "x" * 70_000, "none", "auto", "required", "function", "min"),
]
COLLECTIONS: list[Any] = [
    *([], [0], [-1], [2**31 - 1], list(range(64)), [""], ["a"] * 16, ["\0"], [[]], [{}], [None]),
    *(
        {},
        {"a": 1},
        {"0": 100},
        {"-1": 1},
        {"999999999": 1.0},
        {"a": {"b": []}},
        {"type": "function"},
    ),
]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CONSTRAINTS: list[Any] = [
    {"json": SCHEMA},
    {"json": {"type": "array", "items": SCHEMA, "minItems": LIMITS.max_repeats}},
    {"json": {"$ref": "#"}},
    {"json": {"enum": []}},
    {"json": "{"},
    {"regex": "(a|b)*c{1,9}"},
    {"regex": "a{10000}" * 8},
    {"regex": "("},
    {"grammar": 'root ::= "a" root | "b"'},
    {"grammar": "root ::= root"},
    {"grammar": "root ::="},
    {"choice": ["a"]},
    {"choice": [""]},
    {"choice": []},
    {"json_object": True},
    {"structural_tag": "{}"},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": SCHEMA},
}
OF_A_FIELD: dict[str, list[Any]] = {
    "structured_outputs": CONSTRAINTS,
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}},
        {"type": "structural_tag", "structures": [], "triggers": []},
    ],
    "text": [
        {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        {"verbosity": "x"},
    ],
    "tools": [[TOOL], [TOOL] * 3, [{**TOOL, "name": "f", "parameters": SCHEMA}]],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "repetition_detection": [
        {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2},
        {"max_pattern_size": 2**31 - 1, "min_pattern_size": 0, "min_count": 0},
    ],
    "chat_template_kwargs": [{"enable_thinking": True}, {"tools": []}, {"messages": []}],
    "documents": [[{"title": "a", "text": "b"}]],
    "reasoning": [{"effort": "high"}, {"effort": "minimal", "summary": "auto"}],
    "messages": [
        [{"role": role, "content": content}]
        for role in ("system", "assistant", "tool", "developer", "")
        for content in ("", "a", None, [], [{"type": "text", "text": "a"}], [{"type": "image_url"}])
    ],
    "prompt": [[[1]], [[]], [1, 2, 3], ["a", "b"], [50_000_000]],
    "input": [
        [{"role": "user", "content": "a"}],
        [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "c"}],
        [{"type": "function_call_output", "call_id": "c", "output": ""}],
        [{"type": "reasoning", "id": "r", "summary": []}],
    ],
}

Sent = tuple[str, dict[str, Any]]


def values_of(field: str) -> list[Any]:
    return [*SCALARS, *COLLECTIONS, *OF_A_FIELD.get(field, ())]


def bodies(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, **PATHS[path][1], **fields}


def each_alone(path: str, field: str) -> list[Sent]:
    """One field at a time with each of its values, every second time as a stream."""
    bases = itertools.cycle([{}, {"stream": True}])
    return [
        (path, bodies(path, {**base, field: value}))
        for base, value in zip(bases, values_of(field), strict=False)
    ]


def a_few_together() -> list[Sent]:
    """Combinations of fields, always the same ones, so that a failure can be reproduced."""
    chance = random.Random(5)
    sent = []
    for _ in range(TOGETHER):
        path = chance.choice(sorted(PATHS))
        fields = chance.sample(sorted(PATHS[path][0].model_fields), chance.randint(2, 5))
        sent.append((path, bodies(path, {name: chance.choice(values_of(name)) for name in fields})))
    return sent


def passes_the_door(path: str, body: dict[str, Any]) -> bool:
    try:
        parse(path, json.dumps(body).encode(), MODEL, LIMITS)
    except RequestRefused:
        return False
    return True


class WatchedEngine(EngineThread):
    """The engine, and a watch on who holds its event loop."""

    def __init__(self) -> None:
        super().__init__(max_model_len=128)
        self.watch = LoopWatch(HELD_S)
        self.run(self._begin_to_watch())
        self.numbers = itertools.count()
        self.usual = self.plain()

    async def _begin_to_watch(self) -> None:
        freeze_heap()  # as in a worker: the tests before this one have left many objects
        self.watch.start()

    def close(self) -> None:
        self.watch.stop()
        super().close()

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of vLLM's answer."""
        request_id = f"req_{next(self.numbers)}"
        with self.watch.watched(request_id) as held:
            async with asyncio.timeout(WITHIN_S):
                written = await attempt(self, [request(path, body)], request_id)
            assert not held.done(), f"held the loop for {held.result():.1f} s"
        assert written.attempt.head is not None
        return written.attempt.head.status, written.body

    async def answers(self, sent: list[Sent]) -> list[str]:
        """Everything that went wrong, one line each."""
        few = asyncio.Semaphore(AT_ONCE)

        async def one(path: str, body: dict[str, Any]) -> str:
            async with few:
                shown = f"{path} {json.dumps(body)[:300]}"
                try:
                    status, said = await self.answer(path, body)
                except (Exception, TimeoutError) as error:
                    return f"{shown}: {error!r}"
                return "" if status < 500 else f"{shown}: {status} {said[:200]!r}"

        found = await asyncio.gather(*(one(path, body) for path, body in sent))
        return [line for line in found if line]

    def plain(self) -> str:
        """The answer to a plain request."""
        path = "/v1/completions"
        body = bodies(path, {"temperature": 0, "max_tokens": 8})
        status, said = self.run(self.answer(path, body))
        assert status == 200
        text: str = json.loads(said)["choices"][0]["text"]
        return text

    def bytes_of_all(self) -> int:
        """Resident memory of this process and the engine's."""
        here = psutil.Process()
        return sum(
            one.memory_info().rss
            for one in [here, *here.children(recursive=True)]
            if one.is_running()
        )


@pytest.fixture(scope="module")
def world() -> Iterator[WatchedEngine]:
    made = WatchedEngine()
    yield made
    made.close()


def check(world: WatchedEngine, sent: list[Sent]) -> None:
    took_bytes = world.bytes_of_all()
    wrong = world.run(
        world.answers([one for one in sent if passes_the_door(*one)]),
        timeout_s=len(sent) * WITHIN_S,
    )
    assert world.plain() == world.usual
    assert world.bytes_of_all() - took_bytes < GROWTH_BYTES
    assert not wrong, "\n".join(wrong)


def fields_of(path: str) -> list[str]:
    """The fields of a path's requests that no earlier path has."""
    before = itertools.takewhile(lambda other: other != path, PATHS)
    known = {field for other in before for field in PATHS[other][0].model_fields}
    return sorted(PATHS[path][0].model_fields.keys() - known)


def test_the_first_request_for_logprobs_waits_for_no_compiler(world: WatchedEngine) -> None:
    """It must stay the first one of this engine. Compiling takes the engine at least two seconds,
    and it stands still meanwhile.
    """
    body = bodies("/v1/completions", {"logprobs": 1, "n": 2})
    took_s = []
    for _ in range(2):
        with RunningTime() as running:
            status, _said = world.run(world.answer("/v1/completions", body))
            took_s.append(running.now_s())
        assert status == 200
    assert took_s[0] < took_s[1] + 1.0, took_s


@pytest.mark.parametrize("path", PATHS)
def test_no_value_of_a_field_alone(world: WatchedEngine, path: str) -> None:
    for field in fields_of(path):
        check(world, each_alone(path, field))


def test_nor_a_few_fields_together(world: WatchedEngine) -> None:
    check(world, a_few_together())
