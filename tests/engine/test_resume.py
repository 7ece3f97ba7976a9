"""A response that is cut at any position and continued by another attempt equals the uninterrupted
one.

The engine, vLLM's own serving layer and the journal entries are real; only Redis is missing.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

pytest.importorskip("vllm")

from serve_app.contract import MESSAGE, NotResumed
from serve_app.journal.attempt_log import Pause
from serve_app.journal.entries import Entry
from tests.engine.contents import alike, content, each_choice, events, same
from tests.engine.prompts import TOOLS
from tests.engine.resume_helpers import (
    EngineThread,
    PauseAfterPause,
    Written,
    attempt,
    attempts,
    body_of,
    request,
)
from workers.engine_plugin import PRIOR
from workers.replay import CannotContinue

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
COMPACT = "/v1/responses/compact"


_GREEDY = {"model": "hermes-tiny", "temperature": 0, "stream": True}


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    usual = {"max_tokens": 40, "stream_options": {"include_usage": True}}
    return {**_GREEDY, "messages": messages, **usual, **more}


def completion(prompt: str | list[str], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {**_GREEDY, "prompt": prompt, "max_tokens": max_tokens, **more}


def response(prompt: str | list[Any], max_output_tokens: int, **more: Any) -> dict[str, Any]:
    return {**_GREEDY, "input": prompt, "max_output_tokens": max_output_tokens, **more}


def message(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {**_GREEDY, "messages": messages, "max_tokens": max_tokens, **more}


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
FORMAT = {"type": "json_schema", **PERSON["json_schema"]}  # type: ignore[dict-item]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
SEARCH = {"type": "function", "function": {"name": "search"}}
FUNCTIONS = [{"type": "function", **TOOLS[0]["function"]}]
ANTHROPICS = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
    for one in (tool["function"] for tool in TOOLS)
]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
WHOLE = {"stream": False, "stream_options": None}
COMPACTED = [{"role": "user", "content": "Count to ten."}, {"type": "compaction_trigger"}]
CUSTOM = [{"type": "custom", "name": "note"}]
PENALTIES = {"frequency_penalty": 0.3, "presence_penalty": 0.6, "repetition_penalty": 1.1}

# What is cut in a way of its own; test_parameters.py has every parameter by itself.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain text": (CHAT, chat("Tell me a story about a lighthouse.")),
    "multi-byte text": (CHAT, chat("Say hello in three languages.", logit_bias={}, max_tokens=48)),
    # A byte-level tokenizer, pushed towards the bytes of é, € and a lonely first byte.
    "broken bytes": (
        COMPLETIONS,
        completion("é€é€", 24, allowed_token_ids=[], ignore_eos=True),
    ),
    "a stop string": (CHAT, chat("Count to ten.", stop=["four"], max_tokens=60)),
    "a long stop string that never comes": (
        CHAT,
        chat("Count to ten.", stop=["seven eleven nine"]),
    ),
    "a stop string that is kept": (
        CHAT,
        chat("Count to ten.", stop=["four"], include_stop_str_in_output=True),
    ),
    "min_tokens": (CHAT, chat("Hello", min_tokens=30, stop=["e"], max_tokens=34)),
    "a tool call": (CHAT, chat("What is the weather in Paris?", tools=TOOLS, max_tokens=120)),
    "a cut call, not streamed": (
        CHAT,
        chat("What is the weather in Paris?", tools=TOOLS, max_tokens=36, **WHOLE),
    ),
    "a cut call of a response": (
        RESPONSES,
        response("What is the weather in Paris?", 36, tools=FUNCTIONS),
    ),
    "whole, not streamed": (CHAT, chat("Count to ten.", **WHOLE)),
    "logprobs of a prompt": (
        COMPLETIONS,
        completion("The keeper é", 8, stream=False, logprobs=1, prompt_logprobs=1),
    ),
    "all penalties": (CHAT, chat("Tell me a story.", **PENALTIES)),
    "bad_words": (CHAT, chat("Count to ten.", bad_words=["three", " five", "the"])),
    "JSON mode": (CHAT, chat("Answer.", response_format={"type": "json_object"})),
    "a choice": (CHAT, chat("Choose.", structured_outputs={"choice": ["a quite long answer"]})),
    "a regex": (CHAT, chat("Choose.", structured_outputs={"regex": "[a-f]{5}-[0-9]{30}"})),
    "a named tool": (CHAT, chat("Hello", tools=TOOLS, tool_choice=SEARCH, max_tokens=60)),
    "a call beside a format": (
        CHAT,
        chat("What is the weather in Paris?", tools=TOOLS, response_format=PERSON, max_tokens=120),
    ),
    "an answer in a format beside tools": (
        RESPONSES,
        response("Hello", 60, tools=FLAT, text={"format": FORMAT}, logit_bias={"<tool_call>": -99}),
    ),
    "logprobs": (CHAT, chat("Say é and €.", logprobs=True, top_logprobs=3, max_tokens=24)),
    "logprobs before a stop string": (
        CHAT,
        chat("Count to ten.", stop=["four"], logprobs=True),
    ),
    "logprobs of a response": (
        RESPONSES,
        response("Say é and €.", 24, stop=["it never comes"], **LOGPROBS),
    ),
    "logprobs of a completion": (
        COMPLETIONS,
        completion("The keeper é", 16, logprobs=2, echo=True),
    ),
    "a seed and n": (CHAT, chat("Tell me a story.", seed=7, temperature=1.0, n=3, max_tokens=12)),
    "a seed with logprobs": (CHAT, chat("Hello", seed=7, temperature=1.0, logprobs=True)),
    "several prompts": (COMPLETIONS, completion(["The keeper", "Count", "A river is"], 10)),
    "a compaction": (COMPACT, response("Count to ten.", 20, stream=False)),
    "a streamed compaction": (RESPONSES, response(COMPACTED, 20)),
    "a custom tool's cut call": (
        RESPONSES,
        response("Hello", 28, tools=CUSTOM, tool_choice="required"),
    ),
    "responses": (RESPONSES, response("Why is the sky blue?", 40)),
    "responses, not streamed": (RESPONSES, response("Count to ten.", 20, stream=False)),
    "a message": (MESSAGE, message("Count to ten.", 60, stop_sequences=["four"])),
    "a call of a message": (
        MESSAGE,
        message("What is the weather in Paris?", 120, tools=ANTHROPICS),
    ),
    "a cut call of a message": (
        MESSAGE,
        message("What is the weather in Paris?", 36, tools=ANTHROPICS),
    ),
    "a message, not streamed": (
        MESSAGE,
        message("What is the weather in Paris?", 120, tools=ANTHROPICS, stream=False),
    ),
}


LONG = 30
_CALL_ID = re.compile(rb"(?:chatcmpl-tool-|call_)[0-9a-f]+")
MERGED = (
    "plain text",
    "a stop string",
    "a stop string that is kept",
    "a tool call",
    "logprobs",
    "logprobs before a stop string",
    "logprobs of a response",
    "a seed and n",
    "several prompts",
    "responses",
    "a call of a message",
)


def unbroken(
    world: EngineThread, path: str, body: dict[str, Any], pause: type[Pause] = Pause
) -> Written:
    return world.run(attempt(world, [request(path, body)], pause=pause))


def outputs(entry: Entry) -> int:
    """Number of tokens in an entry."""
    return sum(len(output[2]) for output in json.loads(entry.fields.get(b"o", b"[]")))


def engine_outputs(written: Written) -> list[Any]:
    found = [json.loads(entry.fields.get(b"o", b"[]")) for entry in written.entries]
    return [output for entry in found for output in entry]


def token_ids(written: Written) -> list[int]:
    """All tokens of a response's only generation."""
    return [token_id for output in engine_outputs(written) for token_id in output[2]]


def is_lost(resumed: Written, cause: NotResumed) -> None:
    assert isinstance(resumed.attempt.lost, CannotContinue)
    assert resumed.attempt.lost.cause is cause


def ends_in(body: bytes, reason: str) -> None:
    assert f'"finish_reason":"{reason}"'.encode() in body, body[-600:]


def parting(whole: Written, resumed: Written) -> str:
    """Where the tokens of two responses begin to differ: at the cut or after it."""
    ours, theirs = token_ids(whole), token_ids(resumed)
    at = next(
        (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    cut = sum(outputs(entry) for entry in resumed.entries if entry.id.epoch == 1)
    return f"the tokens part at {at} of {len(ours)} and {len(theirs)}, the cut is at {cut}"


def check_every_cut(
    world: EngineThread,
    path: str,
    body: dict[str, Any],
    last: int = 0,
    pause: type[Pause] = Pause,
    every: int = 1,
) -> Written:
    """Returns the unbroken response.

    Args:
        last: how many cuts from the end; by default all.
        every: of more than LONG cuts, make only every third, say, and the last one.
    """
    whole = unbroken(world, path, body, pause)
    tokens = sum(outputs(entry) for entry in whole.entries)
    assert whole.attempt.head is not None
    assert whole.attempt.head.status == 200, whole.body
    # A stop string is found behind the engine, which meanwhile goes on: how far, depends on load.
    ahead = math.inf if "stop" in body or "stop_sequences" in body else 1
    # Behind the opening, behind each output, before the end.
    cuts = [whole.entries[:cut] for cut in range(2, len(whole.entries))]
    assert cuts  # how many depends on how fast the outputs were taken
    assert len(token_ids(whole)) > 4
    cuts = cuts[-last:][:: -every if len(cuts) > LONG else 1]
    for left, resumed in zip(cuts, world.run(attempts(world, cuts, pause), 240), strict=True):
        where = f"cut behind entry {len(left)} of {len(whole.entries)}"
        assert not resumed.attempt.lost, where
        assert resumed.body.startswith(body_of(left)), where
        same_answer = alike(each_choice(resumed.body), each_choice(whole.body))
        assert same_answer, f"{where}: {parting(whole, resumed)}"
        # What was drawn with a seed is drawn again.
        missing = tokens - (0 if "seed" in body else sum(outputs(entry) for entry in left))
        assert resumed.generated_tokens <= missing + ahead, f"{where}: a re-run, not a resume"
    return whole


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(900)
def test_cut_behind_any_output_the_continuation_is_the_unbroken_response(
    world: EngineThread, name: str, every: int
) -> None:
    path, body = CASES[name]
    tokenizer = world.engine._engine.renderer.tokenizer
    if bias := body.get("logit_bias"):
        body = {**body, "logit_bias": {str(tokenizer.encode(x)[0]): bias[x] for x in bias}}
    if path.startswith(RESPONSES):
        unbroken(world, path, body)  # the answer tells how much of a long prompt was cached
    if body.get("allowed_token_ids") == []:
        tokens = sorted({token for token in tokenizer.encode("é€ñ ü") if token > 2})
        body = {**body, "allowed_token_ids": tokens}
    whole = check_every_cut(world, path, body, every=every)
    if name in ("a tool call", "a call beside a format") or "call of a message" in name:
        assert b"get_weather" in whole.body
    if name == "an answer in a format beside tools":
        assert b"function_call" not in whole.body
        assert b"tool_calls" in whole.body
    if name.startswith("a cut call"):
        assert b"get_weather" in whole.body
        assert b"tool_call>" not in whole.body
    if name.startswith("a stop string"):
        ends_in(whole.body, "stop")


def _said(body: bytes) -> Any:
    """What is in a response, apart from ids of calls, which a parser may draw for each delta, and
    from how a stream is divided into events: its end may come with the last of its text.
    """
    found = each_choice(_CALL_ID.sub(b"", body))
    if not all(isinstance(parts, list) for parts in found.values()):
        return found
    return {key: [part for part in parts if part[0] != "event"] for key, parts in found.items()}


@pytest.mark.parametrize("name", MERGED)
def test_merged_in_pauses_it_is_the_same_response_and_cut_behind_any_output_it_goes_on(
    world: EngineThread, name: str
) -> None:
    path, body = CASES[name]
    whole = check_every_cut(world, path, body, pause=PauseAfterPause)
    alone = unbroken(world, path, body)
    assert alike(_said(whole.body), _said(alone.body))
    sizes = [len(made[2]) for made in engine_outputs(whole)]
    assert max(sizes) >= 3
    assert sizes[0] == 1


def test_cut_shortly_before_its_own_end_the_answer_ends_in_the_same_way(
    world: EngineThread,
) -> None:
    whole = check_every_cut(world, CHAT, chat("Hello", max_tokens=1_900), last=6)
    ends_in(whole.body, "stop")


def test_cut_shortly_before_a_stop_token_its_text_is_not_shown(world: EngineThread) -> None:
    """A token of the vocabulary, whose text would be shown anywhere else."""
    plain = token_ids(unbroken(world, CHAT, chat("Hello", max_tokens=60, ignore_eos=True)))
    stop = next(one for at, one in enumerate(plain) if at >= 10 and one not in plain[:at])
    body = chat("Hello", max_tokens=60, stop_token_ids=[stop])
    whole = check_every_cut(world, CHAT, body, last=6)
    assert token_ids(whole)[-1] == stop
    ends_in(whole.body, "stop")


def test_a_beam_search_has_the_log_probabilities_of_every_token(world: EngineThread) -> None:
    """It chooses by them, the end token's too, in steps of one token each."""
    more = {"logprobs": True, "use_beam_search": True, "n": 2, "tools": TOOLS, "max_tokens": 90}
    whole = unbroken(world, CHAT, chat("What is the weather in Paris?", **more, **WHOLE))
    ends_in(whole.body, "tool_calls")


THINK = "Think step by step before you answer."


def thoughtful(**more: Any) -> dict[str, Any]:
    body = chat("What is a river?", **more)
    body["messages"].insert(0, {"role": "system", "content": THINK})
    return body


def has_thought_and_said(whole: Written) -> None:
    assert b'"reasoning"' in whole.body
    assert b'"content":"' in whole.body


@pytest.mark.nightly  # hundreds of cuts; a tool call's parser goes on in the same way
def test_cut_inside_of_a_thought_and_behind_it_the_parser_goes_on(world: EngineThread) -> None:
    thinking = EngineThread(core=world, reasoning_parser="deepseek_r1")
    whole = check_every_cut(thinking, CHAT, thoughtful(max_tokens=160))
    has_thought_and_said(whole)
    asked = response("What is a river?", 160, instructions=THINK)
    whole = check_every_cut(thinking, RESPONSES, asked)
    assert b"response.reasoning_text.delta" in whole.body
    assert b"response.output_text.delta" in whole.body


@pytest.mark.nightly  # an engine of its own
def test_a_schema_begins_behind_the_thought_also_on_another_engine() -> None:
    thinking = EngineThread(reasoning_parser="deepseek_r1")
    try:
        no_space = {"9": -99, "10": -99}
        body = thoughtful(response_format=PERSON, max_tokens=300, logit_bias=no_space)
        has_thought_and_said(check_every_cut(thinking, CHAT, body))
        budget = {**body, "thinking_token_budget": 12, "response_format": None}
        whole = unbroken(thinking, CHAT, budget)
        left = whole.entries[:10]
        resumed = thinking.run(attempt(thinking, left))
        assert each_choice(resumed.body) == each_choice(whole.body)
        assert resumed.generated_tokens >= len(token_ids(whole)), "it is run again"
        left[0] = request(CHAT, {**budget, "temperature": 1.0})
        is_lost(thinking.run(attempt(thinking, left)), NotResumed.UNSUPPORTED_PARAMETER)
    finally:
        thinking.close()


SEEDED = chat(
    "Tell me a story.", max_tokens=12, ignore_eos=True, seed=7, temperature=2.0, top_p=1.0, top_k=-1
)


def test_a_generation_is_not_repeated_beyond_its_bound(world: EngineThread) -> None:
    impatient = EngineThread(core=world, rerun_tokens=2)
    whole = unbroken(impatient, CHAT, SEEDED)
    assert not impatient.run(attempt(impatient, whole.entries[:4])).attempt.lost
    left = whole.entries[:6]
    resumed = impatient.run(attempt(impatient, left))
    is_lost(resumed, NotResumed.REGENERATION_LIMIT)
    assert resumed.body == body_of(left), "not a byte more"
    # The bound is that of the request, however many prompts it has.
    several = completion(["One", "Two"], 8, seed=7, temperature=1.0)
    entries = unbroken(impatient, COMPLETIONS, several).entries
    each_two = next(n for n in range(len(entries)) if sum(map(outputs, entries[:n])) > 3)
    is_lost(impatient.run(attempt(impatient, entries[:each_two])), NotResumed.REGENERATION_LIMIT)


def test_a_repeated_generation_that_differs_sends_nothing(world: EngineThread) -> None:
    left = unbroken(world, CHAT, SEEDED).entries[:10]
    left[0] = request(CHAT, {**SEEDED, "seed": 8})
    resumed = world.run(attempt(world, left))
    is_lost(resumed, NotResumed.OUTPUT_MISMATCH)
    assert resumed.body == body_of(left), "not a byte more"


def test_a_seeded_response_that_no_client_has_seen_begins_again(world: EngineThread) -> None:
    body = {**SEEDED, **WHOLE, "n": 2}
    whole = unbroken(world, CHAT, body)
    resumed = world.run(attempt(world, whole.entries[:5]))
    assert not resumed.attempt.lost
    assert json.loads(resumed.body) == json.loads(whole.body)
    fresh = next(entry for entry in resumed.entries if entry.id.epoch == 2 and entry.id.seq == 1)
    assert str(fresh.resumed_from) == "0-1"


def test_a_client_cannot_name_prior_tokens(world: EngineThread) -> None:
    body = chat("Count to ten.", max_tokens=12)
    forged = {**body, "vllm_xargs": {PRIOR: [40, 41, 42]}}
    assert content(unbroken(world, CHAT, forged).body) == content(unbroken(world, CHAT, body).body)


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_a_prompt_that_contains_the_time_is_the_first_attempts(world: EngineThread) -> None:
    dated = EngineThread(core=world, chat_template=TEMPLATE + "{{ strftime_now('%f') }}: ")
    check_every_cut(dated, CHAT, chat("The time is", max_tokens=12, ignore_eos=True), last=9)


def test_an_engine_of_another_template_has_another_fingerprint(world: EngineThread) -> None:
    other, same_as_other = (EngineThread(core=world, chat_template=TEMPLATE) for _ in range(2))
    assert other.engine.fingerprint != world.engine.fingerprint
    assert other.engine.fingerprint == same_as_other.engine.fingerprint


SAMPLED: dict[str, tuple[dict[str, Any], str]] = {
    "a regex": ({"structured_outputs": {"regex": "[a-f]{4}-[0-9]{12}"}}, "[a-f]{4}-[0-9]{12}"),
    "bad_words": ({"bad_words": [" the", "a", " a"]}, "(?!.*( the|a)).*"),
    "n": ({"n": 3, "structured_outputs": {"regex": "[a-f]{12}"}}, "([a-f]{12}){3}"),
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
        assert not resumed.attempt.lost
        assert resumed.body.startswith(body_of(left))
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


def test_what_differs_from_the_journal_is_never_sent_behind_it(world: EngineThread) -> None:
    """Another engine's tokens come from another tokenizer, so their continuation would not fit."""
    entries = unbroken(world, CHAT, chat("Count to ten.")).entries[:8]

    def changed(field: bytes, value: bytes) -> list[Entry]:
        entry = entries[4]._replace(fields={**entries[4].fields, field: value})
        return [*entries[:4], entry, *entries[5:]]

    there = json.loads(entries[4].fields[b"o"])
    there[0][1] += "?"
    left = changed(b"o", json.dumps(there).encode())
    assert world.run(attempt(world, left)).attempt.lost
    left = changed(b"b", entries[4].body.replace(b"hermes-tiny", b"hermes-TINY"))
    resumed = world.run(attempt(world, left))
    assert "differs" in str(resumed.attempt.lost)
    assert resumed.body == body_of(left)


def test_ids_and_times_are_of_the_request_not_of_the_attempt(world: EngineThread) -> None:
    first, second = (unbroken(world, RESPONSES, CASES["responses"][1]) for _ in range(2))
    assert same(first.body, second.body)
    assert b"1700000000" in first.body
    path, body = CASES["a tool call"]
    assert content(unbroken(world, path, body).body) == content(unbroken(world, path, body).body)
