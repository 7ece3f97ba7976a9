"""`scripts/bench` keeps the key to itself, and says of each stream what became of it."""

import json
import math
from pathlib import Path

import pytest

from scripts.benchmark.batchers import Job
from scripts.benchmark.options import parse
from scripts.benchmark.report import write_document
from scripts.benchmark.run import Exchange
from scripts.benchmark.survival import fate
from tests.tables import each

pytestmark = pytest.mark.nightly  # a tool


@each("given", [["--api-key", "sk-secret"], ["--api-key=sk-secret"]])
def test_the_key_does_not_come_into_the_report(given: list[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--url", "http://h/v1", *given, "--json", str(file)]
    write_document(parse(words), ["scripts/bench", *words], rows=[math.nan])
    assert "secret" not in file.read_text()
    found = json.loads(file.read_text())
    assert (found["command"][:3], found["rows"]) == (["scripts/bench", *words[:2]], [None])


def event(**fields: object) -> bytes:
    return b"data: %s\n\n" % json.dumps(fields).encode()


def token(text: str) -> bytes:
    return event(choices=[{"delta": {"content": text}}])


def used(tokens: int) -> bytes:
    return event(usage={"completion_tokens": tokens, "prompt_tokens": 1})


DONE = b"data: [DONE]\n\n"
FATES = {
    "whole": [token("a"), token("b"), used(2), DONE],
    "cut before its last event": [token("a"), token("b")],
    "cut by an error": [token("a"), event(error={"code": 500}), DONE],
    "cut short": [token("a"), used(1), DONE],
    "doubled": [token("a"), token("a"), token("b"), used(3), DONE],
    "doubled in the text alone": [token("a"), token("ab"), used(2), DONE],
    "wrong": [token("a"), token("c"), used(2), DONE],
    "lost": [token("a")],
}


@each("what", FATES)
def test_each_stream_in_flight_is_accounted_for(what: str) -> None:
    one = Exchange(Job(0, 0.0, 1, 2, interactive=False))
    one.feed(b"".join(FATES[what]), 1.0)
    if what == "lost":
        one.error = "the connection broke"
    else:
        one.end()
    one.ended.set()
    assert fate(one, "ab") == what.partition(" ")[0]
