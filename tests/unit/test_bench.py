"""The figures of `scripts/bench`, whose processes they are, and that it reads whatever a service
sends: it names every failure and every wrong option.
"""

import asyncio
import math
import os
import signal
from itertools import pairwise

import pytest

from scripts.benchmark import interrupts
from scripts.benchmark.client import EventCounter, RequestMaker, Shape
from scripts.benchmark.compare import TOTAL, cost_model, ratios
from scripts.benchmark.measurement import describe
from scripts.benchmark.options import parse
from scripts.benchmark.processes import Process, Scope, classify, cpu_by_kind, descendants, members
from scripts.benchmark.report import without_secrets
from scripts.benchmark.run import Load, put
from scripts.benchmark.stats import percentile, poisson_arrivals_s, round_ratios, split_cost
from tests.http_server import END, Script, chunk, cutting, event, head, sending, serving, whole
from tests.tables import each
from tests.unit.bench_engine import maker, row

pytestmark = pytest.mark.nightly  # a tool


def test_a_percentile_is_interpolated_between_its_neighbours_and_nothing_has_none() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile(range(101), 99) == 99
    assert percentile([10.0, 20.0], 99) == pytest.approx(19.9)
    assert math.isnan(percentile([], 50))


def test_the_first_system_is_compared_with_each_of_the_others_round_by_round() -> None:
    speeds = {"a": (200.0, 20.0, 300.0), "b": (100.0, 10.0, 100.0), "c": (400.0, 40.0, 600.0)}
    rows = [
        row(name, round=number, tokens_per_s=speed)
        for name, speed_of_rounds in speeds.items()
        for number, speed in enumerate(speed_of_rounds, 1)
    ]
    found = {ratio.theirs: ratio for ratio in ratios(rows) if ratio.measure == "tokens/s"}
    assert found["b"].per_round == (2.0, 2.0, 3.0)
    assert (found["b"].spread.median, found["c"].spread.median) == (2.0, 0.5)
    assert round_ratios([1.0, 4.0], [0.0, 2.0]) == [2.0], "a peer measured nothing in one round"


def test_every_kind_of_process_gets_its_own_cost_and_the_generator_is_no_part_of_the_sum() -> None:
    rows = []
    for requests, tokens in ((100, 200), (10, 1280)):
        ingress, redis = requests * 1e-3 + tokens * 50e-6, tokens * 10e-6
        cpu_s = {"ingress replica": ingress, "redis-server": redis, "load generator": 5.0}
        rows.append(row("own", round=1, requests=requests, tokens=tokens, cpu_s=cpu_s))
    found = {one.kind: (one.per_token_us, one.per_request_ms) for one in cost_model(rows)}
    assert found["ingress replica"] == (50.0, 1.0)
    assert found["redis-server"] == (10.0, 0.0)
    assert found[TOTAL] == (60.0, 1.0)
    with pytest.raises(ValueError, match="must exceed"):
        split_cost(128, 1.0, 128, 1.0)


def test_arrivals_are_those_of_independent_users_and_equal_for_equal_seeds() -> None:
    arrivals_s = poisson_arrivals_s(100, 50, seed=1)
    assert arrivals_s == poisson_arrivals_s(100, 50, seed=1) != poisson_arrivals_s(100, 50, seed=2)
    assert arrivals_s == sorted(arrivals_s)
    assert 0 < arrivals_s[0] < arrivals_s[-1] < 50
    assert len(arrivals_s) == pytest.approx(5000, rel=0.05)
    gaps_s = [later - earlier for earlier, later in pairwise(arrivals_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    deviation_s = math.sqrt(sum((gap_s - mean_s) ** 2 for gap_s in gaps_s) / len(gaps_s))
    assert deviation_s == pytest.approx(mean_s, rel=0.1)
    with pytest.raises(ValueError, match="above 0"):
        poisson_arrivals_s(0, 1, seed=0)


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


def _table(*lines: tuple[int, int, float, str]) -> dict[int, Process]:
    return {pid: Process(pid, parent, 7, cpu_s, command) for pid, parent, cpu_s, command in lines}


def test_a_scope_is_its_roots_and_all_that_descends_from_them() -> None:
    table = _table((91, 1, 0, "a"), (92, 91, 0, "b"), (93, 92, 0, "c"), (94, 1, 0, "d"))
    assert descendants(table, [91, 99]) == {91, 92, 93}


@each(
    "lines, scope, others, found",
    [
        # A mark in the arguments finds what left its parent,
        (
            [(91, 1, 0, "raylet --dir=/state/x"), (92, 91, 0, "ray::IDLE"), (93, 1, 0, "y")],
            Scope(marks=("/state/x",)),
            [],
            {91, 92},
        ),
        # and neither this process nor the shell that was given it.
        (
            [
                (os.getppid(), 1, 0, "bash --match /state/x"),
                (os.getpid(), os.getppid(), 0, "/state/x"),
                (91, os.getppid(), 0, "z"),
            ],
            Scope(marks=("/state/x",)),
            [],
            set(),
        ),
        # Without roots or marks every known kind counts that no other system owns.
        (
            [(91, 1, 0, "redis-server *:1"), (92, 1, 0, "redis-server *:2"), (93, 1, 0, "vim")],
            Scope(),
            [Scope(roots=frozenset({92}))],
            {91},
        ),
    ],
)
def test_a_scope_has_the_processes_of_one_system(
    lines: list[tuple[int, int, float, str]], scope: Scope, others: list[Scope], found: set[int]
) -> None:
    assert members(_table(*lines), scope, others) == found


def test_cpu_is_the_difference_of_two_readings_summed_by_kind() -> None:
    before = _table((1, 0, 5.0, "redis-server"), (2, 0, 1.0, "VLLM::EngineCore"))
    after = _table((1, 0, 7.5, "redis-server"), (2, 0, 2.0, "VLLM::EngineCore"))
    after |= _table((3, 0, 0.5, "redis-server"))
    assert cpu_by_kind(before, after, {1, 2, 3}) == {"redis-server": 3.0, "engine core": 1.0}
    reborn = {1: Process(1, 0, 8, 0.25, "redis-server")}
    assert cpu_by_kind(before, reborn, {1}) == {"redis-server": 0.25}, "another process's pid"


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
    body = _CHAT.replace(b"\n", newline)
    counter = EventCounter()
    assert sum(counter.feed(body[at : at + size]) for at in range(0, len(body), size)) == 3
    assert counter.usage == {"prompt_tokens": 5, "completion_tokens": 3}
    assert (counter.done, counter.error) == (True, None)


def test_a_role_is_no_token_a_part_of_a_character_is_one_and_an_error_event_is_an_error() -> None:
    counter = EventCounter()
    assert counter.feed(_CHAT[: _CHAT.index(b"id: 2")]) == 0
    assert counter.feed(b"id: 2\n" + _chat_event("") + _chat_event("b")) == 2
    counter.feed(b'data: {"error":{"message":"engine died"}}\n\ndata: [DONE]\n\n')
    assert counter.error == "error event: engine died", "even when the stream ends well"


def test_equal_seeds_make_equal_requests_and_no_two_of_a_run_are_alike() -> None:
    shape = Shape("m", max_tokens=8, prompt_chars=200)
    first, again = (RequestMaker("http://h:1/v1", "k", shape, seed=5) for _ in range(2))
    requests = [first.next() for _ in range(20)]
    assert requests == [again.next() for _ in range(20)]
    assert len(set(requests)) == 20


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
        (
            cutting(_chunked(_CHAT).removesuffix(END)),
            3,
            "connection closed before the response ended",
        ),
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


async def _interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()


def test_a_signal_in_the_middle_of_a_run_ends_it_and_later_ones_are_ignored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(_interrupted())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
