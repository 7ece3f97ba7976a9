"""A response that is cut at any position and continued by another attempt equals the uninterrupted
one.

The engine, vLLM's own serving layer and the journal entries are real; only Redis is missing.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("vllm")

from serve_app.contract import Because
from serve_app.journal.entries import Entry
from tests.engine.contents import alike, content, each_choice, events, same
from tests.engine.prompts import TOOLS
from tests.engine.resume_helpers import EngineThread, Written, attempt, attempts, request
from workers.engine_plugin import PRIOR

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "hermes-tiny",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 40,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


PERSON = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": False,
        },
    },
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain text": (CHAT, chat("Tell me a story about a lighthouse.")),
    "max_tokens": (CHAT, chat("Hello", max_tokens=7, ignore_eos=True)),
    "multi-byte text": (CHAT, chat("Say hello in three languages.", logit_bias={}, max_tokens=48)),
    # A byte-level tokenizer, pushed towards the bytes of é, € and a lonely first byte.
    "broken bytes": (
        COMPLETIONS,
        {
            "model": "hermes-tiny",
            "prompt": "é€é€",
            "max_tokens": 24,
            "temperature": 0,
            "stream": True,
            "allowed_token_ids": [],
            "ignore_eos": True,
        },
    ),
    "a stop string": (CHAT, chat("Count to ten.", stop=["four"], max_tokens=60)),
    "a long stop string that never comes": (
        CHAT,
        chat("Count to ten.", stop=["seven eleven nine"], max_tokens=40),
    ),
    "a stop string that is kept": (
        CHAT,
        chat("Count to ten.", stop=["four"], include_stop_str_in_output=True),
    ),
    "min_tokens": (CHAT, chat("Hello", min_tokens=30, stop=["e"], max_tokens=34)),
    "a tool call": (CHAT, chat("What is the weather in Paris?", tools=TOOLS, max_tokens=120)),
    "whole, not streamed": (
        CHAT,
        {**chat("Count to ten."), "stream": False, "stream_options": None},
    ),
    "logprobs of a prompt": (
        COMPLETIONS,
        {
            "model": "hermes-tiny",
            "prompt": "The keeper é",
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 1,
            "prompt_logprobs": 1,
        },
    ),
    "a completion": (
        COMPLETIONS,
        {
            "model": "hermes-tiny",
            "prompt": "The keeper of the",
            "max_tokens": 30,
            "temperature": 0,
            "stream": True,
        },
    ),
    "a completion with its echo": (
        COMPLETIONS,
        {
            "model": "hermes-tiny",
            "prompt": "The keeper",
            "max_tokens": 12,
            "temperature": 0,
            "stream": True,
            "echo": True,
        },
    ),
    "frequency_penalty": (CHAT, chat("Count to ten.", frequency_penalty=0.3)),
    "presence_penalty": (CHAT, chat("Count to ten.", presence_penalty=0.6)),
    "repetition_penalty": (CHAT, chat("Count to ten.", repetition_penalty=1.3)),
    "all penalties": (
        CHAT,
        chat(
            "Tell me a story.", frequency_penalty=0.3, presence_penalty=0.6, repetition_penalty=1.1
        ),
    ),
    "bad_words": (CHAT, chat("Count to ten.", bad_words=["three", " five", "the"])),
    "JSON mode": (CHAT, chat("Answer.", response_format={"type": "json_object"})),
    "a JSON schema": (CHAT, chat("Answer.", response_format=PERSON, max_tokens=60)),
    "a choice": (CHAT, chat("Choose.", structured_outputs={"choice": ["a quite long answer"]})),
    "a regex": (CHAT, chat("Choose.", structured_outputs={"regex": "[a-f]{5}-[0-9]{30}"})),
    "a forced tool": (CHAT, chat("Hello", tools=TOOLS, tool_choice="required", max_tokens=60)),
    "a named tool": (
        CHAT,
        chat(
            "Hello",
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "search"}},
            max_tokens=60,
        ),
    ),
    "logprobs": (CHAT, chat("Say é and €.", logprobs=True, top_logprobs=3, max_tokens=24)),
    "logprobs of a completion": (
        COMPLETIONS,
        {
            "model": "hermes-tiny",
            "prompt": "The keeper é",
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "logprobs": 2,
            "echo": True,
        },
    ),
    "a seed": (CHAT, chat("Tell me a story.", seed=7, temperature=1.0)),
    "a seed and n": (CHAT, chat("Tell me a story.", seed=7, temperature=1.0, n=3, max_tokens=12)),
    "a seed with logprobs": (CHAT, chat("Hello", seed=7, temperature=1.0, logprobs=True)),
    "several prompts": (
        COMPLETIONS,
        {
            "model": "hermes-tiny",
            "prompt": ["The keeper", "Count", "A river is"],
            "max_tokens": 10,
            "temperature": 0,
            "stream": True,
        },
    ),
    "responses": (
        RESPONSES,
        {
            "model": "hermes-tiny",
            "input": "Why is the sky blue?",
            "max_output_tokens": 40,
            "temperature": 0,
            "stream": True,
        },
    ),
    "responses, not streamed": (
        RESPONSES,
        {
            "model": "hermes-tiny",
            "input": "Count to ten.",
            "max_output_tokens": 20,
            "temperature": 0,
        },
    ),
}


def unbroken(world: EngineThread, path: str, body: dict[str, Any]) -> Written:
    return world.run(attempt(world, [request(path, body)]))


def outputs(entry: Entry) -> int:
    """Number of tokens in an entry."""
    return sum(len(output[2]) for output in json.loads(entry.fields.get(b"o", b"[]")))


def token_ids(written: Written) -> list[int]:
    """All tokens of a response's only generation."""
    return [
        token_id
        for entry in written.entries
        for output in json.loads(entry.fields.get(b"o", b"[]"))
        for token_id in output[2]
    ]


def parting(whole: Written, resumed: Written) -> str:
    """Where the tokens of two responses begin to differ: at the cut or after it."""
    ours, theirs = token_ids(whole), token_ids(resumed)
    at = next(
        (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    cut = sum(outputs(entry) for entry in resumed.entries if entry.id.epoch == 1)
    return f"the tokens part at {at} of {len(ours)} and {len(theirs)}, the cut is at {cut}"


def check_every_cut(world: EngineThread, path: str, body: dict[str, Any], last: int = 0) -> Written:
    """`last`: how many cuts from the end; by default all. Returns the unbroken response."""
    whole = unbroken(world, path, body)
    tokens = sum(outputs(entry) for entry in whole.entries)
    assert whole.recorder.head is not None
    assert whole.recorder.head.status == 200, whole.body
    # A stop string is found behind the engine, which goes on meanwhile.
    ahead = 8 if body.get("stop") else 1
    # Behind the opening, behind each output, before the seal.
    cuts = [whole.entries[:cut] for cut in range(2, len(whole.entries))]
    assert len(cuts) > 4
    cuts = cuts[-last:]
    for left, resumed in zip(cuts, world.run(attempts(world, cuts), 240), strict=True):
        where = f"cut behind entry {len(left)} of {len(whole.entries)}"
        assert not resumed.recorder.lost, where
        journalled = b"".join(entry.body for entry in left[1:])
        assert resumed.body.startswith(journalled), where
        assert alike(each_choice(resumed.body), each_choice(whole.body)), (
            f"{where}: {parting(whole, resumed)}"
        )
        # What was drawn with a seed is drawn again.
        missing = tokens - (0 if "seed" in body else sum(outputs(entry) for entry in left))
        assert resumed.generated_tokens <= missing + ahead, f"{where}: a re-run, not a resume"
    return whole


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(900)
def test_cut_behind_any_output_the_continuation_is_the_unbroken_response(
    world: EngineThread, name: str
) -> None:
    path, body = CASES[name]
    if body.get("allowed_token_ids") == []:
        tokenizer = world.engine._engine.renderer.tokenizer
        body = {
            **body,
            "allowed_token_ids": sorted({i for i in tokenizer.encode("é€ñ ü") if i > 2}),
        }
    whole = check_every_cut(world, path, body)
    if name == "a tool call":
        assert b"get_weather" in whole.body
        assert b"tool_calls" in whole.body
    if name.startswith("a stop string"):
        assert b'"finish_reason":"stop"' in whole.body


def test_cut_shortly_before_its_own_end_the_answer_ends_in_the_same_way(
    world: EngineThread,
) -> None:
    whole = check_every_cut(world, CHAT, chat("Hello", max_tokens=1_900), last=6)
    assert b'"finish_reason":"stop"' in whole.body, whole.body[-600:]


def test_cut_shortly_before_a_stop_token_its_text_is_not_shown(world: EngineThread) -> None:
    """A token of the vocabulary, whose text would be shown anywhere else."""
    plain = token_ids(unbroken(world, CHAT, chat("Hello", max_tokens=60, ignore_eos=True)))
    stop = next(one for at, one in enumerate(plain) if at >= 10 and one not in plain[:at])
    body = chat("Hello", max_tokens=60, stop_token_ids=[stop])
    whole = check_every_cut(world, CHAT, body, last=6)
    assert token_ids(whole)[-1] == stop
    assert b'"finish_reason":"stop"' in whole.body


@pytest.mark.nightly  # hundreds of cuts; a tool call's parser goes on in the same way
def test_cut_inside_of_a_thought_and_behind_it_the_parser_goes_on(world: EngineThread) -> None:
    thinking = EngineThread(core=world, reasoning_parser="deepseek_r1")
    body = chat("What is a river?", max_tokens=160)
    body["messages"].insert(
        0, {"role": "system", "content": "Think step by step before you answer."}
    )
    whole = check_every_cut(thinking, CHAT, body)
    assert b'"reasoning"' in whole.body
    assert b'"content":"' in whole.body
    whole = check_every_cut(
        thinking,
        RESPONSES,
        {
            "model": "hermes-tiny",
            "instructions": "Think step by step before you answer.",
            "input": "What is a river?",
            "max_output_tokens": 160,
            "temperature": 0,
            "stream": True,
        },
    )
    assert b"response.reasoning_text.delta" in whole.body
    assert b"response.output_text.delta" in whole.body


@pytest.mark.nightly  # an engine of its own
def test_a_schema_begins_behind_the_thought_also_on_another_engine() -> None:
    thinking = EngineThread(reasoning_parser="deepseek_r1")
    try:
        body = chat("What is a river?", response_format=PERSON, max_tokens=300)
        body["logit_bias"] = {"9": -99, "10": -99}
        system = {"role": "system", "content": "Think step by step before you answer."}
        body["messages"].insert(0, system)
        whole = check_every_cut(thinking, CHAT, body)
        assert b'"reasoning"' in whole.body
        assert b'"content":"' in whole.body
        budget = {**body, "thinking_token_budget": 12, "response_format": None}
        whole = unbroken(thinking, CHAT, budget)
        left = whole.entries[:10]
        resumed = thinking.run(attempt(thinking, left))
        assert each_choice(resumed.body) == each_choice(whole.body)
        assert resumed.generated_tokens >= len(token_ids(whole)), "it is run again"
        left[0] = request(CHAT, {**budget, "temperature": 1.0})
        lost = thinking.run(attempt(thinking, left)).recorder.lost
        assert lost is not None
        assert lost.because is Because.PARAMETER
    finally:
        thinking.close()


SEEDED = chat(
    "Tell me a story.", max_tokens=12, ignore_eos=True, seed=7, temperature=2.0, top_p=1.0, top_k=-1
)


def test_a_generation_is_not_repeated_beyond_its_bound(world: EngineThread) -> None:
    impatient = EngineThread(core=world, rerun_tokens=2)
    whole = unbroken(impatient, CHAT, SEEDED)
    assert not impatient.run(attempt(impatient, whole.entries[:4])).recorder.lost
    left = whole.entries[:6]
    resumed = impatient.run(attempt(impatient, left))
    assert resumed.recorder.lost is not None
    assert resumed.recorder.lost.because is Because.TOO_LONG
    assert resumed.body == b"".join(entry.body for entry in left[1:]), "not a byte more"
    # The bound is that of the request, however many prompts it has.
    several = {"model": "hermes-tiny", "prompt": ["One", "Two"], "max_tokens": 8, "stream": True}
    whole = unbroken(impatient, COMPLETIONS, {**several, "seed": 7, "temperature": 1.0})
    each_two = next(
        n for n in range(len(whole.entries)) if sum(map(outputs, whole.entries[:n])) > 3
    )
    two_each = impatient.run(attempt(impatient, whole.entries[:each_two])).recorder.lost
    assert two_each is not None
    assert two_each.because is Because.TOO_LONG


def test_a_repeated_generation_that_differs_sends_nothing(world: EngineThread) -> None:
    left = unbroken(world, CHAT, SEEDED).entries[:10]
    left[0] = request(CHAT, {**SEEDED, "seed": 8})
    resumed = world.run(attempt(world, left))
    assert resumed.recorder.lost is not None
    assert resumed.recorder.lost.because is Because.DIFFERS
    assert resumed.body == b"".join(entry.body for entry in left[1:]), "not a byte more"


def test_a_seeded_response_that_no_client_has_seen_begins_again(world: EngineThread) -> None:
    body = {**SEEDED, "stream": False, "n": 2}
    body.pop("stream_options")
    whole = unbroken(world, CHAT, body)
    resumed = world.run(attempt(world, whole.entries[:5]))
    assert not resumed.recorder.lost
    assert json.loads(resumed.body) == json.loads(whole.body)
    fresh = next(entry for entry in resumed.entries if entry.id.epoch == 2 and entry.id.seq == 1)
    assert str(fresh.resumed_from) == "0-1"


def test_a_client_cannot_name_prior_tokens(world: EngineThread) -> None:
    body = chat("Count to ten.", max_tokens=12)
    forged = {**body, "vllm_xargs": {PRIOR: [40, 41, 42]}}
    assert content(unbroken(world, CHAT, forged).body) == content(unbroken(world, CHAT, body).body)


def test_a_prompt_that_contains_the_time_is_the_first_attempts(world: EngineThread) -> None:
    template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{{ strftime_now('%f') }}: "
    )
    dated = EngineThread(core=world, chat_template=template)
    check_every_cut(dated, CHAT, chat("The time is", max_tokens=12, ignore_eos=True), last=9)


def test_an_engine_of_another_template_has_another_fingerprint(world: EngineThread) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    other, same_as_other = (EngineThread(core=world, chat_template=template) for _ in range(2))
    assert other.engine.fingerprint != world.engine.fingerprint
    assert other.engine.fingerprint == same_as_other.engine.fingerprint


SAMPLED: dict[str, tuple[dict[str, Any], str]] = {
    "a regex": ({"structured_outputs": {"regex": "[a-f]{4}-[0-9]{12}"}}, "[a-f]{4}-[0-9]{12}"),
    "bad_words": ({"bad_words": [" the", "a", " a"]}, "(?!.*( the|a)).*"),
    "n": ({"n": 3, "structured_outputs": {"regex": "[a-f]{12}"}}, "([a-f]{12}){3}"),
    "max_tokens": ({"max_tokens": 9, "ignore_eos": True}, ".*"),
    "logprobs": ({"logprobs": True, "max_tokens": 9}, ".*"),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_answer_goes_on_behind_what_was_sent_and_obeys(
    world: EngineThread, name: str
) -> None:
    more, pattern = SAMPLED[name]
    body = {**chat("Choose."), "temperature": 1.0, **more}
    whole = unbroken(world, CHAT, body)
    cuts = [whole.entries[:cut] for cut in range(2, len(whole.entries))]
    for left, resumed in zip(cuts, world.run(attempts(world, cuts)), strict=True):
        assert not resumed.recorder.lost
        assert resumed.body.startswith(b"".join(entry.body for entry in left[1:]))
        texts = [""] * body.get("n", 1)
        for _, data in events(resumed.body)[:-1]:
            for choice in json.loads(data)["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        text = "".join(texts)
        assert re.fullmatch(pattern, text, re.DOTALL), text
        assert resumed.generated_tokens <= 40 * body.get("n", 1)


def test_a_cached_prefix_is_its_tenants_alone(world: EngineThread) -> None:
    """Otherwise the time to the first token would reveal whether another tenant has asked the
    same.
    """
    body = chat("What is a river? " * 60, max_tokens=4)

    def cached_tokens(tenant: str) -> int:
        written = world.run(attempt(world, [request(CHAT, body, tenant)]))
        first = next(entry for entry in written.entries if b"o" in entry.fields)
        return int(json.loads(first.fields[b"o"])[0][5])

    assert cached_tokens("acme") == 0
    assert cached_tokens("acme") > 100
    assert cached_tokens("zeta") == 0
    assert cached_tokens("default") == 0
    assert cached_tokens("default") > 100


def test_a_seed_does_not_matter_to_a_greedy_request(world: EngineThread) -> None:
    whole = unbroken(world, CHAT, body := chat("Count to ten.", seed=7))
    resumed = world.run(attempt(world, whole.entries[:9]))
    assert content(resumed.body) == content(whole.body), body


def test_a_response_that_another_engine_began_is_not_continued_by_this_one(
    world: EngineThread,
) -> None:
    """The recorded tokens come from another tokenizer, so the continuation would not fit."""
    whole = unbroken(world, CHAT, chat("Count to ten."))
    left = list(whole.entries[:8])
    outputs_there = json.loads(left[4].fields[b"o"])
    outputs_there[0][1] += "?"
    left[4] = left[4]._replace(fields={**left[4].fields, b"o": json.dumps(outputs_there).encode()})
    assert world.run(attempt(world, left)).recorder.lost


def test_bytes_that_differ_from_the_journal_are_never_sent_behind_it(world: EngineThread) -> None:
    whole = unbroken(world, CHAT, chat("Count to ten."))
    left = list(whole.entries[:8])
    left[4] = left[4]._replace(
        fields={**left[4].fields, b"b": left[4].body.replace(b"hermes-tiny", b"hermes-TINY")}
    )
    resumed = world.run(attempt(world, left))
    assert "differs" in str(resumed.recorder.lost)
    assert resumed.body == b"".join(entry.body for entry in left[1:])


def test_ids_and_times_are_of_the_request_not_of_the_attempt(world: EngineThread) -> None:
    first, second = (unbroken(world, RESPONSES, CASES["responses"][1]) for _ in range(2))
    assert same(first.body, second.body)
    assert b"1700000000" in first.body
    path, body = CASES["a tool call"]
    assert content(unbroken(world, path, body).body) == content(unbroken(world, path, body).body)
