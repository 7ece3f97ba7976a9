"""Streamed equals unstreamed: the same status while nothing was sent, the same state, reason and
words, and the same answer, for generated requests through an ingress, its journal, a worker and the
real engine.

Every error is one that OpenAI's clients understand, and no request is answered with a 5xx.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import CompletionOutput
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers import get_tokenizer

from serve_app.contract import Reason
from serve_app.local.environment import ROOT
from tests.engine.answers import choices, unlike_its_text
from tests.engine.both_ways import CHAT, COMPLETIONS, RESPONSES, USER, generated
from tests.engine.contents import alike
from tests.engine.prompts import TOOLS
from tests.engine.resume_helpers import EngineThread
from tests.journal.in_process import in_process, settings_of
from tests.tables import Failures, each
from workers.answers import Pieced, install

EACH_PATH, AT_ONCE = 80, 8
PYTHON = re.compile(
    r"\bNone\b|\bTrue\b|NoneType|Traceback|pydantic|object has no|\{'|validation err"
)
ROOTS = {"messages", "prompt", "input", "model"}


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
        self.said: Any = None
        """What is in the answer, whichever way."""
        if self.status >= 400:
            self.error = answer.json()["error"]
        elif self.ended[0] != "completed":
            last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
            found = json.loads(last.removeprefix("data: "))
            self.error = found.get("error", found)
        else:
            self.said = choices(answer.request.url.path, answer.content)

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


def check_said(plain: Answer, streamed: Answer, path: str, body: dict[str, Any]) -> None:
    """The same answer, without the markup of a call that was cut; log probabilities are those of
    the tokens in its text.
    """
    if body["temperature"] == 0:
        assert alike(streamed.said, plain.said), (streamed.said, plain.said)
    if not (body.get("echo") and path == CHAT):
        for answer in (plain, streamed):
            assert not unlike_its_text(path, answer.said or [])
    if body.get("tools") and body.get("tool_choice") != "none":
        assert "<tool" not in str(plain.said)


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
    settings = settings_of(redis_url, namespace, workers={"engine_stall_timeout_s": 600.0})
    few, found = asyncio.Semaphore(AT_ONCE), []
    async with in_process(settings, Started(world.engine)) as door:

        async def one(path: str, body: dict[str, Any]) -> Answer:
            async with few:
                return await ask(door.http, path, body)

        asked = list(generated(EACH_PATH))
        for stream in (False, True):
            asking = (one(path, {**body, "stream": stream}) for path, body in asked)
            found.append(await asyncio.gather(*asking))
    with Failures() as failures:
        for (path, body), plain, streamed in zip(asked, *found, strict=True):
            with failures.of(path, {k: str(v)[:99] for k, v in body.items()}):
                check_error(plain, path, body)
                check_error(streamed, path, body)
                assert streamed.told == plain.told
                check_said(plain, streamed, path, body)
                assert streamed.status in (plain.status, 200)
                assert streamed.status == plain.status or "data: " in streamed.text
    for path in (CHAT, COMPLETIONS, RESPONSES):
        of_path = [a.status for (p, _), a in zip(asked, found[0], strict=True) if p == path]
        assert min(of_path.count(200), of_path.count(400)) >= EACH_PATH // 5


@pytest.mark.timeout(600)
def test_streamed_equals_unstreamed(world: EngineThread, redis_url: str, namespace: str) -> None:
    world.run(both_ways(world, redis_url, namespace), timeout_s=500)


@each("outputs", [1, 2, 255, 256, 257, 5_000])
def test_a_long_answer_is_parsed_in_few_pieces(outputs: int) -> None:
    """Each takes as long as all before it."""
    sizes = array("I", [size for n in range(outputs) for size in (n % 4, n % 3)])
    text, tokens = "abcd" * sum(sizes[::2]), list(range(sum(sizes[1::2])))
    text = text[: sum(sizes[::2])]
    answer = CompletionOutput(0, text, tokens, None, None, finish_reason="length")
    pieces = list(Pieced(answer, sizes, []).pieces())
    assert "".join(part for part, _, _ in pieces) == text
    assert [token for _, some, _ in pieces for token in some] == tokens
    assert len(pieces) == min(outputs, len(pieces)) <= 256
    assert [last for _, _, last in pieces] == [False] * (len(pieces) - 1) + [True]


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def test_a_cut_call_has_what_was_written_of_it_however_its_stream_was_merged() -> None:
    """An engine merges what waits: how many tokens come with the last one depends on the load."""
    models = SimpleNamespace(model_name=str)
    install(SimpleNamespace(state=SimpleNamespace(openai_serving_models=models)))
    asked = ChatCompletionRequest(messages=[USER], tools=TOOLS, tool_choice="auto")
    parser = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)
    assert parser is not None

    tokenizer = get_tokenizer(str(ROOT / "workers" / "tiny_model"))

    def arguments(first: str, last: str) -> str:
        one, found = parser(tokenizer, asked.tools), ""
        pieces = [*first, last]
        for number, piece in enumerate(pieces, 1):
            finished = number == len(pieces)
            delta = one.parse_delta(piece, [7], asked, [1], finished=finished)
            calls = delta.tool_calls if delta is not None else ()
            found += "".join(call.function.arguments or "" for call in calls)
        return found

    written = CALL.index("{", 20)
    with Failures() as failures:
        for cut in range(1, written + 8):
            for merged in (1, 2, 8, 30):
                whole = CALL[:cut]
                with failures.of(whole, merged):
                    assert arguments(whole[:-merged], whole[-merged:]) == whole[written:]
