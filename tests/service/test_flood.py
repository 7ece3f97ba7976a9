"""What one tenant can do with legal requests alone: it costs no other tenant an answer, and no
process more memory than docs/operations.md says.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil
import pytest
from redis import Redis

from scripts.chaos_testing.parts import Parts
from serve_app.local import redis_server
from serve_app.local.environment import ROOT
from tests.service.busy import busy
from tests.service.flooding import ASKED
from tests.service.politeness import EMBEDDINGS, Polite
from tests.service.services import HELD, KEYS
from tests.service.support import CHAT, Running, asking
from tests.waiting import until

MIB = 1 << 20
WAITING = 3
AS_IT_WAS = {"realtime": 0, "standard": WAITING, "batch": 0}
REDIS_BYTES = 1024 * MIB
PAIRS = 10_000
FLOOD_S = 180
ROUNDS, ROUND_S = 5, 20
GROWTH_BYTES = {"ingress": (512 + 8 * 16 + 4 * 64 + 256) * MIB, "worker": 12 * 64 * MIB}
"""The most that a process takes more under load, with the settings of these services; see *What one
request may hold* in docs/operations.md.
"""


def flood(service: Running, phase: str, *args: object) -> subprocess.Popen[str]:
    """See tests/service/flooding.py; nicer, for the cores are shared."""
    module = ["nice", "-n", "10", sys.executable, "-m", "tests.service.flooding", phase]
    told = [service.url, service.keys["acme"], service.model, *args]
    command = [*module, *map(str, told)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def answers(process: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    out, _ = process.communicate()
    assert process.returncode == 0
    print(out)
    found: dict[str, dict[str, int]] = json.loads(out)
    return found


def depths(service: Running) -> dict[str, float]:
    """Waiting requests by class."""
    page = service.metrics()
    return {name: page.total("hermes_queue_depth", **{"class": name}) for name in AS_IT_WAS}


@pytest.mark.nightly
@pytest.mark.disturbs
def test_ten_thousand_cancelled_requests_leave_the_queue_as_it_was(simulated: Running) -> None:
    with busy(simulated) as held, simulated.client("zeta") as zeta:
        for _ in range(WAITING):
            held.waits(HELD, "standard")
        until("they wait", lambda: depths(simulated) == AS_IT_WAS)
        with flood(simulated, "cancel", PAIRS) as cancelling:
            accepted = 0
            while cancelling.poll() is None:
                with zeta.stream("POST", CHAT, json=asking(tokens=2, stream=True)) as mine:
                    assert mine.status_code == 200, mine.headers
                    assert zeta.delete(f"/v1/requests/{mine.headers['x-request-id']}").is_success
                accepted += 1
            found = answers(cancelling)
        assert found["deleted"] == {"200 cancelled": PAIRS}
        assert set(found["posted"]) <= {"200", "202"}
        assert accepted > 0
        until("the queue is what it was", lambda: depths(simulated) == AS_IT_WAS, 600)


@contextmanager
def growth(pids: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """The most bytes that a process of each kind took more than at the beginning, looked at twice a
    second.
    """
    stop = threading.Event()
    processes = {kind: [psutil.Process(pid) for pid in members] for kind, members in pids.items()}

    def used() -> dict[str, list[int]]:
        return {kind: [one.memory_info().rss for one in ps] for kind, ps in processes.items()}

    before, most = used(), dict.fromkeys(pids, 0)

    def watch() -> None:
        while not stop.wait(0.5):
            for kind, now in used().items():
                more = (a - b for a, b in zip(now, before[kind], strict=True))
                most[kind] = max(most[kind], *more)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


def costs_others_no_answer(service: Running, phase: str, path: str, seconds: int) -> None:
    parts = Parts(service.service)
    with Redis.from_url(redis_server.as_operator(service.service.redis_url), protocol=2) as redis:
        redis.config_set("maxmemory", REDIS_BYTES)
        pids = {kind: parts.pids(kind) for kind in ("ingress", "worker", "engine", "redis")}
        assert all(pids.values()), pids
        polite = Polite(service.url, KEYS["zeta"], service.model, path)
        with growth(pids) as most, polite, flood(service, phase, seconds) as sending:
            found = answers(sending)
        print({kind: more // MIB for kind, more in most.items()}, "MiB more at most")
        print(f"others: {len(polite.times_s)} answers, p99 {polite.p99_s:.1f} s")
        assert polite.wrong == []
        assert not any(status.startswith("5") for one in found.values() for status in one), found
        assert {kind: parts.pids(kind) for kind in pids} == pids
        assert all(most[kind] < bound for kind, bound in GROWTH_BYTES.items()), most
        assert redis.info("memory")["used_memory_peak"] < REDIS_BYTES


@pytest.mark.clock
@pytest.mark.disturbs
def test_a_flood_of_the_largest_legal_requests_costs_others_no_answer(flooded: Running) -> None:
    costs_others_no_answer(flooded, "largest", CHAT, FLOOD_S)


@pytest.mark.clock
@pytest.mark.disturbs
def test_a_thousand_long_answers_that_nobody_reads_cost_others_no_time(simulated: Running) -> None:
    parts, ratios = Parts(simulated.service), []
    with growth({"ingress": parts.pids("ingress")}) as most:
        for _ in range(ROUNDS):
            alone, beside = (Polite(simulated.url, KEYS["zeta"], simulated.model) for _ in "ab")
            with alone:
                time.sleep(ROUND_S)
            with flood(simulated, "unread", ROUND_S) as sending:
                assert sending.stdout is not None
                assert sending.stdout.readline() == f"{ASKED}\n"
                with beside:
                    print(answers(sending))
            assert alone.wrong == beside.wrong == []
            print(f"p99 {alone.p99_s:.3f} s alone, {beside.p99_s:.3f} s beside")
            ratios.append(beside.p99_s / alone.p99_s)
    print(f"{most['ingress'] // MIB} MiB more at most; p99 by {[f'{one:.2f}' for one in ratios]}")
    assert most["ingress"] < GROWTH_BYTES["ingress"]
    assert statistics.median(ratios) <= 1.2, ratios


@pytest.mark.clock
@pytest.mark.disturbs
def test_a_flood_of_embeddings_costs_others_no_answer(embedding: Running) -> None:
    costs_others_no_answer(embedding, "embeddings", EMBEDDINGS, FLOOD_S // 3)
