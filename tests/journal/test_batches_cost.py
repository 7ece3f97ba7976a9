"""How soon a batch begins where nothing else runs, what a line costs beside a direct request, and
what Redis has of it.

python -m pytest -s tests/journal/test_batches_cost.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from redis import Redis

from serve_app.batches.job import _A_TAKE, _FEW
from serve_app.batches.leading import Closed, Marked
from serve_app.batches.lines import MAX_LINES
from serve_app.batches.record import BatchState
from serve_app.batches.segments import MOST_LINES as A_SEGMENT
from serve_app.contract import CHATS, AttemptResult
from serve_app.files.files import new_file_id
from serve_app.journal.usage import Usage
from serve_app.local.redis_server import as_operator
from tests.journal.batching import bench
from tests.journal.in_process import Around, Door, in_process, settings_of
from tests.journal.journal_helpers import World
from tests.waiting import eventually

pytestmark = pytest.mark.clock

SLOTS, TOKENS = 16, 32
BATCHES = 10
LINES, ROUNDS, MOST_RATIO = 600, 5, 1.1
MOST_LINE_BYTES = 64
CLIENT = f"""
import asyncio, sys
import httpx
async def main():
    url, many, body = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
    headers = {{"content-type": "application/json"}}
    async with httpx.AsyncClient(base_url=url, timeout=180) as http:
        async def client():
            nonlocal many
            while many > 0:
                many -= 1
                (await http.post("{CHATS}", content=body, headers=headers)).raise_for_status()
        await asyncio.gather(*(client() for _ in range({2 * SLOTS})))
asyncio.run(main())
"""
"""In a process of its own, whose time is not counted."""


def chat(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "hermes-tiny", "messages": messages, "max_tokens": TOKENS}


def line(number: int) -> dict[str, Any]:
    return {"custom_id": f"{number}", "method": "POST", "url": CHATS, "body": chat("What is it?")}


def same(_: str, answer: Awaitable[AttemptResult]) -> Awaitable[AttemptResult]:
    return answer


@asynccontextmanager
async def service(
    redis_url: str, namespace: str, folder: Path, around: Around = same
) -> AsyncIterator[Door]:
    settings = settings_of(
        redis_url,
        namespace,
        engine={"kind": "simulated", "args": {"tokens_per_s": 1_000.0}},
        workers={"max_running_requests": SLOTS},
        files={"storage": str(folder)},
    )
    async with in_process(settings, around=around) as made:
        await over(made, await created(made, 1))  # somebody leads by then
        yield made


async def created(d: Door, many: int) -> str:
    """The id of a batch with so many lines."""
    text = b"".join(json.dumps(line(n)).encode() + b"\n" for n in range(many))
    files = {"file": ("in.jsonl", text)}
    file = (await d.http.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
    asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
    answer = await d.http.post("/v1/batches", json=asked)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def over(d: Door, batch_id: str) -> None:
    """All of its lines have an answer."""

    async def counts() -> dict[str, int] | None:
        await asyncio.sleep(0.2)  # looking costs, too
        batch = (await d.http.get(f"/v1/batches/{batch_id}")).json()
        return batch["request_counts"] if batch["status"] == "completed" else None

    found = await eventually(counts)
    assert found["completed"] == found["total"] > 0


async def test_the_first_line_begins_within_two_seconds(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    begun_s = list[float]()

    def around(_: str, answer: Awaitable[AttemptResult]) -> Awaitable[AttemptResult]:
        begun_s.append(time.perf_counter())
        return answer

    async with service(redis_url, namespace, tmp_path, around) as d:
        waits_s = list[float]()
        for _ in range(BATCHES):
            begun_s.clear()
            asked_s = time.perf_counter()
            await over(d, await created(d, 3))
            waits_s.append(begun_s[0] - asked_s)
    print(f"\nfirst_line_p50_s={median(waits_s):.3f} first_line_max_s={max(waits_s):.3f}")
    assert max(waits_s) <= 2.0


async def test_a_line_costs_hardly_more_than_a_request(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    """CPU of ingress and worker, from the upload to the output file; Redis's is reported."""

    async def direct(d: Door) -> None:
        given = str(d.http.base_url), str(LINES), json.dumps(chat("What is it?"))
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, *given)
        assert await client.wait() == 0

    async def batch(d: Door) -> None:
        await over(d, await created(d, LINES))

    def redis_s() -> float:
        with Redis.from_url(as_operator(redis_url), protocol=2) as client:
            used = client.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])

    async def cost_ms(run: Callable[[Door], Awaitable[None]]) -> tuple[float, float]:
        began_s, redis_began_s = time.process_time(), redis_s()
        await run(d)
        used_s = time.process_time() - began_s, redis_s() - redis_began_s
        return used_s[0] * 1e3 / LINES, used_s[1] * 1e3 / LINES

    async with service(redis_url, namespace, tmp_path) as d:
        rounds = [(*await cost_ms(direct), *await cost_ms(batch)) for _ in range(ROUNDS + 1)][1:]
    direct_ms, redis_direct_ms, line_ms, redis_line_ms = map(median, zip(*rounds, strict=True))
    ratio = line_ms / direct_ms
    print(f"\ndirect_cpu_ms={direct_ms:.3f} line_cpu_ms={line_ms:.3f} ratio={ratio:.3f}", end=" ")
    print(f"redis_direct_cpu_ms={redis_direct_ms:.3f} redis_line_cpu_ms={redis_line_ms:.3f}")
    assert ratio <= MOST_RATIO


async def test_what_redis_has_of_a_line(w: World, tmp_path: Path) -> None:
    """Of one of the largest batch, in each of its states."""
    async with bench(w, tmp_path) as at:
        leading = at.runner().parts.leading
        assert await leading.lead()
        batch, found = await at.create(["p"]), dict[str, float]()

        async def measure(what: str) -> int:
            used = await used_bytes(w, ["batch*", "open_batches:*"])
            found[what] = used.total() / MAX_LINES
            return used["batch_lines"]

        assert await leading.checked(batch, MAX_LINES, 1, 0) is None
        await measure("not_begun")
        most = w.settings.batches.max_in_flight + _A_TAKE + _FEW
        taken = deque(await leading.take(batch, most))
        found["of_those_taken"] = await measure("most_taken") / most
        for number in range(MAX_LINES // 2 // A_SEGMENT):
            places = [taken.popleft() for _ in range(A_SEGMENT)]
            name = f"{number:016x}-{7 << 20}-{8 << 20}"
            marked = Marked(places, A_SEGMENT, 0, Usage(1, 1, 1, 1, 1), ())
            await leading.mark(batch, name, marked)
            taken += await leading.take(batch, most - len(taken))
        await measure("half_done")
        while more := await leading.take(batch, most):
            taken += more
        await measure("half_done_and_the_rest_taken")
        closed = await leading.close(
            batch, Closed(BatchState.EXPIRED, new_file_id(), new_file_id())
        )
        await leading.over(batch, closed, len(taken))
        await measure("over")
        await leading.stop()
    print("", *(f"{what}_bytes_a_line={size:.2f}" for what, size in found.items()))
    assert max(found.values()) <= MOST_LINE_BYTES


async def test_what_redis_has_of_the_request_of_a_line(w: World, tmp_path: Path) -> None:
    """While it waits and while it runs; nothing once its result is in a segment."""
    prompts = [f"p{number:02}" for number in range(SLOTS)]
    requests = ["j:*", "b:*", "i:*", "m:*"]
    async with bench(w, tmp_path, capacity=0) as waiting, waiting.leader():
        batch = await waiting.create(prompts)
        await eventually(lambda: waiting.accepted.total() == SLOTS)
        waits = await used_bytes(w, requests)
    async with bench(w, tmp_path, SLOTS, "ingress-2", "replica-2") as at, at.leader():
        at.worker.held = {prompt: asyncio.Event() for prompt in prompts}
        await eventually(lambda: len(at.worker.begun) == SLOTS)
        runs = await used_bytes(w, requests)
        for held in at.worker.held.values():
            held.set()
        await at.over(batch)
        assert await used_bytes(w, requests) == {}
    for what, used in (("waits", waits), ("runs", runs)):
        print(f" {what}:", *(f"{kind}_bytes={size / SLOTS:.0f}" for kind, size in used.items()))


async def used_bytes(w: World, patterns: Sequence[str]) -> Counter[str]:
    """Memory of the keys of these patterns, by kind."""
    found, namespace = Counter[str](), w.settings.namespace
    for pattern in patterns:
        async for key in w.operator.scan_iter(f"{namespace}:{pattern}"):
            kind = key.decode().split(":")[1]
            found[kind] += await w.operator.memory_usage(key, samples=0)
    return found
