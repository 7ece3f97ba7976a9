"""vLLM's own scheduler goes by our classes, and what we report of its memory is what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY

from serve_app.contract import EngineReport
from serve_app.policy.classes import CLASSES, engine_priority
from tests.engine.resume_helpers import EngineThread, attempt, request

BLOCKS = 24
LONGEST = 512
PATH = "/v1/completions"


class SmallEngine(EngineThread):
    """An engine with little memory."""

    def __init__(self) -> None:
        super().__init__(
            max_model_len=LONGEST,
            num_gpu_blocks_override=BLOCKS,
            block_size=32,
            enable_prefix_caching=False,
        )

    def report(self) -> EngineReport:
        found = self.engine.report("worker-1")
        assert found is not None
        return found


@pytest.fixture(scope="module")
def small() -> Iterator[SmallEngine]:
    made = SmallEngine()
    yield made
    made.close()


def asking(prompt_tokens: int, output_tokens: int, request_class: str) -> Any:
    body = {
        "model": "hermes-tiny",
        "prompt": [65 + number % 26 for number in range(prompt_tokens)],
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return request(PATH, body, request_class=request_class)


@pytest.mark.clock  # the first request must still run when the other five have come
def test_a_realtime_request_passes_batch_requests_that_wait_inside_the_engine(
    small: SmallEngine,
) -> None:
    """One that fills the memory runs, and five wait when the urgent one comes."""
    ended: list[str] = []

    async def ask(name: str, entry: Any) -> None:
        await attempt(small, [entry], name)
        ended.append(name)

    async def main() -> EngineReport:
        first = asyncio.create_task(ask("req_first", asking(400, 100, "batch")))
        while not small.report().running:
            await asyncio.sleep(0.005)
        others = [
            asyncio.create_task(ask(f"req_batch_{number}", asking(400, 40, "batch")))
            for number in range(5)
        ]
        while small.report().waiting < 5:
            await asyncio.sleep(0.005)
            assert not first.done(), "it ended before the others came"
        busy = small.report()
        await ask("req_urgent", asking(400, 5, "realtime"))
        await asyncio.gather(first, *others)
        return busy

    busy = small.run(main())
    assert ended[:2] == ["req_first", "req_urgent"]
    assert (busy.kv_tokens, busy.max_model_len) == (BLOCKS * 32, LONGEST)
    assert 400 <= busy.used_tokens <= busy.kv_tokens
    assert (busy.running, busy.waiting) == (1, 5)
    assert small.report() == EngineReport("worker-1", BLOCKS * 32, LONGEST), "nothing runs"


@pytest.mark.nightly  # an engine of its own
def test_preemptions_are_counted_as_vllm_counts_them(small: SmallEngine) -> None:
    """Six answers that fit into its memory when they begin, and no more when they are long."""

    async def main() -> None:
        asked = [asking(60, 300, "standard") for _ in range(6)]
        await asyncio.gather(
            *(attempt(small, [entry], f"req_p{number}") for number, entry in enumerate(asked))
        )

    small.run(main())
    counted = sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:num_preemptions_total"
    )
    assert small.report().preemptions == counted > 0


def test_the_class_is_the_priority_in_every_attempt(world: EngineThread) -> None:
    for request_class in CLASSES:
        name = f"req_of_the_class_{request_class}"
        whole = world.run(attempt(world, [asking(8, 12, request_class)], name))
        cut = whole.entries[: len(whole.entries) // 2]
        assert world.run(attempt(world, cut, name)).body == whole.body
        (given,) = {tuple(found) for key, found in world.priorities.items() if name in key}
        assert given == (engine_priority(request_class),) * 2


def test_sequences_of_a_request_of_several_go_behind_those_of_their_class(
    world: EngineThread,
) -> None:
    first, behind = engine_priority("standard"), engine_priority("standard", True)
    assert engine_priority("realtime", True) < first < behind < engine_priority("batch")
    for name, several, expected in (
        ("answers", {"n": 2}, {behind}),
        ("prompts", {"prompt": [[65, 66], [67, 68], [69]]}, {first, behind}),
    ):
        body = {"model": "hermes-tiny", "prompt": [65, 66], "max_tokens": 4, **several}
        request_id = f"req_of_several_{name}"
        world.run(attempt(world, [request(PATH, body)], request_id))
        given = [set(found) for key, found in world.priorities.items() if request_id in key]
        assert set().union(*given) == expected
