"""Each parameter of vLLM's requests, greedy, with a seed and sampled: what an answer that has begun
with it becomes when its engine dies. The table in docs/evidence/continuing.md is what this test has
seen.

A page with another table is left in `.hermes/continuing.md`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from serve_app.contract import MESSAGE
from tests.engine import parameters
from tests.engine.contents import alike, each_choice
from tests.engine.resume_helpers import EngineThread, Written, attempts, request
from tests.engine.test_resume import outputs
from tests.tables import Failures

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence" / "continuing.md"
BEGIN, END = "<!-- made by tests/engine/test_parameters.py -->\n", "<!-- end -->\n"
KINDS: dict[str, tuple[str, Any, dict[str, dict[str, Any]], dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        ChatCompletionRequest,
        parameters.CHAT,
        {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 24},
    ),
    "completions": (
        "/v1/completions",
        CompletionRequest,
        parameters.COMPLETIONS,
        {"prompt": "The keeper of the", "max_tokens": 24},
    ),
    "responses": (
        "/v1/responses",
        ResponsesRequest,
        parameters.RESPONSES,
        {"input": "Count to ten.", "max_output_tokens": 24},
    ),
    "messages": (
        MESSAGE,
        AnthropicMessagesRequest,
        parameters.MESSAGES,
        {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 24},
    ),
}
WAYS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 1.0}}
EVERY = 12
"""Cuts: behind every twelfth entry."""


def test_no_parameter_is_forgotten() -> None:
    for kind, (_, vllms, tried, _) in KINDS.items():
        known = tried.keys() | parameters.UNTRIED.keys()
        assert not vllms.model_fields.keys() - known, kind
        assert not tried.keys() - vllms.model_fields.keys(), kind


@pytest.mark.parametrize("cuts", [1, pytest.param(0, marks=pytest.mark.nightly)])
@pytest.mark.timeout(900)
def test_an_answer_with_any_parameter_goes_on_as_the_documents_say(
    world: EngineThread, cuts: int
) -> None:
    rows: dict[str, dict[str, str]] = {}
    with Failures() as failures:
        for kind, (path, _, tried, usual) in KINDS.items():
            for way, drawn in WAYS.items():
                bodies = {
                    name: {"model": "hermes-tiny", "stream": True, **usual, **drawn, **value}
                    for name, value in tried.items()
                }
                seen = world.run(_tried(world, path, bodies, cuts, failures), 400)
                for name, word in seen.items():
                    rows.setdefault(name, {})[f"{kind}, {way}"] = word
    _compare(_table(rows))


async def _tried(
    world: EngineThread,
    path: str,
    bodies: dict[str, dict[str, Any]],
    cuts: int,
    failures: Failures,
) -> dict[str, str]:
    """What becomes of each request at its last cuts (0: all), by parameter."""
    answers = await attempts(world, [[request(path, body)] for body in bodies.values()])
    whole = dict(zip(bodies, answers, strict=True))

    async def one(name: str) -> str:
        head = whole[name].attempt.head
        assert head is not None
        if head.status != 200:
            assert b"greedy" in whole[name].body, whole[name].body
            return "refused by vLLM"
        entries = whole[name].entries
        begun = next(n for n, entry in enumerate(entries, 1) if entry.outputs is not None)
        left = [entries[:cut] for cut in range(begun, len(entries), EVERY)][-cuts:]
        resumed = await attempts(world, left)
        return _word(bodies[name], whole[name], left, resumed)

    words: dict[str, str] = {}
    found = await asyncio.gather(*map(one, bodies), return_exceptions=True)
    for name, word in zip(bodies, found, strict=True):
        with failures.of(path, name, bodies[name]):
            if isinstance(word, BaseException):
                raise word
            words[name] = word
    return words


def _word(body: dict[str, Any], whole: Written, left: list[Any], resumed: list[Written]) -> str:
    """What became of a request at its last cut; at every cut nothing that was sent may change."""
    for journal, one in zip(left, resumed, strict=True):
        sent = b"".join(entry.body for entry in journal[1:])
        assert one.body.startswith(sent), "a byte was sent twice, or changed"
        if not one.attempt.lost and (body["temperature"] == 0 or "seed" in body):
            assert alike(each_choice(one.body), each_choice(whole.body))
    if resumed[-1].attempt.lost:
        return "lost"
    if "seed" in body and body["temperature"]:  # drawn, so it may end before its limit
        missing = sum(outputs(entry) for entry in whole.entries[len(left[-1]) :])
        return "run again" if resumed[-1].generated_tokens > missing + 1 else "continued"
    known = sum(outputs(entry) for entry in left[-1])
    # An engine that goes on cannot generate more, even if it runs ahead of a stop string.
    possible = _most_tokens(body) - known
    return "run again" if resumed[-1].generated_tokens > possible else "continued"


def _most_tokens(body: dict[str, Any]) -> int:
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    prompts = body.get("prompt")
    answers = len(prompts) if isinstance(prompts, list) else 1
    most: int = min(body[name] for name in limits if name in body) * body.get("n", 1) * answers
    return most


def _table(rows: dict[str, dict[str, str]]) -> str:
    columns = [f"{kind}, {way}" for kind in KINDS for way in WAYS]
    lines = [
        f"| parameter | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(
            f"| `{name}` | {' | '.join(rows[name].get(column, '') for column in columns)} |"
            for name in sorted(rows)
        ),
        "",
        "| not in the table | why |",
        "|---|---|",
        *(f"| `{name}` | {why} |" for name, why in sorted(parameters.UNTRIED.items())),
    ]
    return "\n".join(lines) + "\n"


def _compare(table: str) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    if written != table:
        seen = ROOT / ".hermes" / PAGE.name
        seen.parent.mkdir(exist_ok=True)
        seen.write_text(before + BEGIN + table + END + after)
        pytest.fail(f"the table differs from what was seen: compare {PAGE} with {seen}")
