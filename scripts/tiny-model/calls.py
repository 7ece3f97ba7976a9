"""Dialogues that call a tool, and dialogues that think before they answer."""

import json
from random import Random
from typing import Any

from phrases import PHRASES

Message = dict[str, Any]
Tool = dict[str, Any]
# The tool, the question, the calls, their results, and the answer.
Errand = tuple[Tool, str, list[Message], list[str], str]

DISTRACTORS = (
    ("get_time", "Tells the local time", {"timezone": "string"}),
    ("send_mail", "Sends an e-mail", {"to": "string", "subject": "string"}),
    ("create_ticket", "Opens a ticket", {"title": "string"}),
    ("play_music", "Plays a song", {"title": "string"}),
    ("multiply", "Multiplies two numbers", {"a": "number", "b": "number"}),
)


def _tool(rng: Random, name: str, about: str, parameters: dict[str, str]) -> Tool:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {k: {"type": v} for k, v in parameters.items()},
    }
    if rng.random() < 0.7:
        schema["required"] = list(parameters)
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": schema},
    }


def _call(name: str, arguments: dict[str, Any]) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _weather(rng: Random) -> Errand:
    city, second = rng.sample(PHRASES["cities"], 2)
    name = rng.choice(["city", "city", "location"])
    tool = _tool(rng, "get_weather", rng.choice(PHRASES["weather tool"]), {name: "string"})
    cities = [city, second] if rng.random() < 0.15 else [city]
    question = rng.choice(PHRASES["ask weather"]).format(" and ".join(cities))
    degrees, skies = (
        [rng.randint(-5, 34) for _ in cities],
        [rng.choice(PHRASES["skies"]) for _ in cities],
    )
    results = [
        json.dumps({"temperature": d, "sky": s}) for d, s in zip(degrees, skies, strict=True)
    ]
    reports = [
        f"in {c} there is {s} at {d} degrees"
        for c, s, d in zip(cities, skies, degrees, strict=True)
    ]
    answer = f"Right now {', and '.join(reports)}. {rng.choice(PHRASES['weather advice'])}"
    return tool, question, [_call("get_weather", {name: c}) for c in cities], results, answer


def _search(rng: Random) -> Errand:
    queries = PHRASES["queries"]
    query = rng.choice(queries)
    if rng.random() < 0.5:  # an arbitrary one, so that it learns to copy and not to recite
        last, first = rng.choice(queries).rsplit(" ", 1)[-1], query.split(" ", 1)[0]
        query = f"{last} {first} {rng.choice(PHRASES['cities'])}"
    name = rng.choice(["search", "search", "web_search"])
    tool = _tool(rng, name, rng.choice(PHRASES["search tool"]), {"query": "string"})
    question = rng.choice(PHRASES["ask search"]).format(query)
    page = rng.choice(PHRASES["pages"])
    result = json.dumps({"results": [{"title": query, "kind": page}]}, ensure_ascii=False)
    answer = f"I found {page} with the title “{query}”."
    return tool, question, [_call(name, {"query": query})], [result], answer


def _add(rng: Random) -> Errand:
    a, b = (rng.randint(0, 10 ** rng.randint(1, 4)) for _ in range(2))
    tool = _tool(rng, "add", rng.choice(PHRASES["add tool"]), {"a": "number", "b": "number"})
    question = rng.choice(PHRASES["ask tool sum"]).format(a, b)
    return (
        tool,
        question,
        [_call("add", {"a": a, "b": b})],
        [str(a + b)],
        f"{a} plus {b} is {a + b}.",
    )


def tool_dialogue(rng: Random) -> tuple[list[Message], list[Tool]]:
    """A question, the call that it needs, the result, and the answer; the right tool stands among
    others.
    """
    kinds = rng.sample([_weather, _search, _add], rng.choice([1, 1, 2, 3]))
    tool, question, calls, results, answer = kinds[0](rng)
    tools = [tool, *(kind(rng)[0] for kind in kinds[1:])]
    tools += [_tool(rng, *extra) for extra in rng.sample(DISTRACTORS, rng.choice([0, 0, 1, 2]))]
    rng.shuffle(tools)
    messages: list[Message] = [{"role": "user", "content": question}]
    messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "content": result} for result in results]
    return [*messages, {"role": "assistant", "content": answer}], tools


def thought(rng: Random, ask: str) -> str:
    """A plan for any answer, in four steps that never come in another order."""
    return " ".join(rng.choice(PHRASES[f"plan {step}"]) for step in range(1, 5)).format(ask=ask)


def sum_with_thought(rng: Random) -> tuple[str, str, str]:
    """A sum of two numbers below one hundred: the question, the thinking, and the answer."""
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    steps = (
        f"The tens give {tens}. The ones, {a % 10} and {b % 10}, give {ones}. {tens} and "
        f"{ones} make {a + b}."
    )
    return rng.choice(PHRASES["ask sum"]).format(a, b), steps, f"The sum of {a} and {b} is {a + b}."
