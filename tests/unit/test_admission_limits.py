"""How full Redis may get, and how many requests may wait."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from serve_app.admission.limits import AdmissionLimits, MemoryLimit, WaitingRequest
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.policy.overload import Asked
from serve_app.redis.configuration import FIELDS, warnings
from serve_app.redis.replies import Memory, parse_info
from serve_app.request_queue import Depth
from serve_app.settings import Settings
from tests.tables import each

MIB = 1 << 20
LIMIT = 1000 * MIB


def storage(used_mib: float, ingresses: int = 1, limit: int = LIMIT) -> MemoryLimit:
    found = MemoryLimit(Settings())
    found.told(Memory(int(used_mib * MIB), limit, "noeviction"), ingresses)
    return found


def refused(call: Any, *arguments: Any) -> Reason | None:
    try:
        call(*arguments)
    except RequestRefused as refusal:
        return refusal.reason if refusal.retry_after_s else None
    return None


@each(
    "used_mib, ingresses, body_mib, reason",
    [
        (770, 1, 16, None),
        (790, 1, 16, Reason.STORAGE_FULL),
        (770, 2, 16, Reason.STORAGE_FULL),
        (890, 1, 0.01, None),
        (901, 1, 0.01, Reason.STORAGE_FULL),
    ],
)
def test_requests_stop_before_redis_is_full_and_large_ones_first(
    used_mib: float, ingresses: int, body_mib: float, reason: Reason | None
) -> None:
    assert refused(storage(used_mib, ingresses).take, int(body_mib * MIB)) is reason


def test_what_was_admitted_counts_until_a_look_has_surely_seen_it() -> None:
    found = storage(730)
    taken = found.take(16 * MIB)
    assert refused(found.take, 24 * MIB) is Reason.STORAGE_FULL, "on its way it counts twice"
    found.looking()
    found.told(found.seen, 1)
    assert refused(found.take, 24 * MIB) is Reason.STORAGE_FULL, "it was on its way still"
    found.answered(taken)
    assert refused(found.take, 48 * MIB) is Reason.STORAGE_FULL, "the last look was before"
    found.looking()
    found.told(found.seen, 1)
    assert refused(found.take, 48 * MIB) is None


def test_what_the_engines_can_write_at_a_time_is_reserved_whole_and_the_rest_packed() -> None:
    found = storage(100)
    found.workers = 1
    found.told(found.seen, 1)
    taken = 0
    while refused(found.take, 0, 5 * MIB) is None:
        taken += 1
    places = Settings().workers.max_running_requests
    packed = (800 - 5 * places) * 30 // 5
    assert places + 0.9 * packed < taken < places + packed
    found.told(found.seen, 1, [5 * MIB] * taken)
    assert refused(found.take, 0, 5 * MIB) is Reason.STORAGE_FULL, "they write still"
    found.told(found.seen, 1, [5 * MIB] * (taken - 100))
    assert refused(found.take, 0, 5 * MIB) is None
    found.told(found.seen, 2, [5 * MIB] * places)
    assert refused(found.take, 0, 5 * MIB) is None, "half of the places are another ingress's"


@each("output_mib, most_mib", [(1, 1), (80, 64)])
def test_no_answer_is_so_long_that_it_could_never_be_asked_for(
    output_mib: int, most_mib: int
) -> None:
    assert storage(0).most_of_one(output_mib * MIB) == most_mib * MIB
    assert storage(0, limit=100 * MIB).most_of_one(output_mib * MIB) <= 20 * MIB


def test_a_redis_that_does_not_say_how_full_it_is_has_no_bound() -> None:
    found = MemoryLimit(Settings())
    found.told(None, 1)
    assert refused(found.take, 16 * MIB) is None


@pytest.mark.parametrize(
    ("limit", "words"),
    [(0, ""), (64 * MIB, "too few for four bodies"), (100 * MIB, "")],
)
def test_a_problem_with_redis_is_logged_once(
    limit: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = storage(1, limit=limit)
    found.told(found.seen, 1)
    assert len(found.warnings) == len(caplog.records) == bool(words)
    assert words in "".join(found.warnings)


INFO = {
    "used_memory": "100",
    "mem_not_counted_for_evict": "30",
    "maxmemory": "500",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
}


def test_redis_counts_neither_its_files_buffer_nor_its_replicas() -> None:
    assert Memory.from_info(INFO) == Memory(70, 500, "noeviction")


@each(
    "field, value, words",
    [
        ("aof_enabled", "0", "appendonly is no"),
        ("maxmemory", "0", "maxmemory is 0"),
        ("maxmemory_policy", "allkeys-lru", "maxmemory-policy is allkeys-lru"),
        *((field, None, f"does not tell {field}, so {then}") for field, then in FIELDS.items()),
        ("maxmemory", "5gb", ""),
    ],
)
def test_what_info_says_or_leaves_out_is_a_warning(
    field: str, value: str | None, words: str
) -> None:
    info = {name: told for name, told in INFO.items() if (name, value) != (field, None)}
    if value is not None:
        info[field] = value
    found = warnings(info)
    assert len(found) == bool(words), found
    assert words in "".join(found)
    known = isinstance(Memory.from_info(info), Memory)
    assert known == (field not in ("used_memory", "maxmemory") or value == "0")


def test_a_redis_that_refuses_info_is_a_warning() -> None:
    assert warnings(None) == [
        "it refuses INFO to this user, so no request is refused because Redis is full"
    ]
    assert parse_info(b"# Memory\r\nused_memory:100\r\n\r\n") == {"used_memory": "100"}


def room(required: bool = True, ingresses: int = 1, **queue: Any) -> AdmissionLimits:
    auth = {"required": required, "keys_file": "keys"}
    found = AdmissionLimits(Settings.model_validate({"auth": auth, "queue": queue}))
    found.ingresses = ingresses
    return found


def of(tenant: str, sequences: int = 1) -> Asked:
    return Asked("standard", tenant, sequences=sequences)


def fill(
    found: AdmissionLimits, tenant: str, body_bytes: int, request_class: str = "standard"
) -> tuple[int, Reason]:
    """How many requests are admitted before one is refused, and the reason."""
    for number in range(10_000):
        reason = refused(found.wait, Asked(request_class, tenant), body_bytes)
        if reason is not None:
            return number, reason
    raise AssertionError("there is no bound")


@pytest.mark.parametrize(("ingresses", "first", "second"), [(1, 5, 5), (2, 2, 2)])
def test_a_tenant_has_its_share_of_the_bytes_that_may_wait_and_no_more(
    ingresses: int, first: int, second: int
) -> None:
    found = room(ingresses=ingresses, max_waiting_bytes_standard=10 * MIB)
    assert fill(found, "acme", MIB) == (first, Reason.TENANT_LIMIT)
    assert fill(found, "umbrella", MIB) == (second, Reason.TENANT_LIMIT)
    assert fill(found, "acme", MIB, "batch")[0] == 512 // ingresses, "another class is another line"


def test_a_tenants_share_of_the_line_is_in_sequences() -> None:
    """Of an embeddings request with 2,048 texts count as many as an engine runs at a time (128)."""
    found = room(max_waiting_standard=1_000, max_tenant_share=0.5)
    assert refused(found.wait, of("acme", 2_048), 10) is None
    assert refused(found.wait, of("acme", 128), 10) is None
    request = found.wait(of("acme", 240), 10)
    assert refused(found.wait, of("acme", 128), 10) is Reason.TENANT_LIMIT
    assert refused(found.wait, of("umbrella", 128), 10) is None
    found.leave(request)
    assert refused(found.wait, of("acme", 128), 10) is None
    assert refused(found.wait, of("acme", 117), 10) is Reason.TENANT_LIMIT
    assert refused(found.wait, of("acme", 116), 10) is None


def test_without_api_keys_only_the_class_is_bounded() -> None:
    found = room(required=False, max_waiting_standard=3, max_waiting_bytes_standard=10 * MIB)
    assert fill(found, "default", MIB) == (10, Reason.QUEUE_FULL)


def test_leaving_frees_capacity_only_once() -> None:
    found = room(required=False, max_waiting_bytes_standard=10 * MIB)
    requests: list[WaitingRequest] = [found.wait(of("default"), MIB) for _ in range(10)]
    for _ in range(3):
        found.leave(requests[0])
    assert fill(found, "default", MIB) == (1, Reason.QUEUE_FULL)
    for request in requests:
        found.leave(request)
    assert len(found.waiting) == 1


def test_no_class_takes_more_than_half_of_redis() -> None:
    found = room(required=False)
    found.memory = storage(0, limit=100 * MIB)
    assert fill(found, "default", MIB) == (40, Reason.QUEUE_FULL)
    assert fill(found, "default", MIB, "batch") == (40, Reason.QUEUE_FULL)


def test_the_first_always_has_room() -> None:
    found = room(ingresses=8, max_waiting_bytes_standard=1, max_waiting_standard=1)
    assert refused(found.wait, of("acme"), 16 * MIB) is None


class Lines:
    """Queues of a given length."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting

    async def look(self) -> tuple[dict[str, Depth], None]:
        return {"batch": Depth(self.waiting, 0, 0.0)}, None


@each("free, reason", [(1, None), (0, Reason.QUEUE_FULL)])
async def test_a_line_takes_as_many_as_it_may_hold_and_no_more(
    free: int, reason: Reason | None
) -> None:
    settings = Settings()
    limits = AdmissionLimits(settings)
    lines: Any = Lines(settings.queue.max_waiting("batch") - free)

    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await limits.watch(lines, lambda: (1, 1))
    assert refused(limits.enter, Asked("batch", "acme"), 10) is reason
    assert refused(limits.enter, Asked("realtime", "acme"), 10) is None, (
        "another class has a line of its own"
    )


def test_what_is_refused_for_lack_of_storage_does_not_wait() -> None:
    limits = AdmissionLimits(Settings())
    limits.memory.told(Memory(790 * MIB, LIMIT, "noeviction"), 1)
    assert refused(limits.enter, Asked("batch", "acme"), 16 * MIB) is Reason.STORAGE_FULL
    assert len(limits.waiting) == 0
