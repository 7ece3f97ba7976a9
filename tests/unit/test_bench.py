"""`scripts/bench` names every failure and every wrong option, and keeps the key to itself."""

import json
import math
from pathlib import Path

import pytest

from scripts.benchmark.__main__ import main
from scripts.benchmark.client import RequestMaker, Shape
from scripts.benchmark.measurement import describe
from scripts.benchmark.options import parse
from scripts.benchmark.report import write_document
from scripts.benchmark.run import Load, put
from tests.http_server import END, Script, chunk, cutting, event, head, sending, serving, whole
from tests.tables import each

pytestmark = pytest.mark.nightly  # a tool


def maker(url: str, max_tokens: int) -> RequestMaker:
    """Requests for so many tokens."""
    return RequestMaker(f"{url}/v1", "k", Shape("m", max_tokens, prompt_chars=10), 1)


def _chat_event(content: str | None, **more: object) -> bytes:
    choices = [] if content is None else [{"index": 0, "delta": {"content": content}}]
    return event({"choices": choices, **more})


_CHAT = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    + b": a comment that keeps the connection alive\n\n"
    + b"id: 2\n"
    + _chat_event("one")
    + _chat_event('a quoted "usage" and data: [DONE]\n\n is only text')
    + _chat_event("three")
    + _chat_event(None, usage={"prompt_tokens": 5, "completion_tokens": 3})
    + b"data: [DONE]\n\n"
)


def _chunked(body: bytes) -> bytes:
    return head(transfer_encoding="chunked") + chunk(body) + END


@each(
    "script, max_tokens, error",
    [
        (sending(_chunked(_CHAT)), 3, ""),
        (
            sending(_chunked(_CHAT.removesuffix(b"data: [DONE]\n\n"))),
            3,
            "stream ended without its last event",
        ),
        (cutting(_chunked(_CHAT).removesuffix(END)), 3, "broken response"),
        (sending(_chunked(_CHAT)), 4, "wrong length: 3 of 4 tokens"),
        (sending(whole(429, b"full", "text/plain")), 3, "HTTP 429: full"),
        (sending(b"SSH-2.0-nonsense\r\n\r\n"), 3, "broken response"),
    ],
)
async def test_every_failure_is_named(script: Script, max_tokens: int, error: str) -> None:
    with serving(script) as server:
        asked = maker(server.url, max_tokens)
        found = describe("s", 1, await put(asked, Load(users=2, window_s=None), requests=4))
    assert (found.requests, found.errors) == (4, 4 if error else 0)
    assert all(kind.startswith(error) for kind in found.error_kinds)


@each(
    "words, said",
    [
        ("", "nothing to measure"),
        ("--serve --against bare-vllm --batching", "in front of one system"),
        ("--url http://h/v1 --batching serial,magic", "'magic' is no batcher"),
        ("--url http://h/v1 --load-percent 10", "needs --batching"),
        ("--virtual --batching --serve", "in front of one system"),
        ("--virtual --serve", "--virtual needs --batching"),
        ("--url http://h/v1 --long-among-short", "needs --serve"),
        ("--url http://h/v1 --set a.b=1", "--set needs --serve"),
        ("--virtual --batching --rate 3", "has no --rate"),
        ("--url http://h/v1 --idle", "--idle needs systems"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(words.split())
    assert said in capsys.readouterr().err


@each("given", [["--api-key", "sk-secret"], ["--api-key=sk-secret"]])
def test_the_key_does_not_come_into_the_report(given: list[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--url", "http://h/v1", *given, "--json", str(file)]
    write_document(parse(words), ["scripts/bench", *words], rows=[math.nan])
    assert "secret" not in file.read_text()
    found = json.loads(file.read_text())
    assert (found["command"][:3], found["rows"]) == (["scripts/bench", *words[:2]], [None])


def test_a_comparison_in_virtual_time_prints_what_it_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--virtual", "--batching", "async:8,hybrid:8", "--load-percent", "500"]
    assert main([*words, "--duration-s", "2", "--rounds", "2", "--concurrency", "4,16"]) == 0
    said = capsys.readouterr().out
    assert "| 500 % | hybrid:8 | async:8 | tokens/s | 1.0" in said
    assert "nan" not in said
    assert not math.isnan(float(said.split("100 %: ")[1].split()[0]))
    assert main(["--virtual", "no-such", "--batching"]) == 2
    assert "no engine no-such" in capsys.readouterr().err
