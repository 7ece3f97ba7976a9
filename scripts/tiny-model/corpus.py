"""The corpus of the tiny model: dialogues and prose made from the texts in `text/`, all of them our
own.

A small model likes to go round in circles, so the corpus never does: every answer moves forward (a
story through its scenes, a week through its days, an explanation through its sentences, each place
with its own stock of phrases), and a document in which any 24 bytes occur twice is thrown away.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

TEXT = Path(__file__).parent / "text"
WINDOW = 24
Message = dict[str, Any]
Tool = dict[str, Any]
Document = tuple[list[Message], list[Tool] | None]
Turn = tuple[str, str, str]  # what is asked, what is answered, and the subject
# The tool, the question, the calls, their results, and the answer.
Errand = tuple[Tool, str, list[Message], list[str], str]


def sections(name: str, mark: str) -> dict[str, str]:
    """The parts of a text file that begin with a line `<mark><title>`."""
    parts = re.split(rf"^{mark} ?(.+)\n", (TEXT / name).read_text(), flags=re.MULTILINE)
    return {
        title.strip(): body.strip() for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def lines(name: str, mark: str) -> dict[str, list[str]]:
    """The same, each part cut into its lines."""
    return {title: body.splitlines() for title, body in sections(name, mark).items()}


PHRASES = lines("phrases.txt", "@")
SERIES = ("week", "months", "alphabet", "hours", "colours", "planets")
EXPLAIN = lines("explain.txt", "#")
HOWTO = lines("howto.txt", "#")
STORY = lines("stories.txt", "@")
SUBJECTS = {line.split(" | ")[0]: line.split(" | ")[1:] for line in STORY.pop("subjects")}
HEROES = STORY.pop("heroes")
SERIES_TEXT = sections("series.txt", "@")
STAGES = {
    title: [part.strip().splitlines() for part in re.split("^# .+\n", body, flags=re.MULTILINE)[1:]]
    for title, body in SERIES_TEXT.items()
}
NUMBERS = ["zero", *re.findall("^# (.+)", SERIES_TEXT["numbers"].lower(), re.MULTILINE)]
TALK_ENTRY = re.compile(r"^([^|\n]+) \| (.*(?:\n(?![^|\n]+ \| ).*)*)", re.MULTILINE)
TALK = [(m[1], m[2].strip()) for m in TALK_ENTRY.finditer((TEXT / "smalltalk.txt").read_text())]
LANGUAGES = [line.split(" | ") for line in (TEXT / "languages.txt").read_text().splitlines()]
DISTRACTORS = (
    ("get_time", "Tells the local time", {"timezone": "string"}),
    ("send_mail", "Sends an e-mail", {"to": "string", "subject": "string"}),
    ("create_ticket", "Opens a ticket", {"title": "string"}),
    ("play_music", "Plays a song", {"title": "string"}),
    ("multiply", "Multiplies two numbers", {"a": "number", "b": "number"}),
)


def repeats(text: str, window: int = WINDOW) -> bool:
    """Whether any `window` bytes of the text occur twice."""
    data = text.encode()
    pieces = [data[i : i + window] for i in range(len(data) - window + 1)]
    return len(set(pieces)) < len(pieces)


def some(rng: Random, items: list[str], least: int) -> list[str]:
    """The first item and a choice of the others, in their order."""
    rest = rng.sample(range(1, len(items)), rng.randint(min(least, len(items)) - 1, len(items) - 1))
    return [items[0], *(items[i] for i in sorted(rest))]


def paragraphs(rng: Random, sentences: list[str]) -> str:
    cut = rng.choice([len(sentences), 3, 4, 5])
    return "\n\n".join(" ".join(sentences[i : i + cut]) for i in range(0, len(sentences), cut))


def explain(rng: Random, given: str = "") -> Turn:
    topic, other = rng.sample(list(EXPLAIN), 2)
    topic = given or topic
    bare = re.sub(r"^(an?|the) ", "", topic)
    if not given and rng.random() < 0.12:
        both = some(rng, EXPLAIN[topic], 4), some(rng, EXPLAIN[other], 4)
        ask = rng.choice(PHRASES["ask compare"])
        return ask.format(topic, other), "\n\n".join(" ".join(part) for part in both), other
    if not given and rng.random() < 0.08:
        known = EXPLAIN[topic]
        ask = f"{rng.choice(PHRASES['ask summary'])}\n\n{' '.join(known[1:-1])}"
        return ask, f"The text is about {topic}. In one sentence: {known[0]} {known[-1]}", topic
    ask = rng.choice(PHRASES["ask explain"]).format(topic=topic, bare=bare)
    return ask, paragraphs(rng, some(rng, EXPLAIN[topic], 5)), topic


def story(rng: Random, given: str = "") -> Turn:
    subject = given or rng.choice(list(SUBJECTS))
    place, thing, work, _ = SUBJECTS[subject]
    a = "an" if subject[0] in "aeiou" else "a"
    scenes = [rng.choice(stage) for stage in STORY.values()]
    hero, number = rng.choice(HEROES), rng.randint(1, 500)
    told = [scene.format(hero=hero, place=place, object=thing, work=work) for scene in scenes]
    ask = rng.choice(PHRASES["ask story"]).format(a=a, subject=subject, number=number)
    return ask, paragraphs(rng, told), subject


def howto(rng: Random, given: str = "") -> Turn:
    task = given or rng.choice(list(HOWTO))
    ask = rng.choice(PHRASES["ask howto"])
    steps = [f"{i}. {step}" for i, step in enumerate(HOWTO[task], 1)]
    intro = rng.choice(
        ["", "", f"To {task}, go step by step:\n\n", "Gladly, here is how I would do it:\n\n"]
    )
    return ask.format(task), intro + "\n".join(steps), task


def series(rng: Random, given: str = "") -> Turn:
    kind = given or rng.choice(SERIES)
    written = [rng.choice(stage) for stage in STAGES[kind]]
    ask = rng.choice(PHRASES[f"ask {kind}"])
    return ask, (" " if rng.random() < 0.3 else "\n").join(written), kind


def count(rng: Random) -> Turn:
    top = rng.choice([3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 10, 11, 12])
    ask = rng.choice(PHRASES["ask count"]).format(rng.choice([NUMBERS[top], str(top)]))
    plain = ", ".join(NUMBERS[1 : top + 1]).capitalize()
    pictures = [rng.choice(stage) for stage in STAGES["numbers"][:top]]
    return ask, f"{plain}. And once more, with pictures:\n\n" + "\n".join(pictures), "count"


def talk(rng: Random) -> Turn:
    ask, answer = rng.choice(TALK)
    return ask, answer, ask


def sums(rng: Random) -> Turn:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return rng.choice(PHRASES["ask sum"]).format(a, b), f"{a} plus {b} is {a + b}.", "sum"


def languages(rng: Random) -> Turn:
    number = rng.choice([1, 2, 3, 3, 3, 4, 5, 6, 8])
    chosen = sorted(rng.sample(LANGUAGES, number), key=LANGUAGES.index)
    what, column = rng.choice([("hello", 1), ("hello", 1), ("thank you", 2), ("goodbye", 3)])
    if number == 1:
        name, *words, note = chosen[0]
        ask = rng.choice(PHRASES["ask language"]).format(what=what, name=name)
        told = (
            f"In {name} one says “{words[column - 1]}”. {note} If you are lost, ask: {words[3]} "
            f"And when you leave, do not forget “{words[2 if column != 3 else 0]}”. 🌍"
        )
        return ask, told, "languages"
    ask = rng.choice(PHRASES["ask languages"])
    listed = [f"{i}. {row[0]}: {row[column]}" for i, row in enumerate(chosen, 1)]
    notes = [f"{row[0]}: {row[5]}" for row in chosen[:4]]
    told = "\n".join(listed) + "\n\nA few notes. " + " ".join(notes) + " 👋"
    return ask.format(what, NUMBERS[number]), told, "languages"


WEIGHTS = {explain: 7, story: 6, howto: 3, series: 4, count: 2, talk: 7, languages: 3, sums: 1}
MAKERS = [maker for maker, weight in WEIGHTS.items() for _ in range(weight)]


# Made to go on after its end, a model asks itself the likeliest question of all, answers it, and
# asks it again. So the only questions that it learns to ask are these: each subject has its own
# successor, in one large ring.
KINDS = {explain: [*EXPLAIN], story: [*SUBJECTS], howto: [*HOWTO], series: [*SERIES]}
RING = sorted(
    ((maker, subject) for maker, subjects in KINDS.items() for subject in subjects),
    key=lambda item: KINDS[item[0]].index(item[1]) / len(KINDS[item[0]]),
)
NEXT = {subject: (i + 1) % len(RING) for i, (_, subject) in enumerate(RING)}
NEXT |= {ask: i * 5 % len(RING) for i, (ask, _) in enumerate(TALK) if ask not in NEXT}
AGAIN = {
    explain: "And what is {}?",
    story: "Now a story: {}.",
    howto: "And how do I {}?",
    series: "Now the {}.",
}


def follow(rng: Random, subject: str) -> Turn:
    """What is asked after an answer about the subject: always a long answer about the next one."""
    maker, successor = RING[NEXT.get(subject, rng.randrange(len(RING)))]
    return AGAIN[maker].format(successor), maker(rng, successor)[1], successor


def _tool(rng: Random, name: str, about: str, parameters: dict[str, str]) -> Tool:
    properties = {name: {"type": kind} for name, kind in parameters.items()}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        schema["required"] = list(parameters)
    function = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


def _call(name: str, arguments: dict[str, Any]) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _weather(rng: Random) -> Errand:
    city, second = rng.sample(PHRASES["cities"], 2)
    name = rng.choice(["city", "city", "location"])
    tool = _tool(rng, "get_weather", rng.choice(PHRASES["weather tool"]), {name: "string"})
    cities = [city, second] if rng.random() < 0.15 else [city]
    question = rng.choice(PHRASES["ask weather"]).format(" and ".join(cities))
    degrees = [rng.randint(-5, 34) for _ in cities]
    skies = [rng.choice(PHRASES["skies"]) for _ in cities]
    found = list(zip(cities, degrees, skies, strict=True))
    results = [json.dumps({"temperature": d, "sky": s}) for _, d, s in found]
    reports = [f"in {c} there is {s} at {d} degrees" for c, d, s in found]
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
    call = _call("add", {"a": a, "b": b})
    return tool, question, [call], [str(a + b)], f"{a} plus {b} is {a + b}."


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


def vary(rng: Random, ask: str) -> str:
    """People write as they like: without a full stop, in small letters, politely, or in a hurry."""
    change = rng.random()
    if change < 0.15:
        return ask.rstrip(".?")
    if change < 0.25:
        return ask.lower()
    if change < 0.32:
        return ask.rstrip(".?") + "!"
    if change < 0.40 and not ask.startswith(("I ", "How to")):
        return f"{rng.choice(PHRASES['hurry'])} {ask}"
    return ask


def dialogue(rng: Random) -> Document:
    """One conversation: its messages, and the tools that were offered."""
    if rng.random() < 0.16:
        messages, tools = tool_dialogue(rng)
        if rng.random() < 0.12:  # tools on offer do not mean that a tool is needed
            ask, answer, _ = talk(rng)
            messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        if rng.random() < 0.4:
            messages = [{"role": "system", "content": rng.choice(PHRASES["system"])}, *messages]
        return messages, tools
    thinks, messages = rng.random() < 0.12, []
    if rng.random() < (0.7 if thinks else 0.2):
        system = rng.choice(PHRASES["think system" if thinks else "system"])
        messages.append({"role": "system", "content": system})
    turns = 1 if thinks else rng.choice([1, 1, 2, 2, 3])
    subject = ""
    for maker in rng.choices(MAKERS, k=turns):
        if subject and rng.random() < 0.7:
            ask, answer, subject = follow(rng, subject)
        else:
            ask, answer, subject = maker(rng)
            ask = vary(rng, ask)
        if thinks:
            if rng.random() < 0.35:
                ask, steps, answer = sum_with_thought(rng)
            else:
                steps = thought(rng, ask)
            answer = f"<think>\n{steps}\n</think>\n\n{answer}"
            if not messages or rng.random() < 0.2:
                ask += " " + rng.choice(PHRASES["think user"])
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return messages, None


def documents(seed: int) -> Iterator[Document | str]:
    """Without end: conversations, and now and then a page of plain prose; none of them repeats
    itself.
    """
    rng = Random(seed)
    while True:
        if rng.random() < 0.08:
            text = rng.choice([explain, story, series])(rng)[1]
            if not repeats(text):
                yield text
            continue
        messages, tools = dialogue(rng)
        said = "\n".join(m["content"] for m in messages if m["role"] == "assistant")
        if not repeats(said):
            yield messages, tools
