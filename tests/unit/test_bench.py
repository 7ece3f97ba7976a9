"""The figures of `scripts/bench`, whose processes they are, and that it reads whatever a service
sends: it names every failure and every wrong option.
"""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

from scripts.benchmark.batchers import alike
from scripts.benchmark.client import Exchange, RequestMaker, Shape
from scripts.benchmark.compare import TOTAL, cost_model
from scripts.benchmark.measurement import Row, describe
from scripts.benchmark.options import parse
from scripts.benchmark.processes import classify
from scripts.benchmark.report import write_document
from scripts.benchmark.run import Load, put
from scripts.benchmark.stats import Latency, percentile, split_cost
from tests.http_server import END, Script, chunk, cutting, event, head, sending, serving, whole
from tests.tables import each

pytestmark = pytest.mark.nightly  # a tool


def maker(url: str, max_tokens: int) -> RequestMaker:
    """Requests for so many tokens."""
    return RequestMaker(f"{url}/v1", "k", Shape("m", max_tokens, prompt_chars=10), 1)


def row(requests: int, tokens: int, cpu_s: dict[str, float]) -> Row:
    """A row in which all else is 0."""
    latencies = dict.fromkeys(("ttft", "inter_token", "end_to_end", "interactive"), Latency(1, 2))
    values: dict[str, object] = dict.fromkeys((field.name for field in fields(Row)), 0.0)
    values |= latencies | {"requests": requests, "tokens": tokens, "cpu_s": cpu_s}
    return Row(**values)  # type: ignore[arg-type]


def test_a_percentile_is_interpolated_between_its_neighbours_and_nothing_has_none() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile(range(101), 99) == 99
    assert percentile([10.0, 20.0], 99) == pytest.approx(19.9)
    assert math.isnan(percentile([], 50))


def test_every_kind_of_process_gets_its_own_cost_and_the_generator_is_no_part_of_the_sum() -> None:
    rows = []
    for requests, tokens in ((100, 200), (10, 1280)):
        ingress, redis = requests * 1e-3 + tokens * 50e-6, tokens * 10e-6
        cpu_s = {"ingress replica": ingress, "redis-server": redis, "load generator": 5.0}
        rows.append(row(requests, tokens, cpu_s))
    found = {one.kind: (one.per_token_us, one.per_request_ms) for one in cost_model(rows)}
    assert found["ingress replica"] == (50.0, 1.0)
    assert found["redis-server"] == (10.0, 0.0)
    assert found[TOTAL] == (60.0, 1.0)
    with pytest.raises(ValueError, match="must exceed"):
        split_cost(128, 1.0, 128, 1.0)


@each(
    "command_line, kind",
    [
        ("redis-server *:6379", "redis-server"),
        ("/usr/bin/redis-server 127.0.0.1:7001", "redis-server"),
        ("/venv/bin/haproxy -W -f haproxy.cfg", "haproxy"),
        ("ray::ServeReplica:default:Ingress", "ingress replica"),
        ("ray::ServeReplica:default:OpenAiIngress.handle_request_streaming", "ingress replica"),
        ("ray::ServeReplica:hermes:Worker", "worker replica"),
        ("ray::ServeReplica:ingress:Worker.execute", "worker replica"),
        ("ray::ServeReplica:default:LLMServer:tiny", "worker replica"),
        ("ray::ServeReplica:default:Autoscaler", "other replica"),
        ("ray::ServeController.listen_for_change", "serve controller"),
        ("ray::ProxyActor", "serve proxy"),
        ("ray::HAProxyManager", "serve proxy"),
        ("ray::IDLE", "ray other"),
        ("ray::DashboardAgent", "ray daemons"),
        ("/venv/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "ray daemons"),
        ("/venv/ray/core/src/ray/gcs/gcs_server --log_dir=x", "ray daemons"),
        ("/venv/bin/python -u /venv/ray/dashboard/dashboard.py --host=x", "ray daemons"),
        ("VLLM::EngineCore", "engine core"),
        ("VLLM::EngineCore_DP0", "engine core"),
        ("VLLM::Worker_TP3", "engine worker"),
        ("/venv/bin/python -m vllm.entrypoints.openai.api_server --model m", "vllm api server"),
        ("VLLM::APIServer", "vllm api server"),
        ("/usr/bin/vim redis-server.conf", "other"),
        ("", "other"),
    ],
)
def test_a_command_line_tells_the_kind_of_process(command_line: str, kind: str) -> None:
    assert classify(command_line) == kind


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


@each("newline", [b"\n", b"\r\n"])
@each("size", [1, 2, 3, 7, 16, 61, 10_000])
def test_the_count_does_not_depend_on_where_the_network_cuts_the_stream(
    size: int, newline: bytes
) -> None:
    body, found = _CHAT.replace(b"\n", newline), Exchange(next(alike(3)))
    for at in range(0, len(body), size):
        found.feed(body[at : at + size], 1.0)
    found.end()
    assert (found.events, found.tokens, found.prompt_tokens) == (3, 3, 5)
    assert (found.done, found.error) == (True, None)


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
