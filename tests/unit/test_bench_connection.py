"""`scripts/bench` reads whatever a service sends; it names every failure and every wrong option."""

import asyncio
import os
import signal

import pytest

from scripts.benchmark import interrupts
from scripts.benchmark.client import EventCounter, RequestMaker, Shape
from scripts.benchmark.measurement import describe
from scripts.benchmark.options import parse
from scripts.benchmark.report import without_secrets
from scripts.benchmark.run import Load, put
from tests.http_server import END, Script, chunk, cutting, event, head, sending, serving, whole
from tests.tables import each

pytestmark = pytest.mark.nightly  # a tool


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


class TestStreams:
    @each("newline", [b"\n", b"\r\n"])
    @each("size", [1, 2, 3, 7, 16, 61, 10_000])
    def test_the_count_does_not_depend_on_where_the_network_cuts_the_stream(
        self, size: int, newline: bytes
    ) -> None:
        body = _CHAT.replace(b"\n", newline)
        counter = EventCounter()
        tokens = sum(
            counter.feed(body[start : start + size]) for start in range(0, len(body), size)
        )
        assert tokens == 3
        assert counter.usage == {"prompt_tokens": 5, "completion_tokens": 3}
        assert counter.done
        assert counter.error is None

    def test_the_role_alone_is_not_the_first_token(self) -> None:
        counter = EventCounter()
        assert counter.feed(_CHAT[: _CHAT.index(b"id: 2")]) == 0
        assert counter.feed(b"id: 2\n" + _chat_event("one")) == 1

    def test_an_error_event_is_an_error_even_when_the_stream_ends_well(self) -> None:
        counter = EventCounter()
        counter.feed(
            _chat_event("one") + b'data: {"error":{"message":"engine died"}}\n\ndata: [DONE]\n\n'
        )
        assert counter.error == "error event: engine died"

    def test_a_token_that_completes_no_character_still_counts(self) -> None:
        assert EventCounter().feed(_chat_event("") + _chat_event("b")) == 2


class TestRequests:
    def test_equal_seeds_make_equal_requests_and_no_two_of_a_run_are_alike(self) -> None:
        shape = Shape("m", max_tokens=8, prompt_chars=200)
        first, again = (RequestMaker("http://h:1/v1", "k", shape, seed=5) for _ in range(2))
        requests = [first.next() for _ in range(20)]
        assert requests == [again.next() for _ in range(20)]
        assert len(set(requests)) == 20


def _chunked(body: bytes) -> bytes:
    return head(transfer_encoding="chunked") + chunk(body) + END


async def _errors_of(script: Script, *, max_tokens: int = 3) -> list[str | None]:
    with serving(script) as server:
        maker = RequestMaker(f"{server.url}/v1", "k", Shape("m", max_tokens, 10), 0)
        row = describe("s", 1, await put(maker, Load(users=2, window_s=None), requests=4))
    assert row.requests == 4
    return [error for error, count in row.error_kinds.items() for _ in range(count)]


@each(
    "script, max_tokens, errors",
    [
        (sending(_chunked(_CHAT)), 3, []),
        (
            sending(_chunked(_CHAT.removesuffix(b"data: [DONE]\n\n"))),
            3,
            ["stream ended without its last event"] * 4,
        ),
        (
            cutting(_chunked(_CHAT).removesuffix(END)),
            3,
            ["connection closed before the response ended"] * 4,
        ),
        (sending(_chunked(_CHAT)), 4, ["wrong length: 3 of 4 tokens"] * 4),
        (sending(whole(429, b"full", "text/plain")), 3, ["HTTP 429: full"] * 4),
        (sending(b"SSH-2.0-nonsense\r\n\r\n"), 3, ["broken response"] * 4),
    ],
)
async def test_every_failure_is_named(script: Script, max_tokens: int, errors: list[str]) -> None:
    found = await _errors_of(script, max_tokens=max_tokens)
    assert len(found) == len(errors)
    assert all(str(one).startswith(said) for one, said in zip(found, errors, strict=True))


@each(
    "words, said",
    [
        ("", "nothing to measure"),
        ("--serve --against bare-vllm --batching", "in front of one system"),
        ("--url http://h/v1 --batching serial,magic", "'magic' is no batcher"),
        ("--url http://h/v1 --load-percent 10", "needs --batching"),
        ("--virtual --batching --serve", "in front of one system"),
        ("--virtual --serve", "--virtual needs --batching"),
        ("--serve --against bare-vllm --order backlog", "measures one system"),
        ("--url http://h/v1 --set a.b=1", "--set needs --serve"),
        ("--serve --order backlog --batching", "has no --batching"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(words.split())
    assert said in capsys.readouterr().err


def test_what_is_not_given_follows_from_what_is() -> None:
    assert parse(["--url", "http://h/v1"]).rounds == 1
    assert parse(["--url", "http://h/v1", "--against", "bare-vllm"]).rounds == 3
    assert len(parse(["--url", "http://h/v1", "--batching"]).batching) == 7
    assert parse(["--virtual", "--batching"]).virtual == "tiny-cpu"
    ordered = parse(["--serve", "--order", "long-among-short", "--set", "a.b=1"])
    assert ordered.settings == ("workers.max_running_requests=4", "a.b=1")
    assert ordered.rounds == 7


@each("given", [["--api-key", "sk-secret"], ["--api-key=sk-secret"]])
def test_the_key_does_not_come_into_the_report(given: list[str]) -> None:
    shown = without_secrets(["--url", "http://h/v1", *given, "--seed", "1"])
    assert "secret" not in " ".join(shown)
    assert shown[-2:] == ["--seed", "1"]


class TestInterrupts:
    def test_a_signal_in_the_middle_of_a_run_ends_it_and_later_ones_are_ignored(self) -> None:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        async def interrupted() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

        try:
            with pytest.raises(KeyboardInterrupt):
                interrupts.run(interrupted())
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
