"""The check of a batch's input file in a folder: what the index has afterwards."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from serve_app.batches.check import Checks
from serve_app.batches.lines import answered_line, asked_by, unanswered_line
from serve_app.batches.record import Batch, BatchFacts, BatchState
from serve_app.contract import CHATS, RESPONSES, Reason
from serve_app.files.storage import Storage
from serve_app.ingress.validation.bodies import Validator
from serve_app.policy.tenant_limits import Limits
from serve_app.policy.tenants import Tenant
from serve_app.settings import Settings
from tests.tables import each

INPUT, FAILED = "files/t/input", "files/t/failed"
SETTINGS = Settings.model_validate({"namespace": "n"})
MODEL = SETTINGS.model.name
FACTS = BatchFacts("batch_1", "t", "key_1", MODEL, CHATS, "file-1", INPUT, 0, 0, 1, "24h")


def line(custom_id: str, endpoint: str = CHATS, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": f"{custom_id} says hi"}]
    body = {"model": MODEL, "input" if endpoint == RESPONSES else "messages": messages, **fields}
    whole = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}
    return json.dumps(whole).encode() + b"\n"


async def one(text: bytes) -> AsyncIterator[bytes]:
    yield text


@dataclass
class World:
    storage: Storage
    checks: Checks
    tenant: Tenant | None

    async def write(self, text: bytes, path: str = INPUT) -> None:
        await self.storage.put(path, one(text))

    async def ids(self, batch: Batch, text: bytes, first: int, many: int) -> list[str]:
        rows = await self.checks.rows(batch, first, many)
        return [asked_by(text[row.offset : row.offset + row.length]).custom_id for row in rows]


@pytest.fixture
def w(tmp_path: Path) -> World:
    storage, validator = Storage(str(tmp_path)), Validator(SETTINGS, lambda _: None)
    made = World(storage, Checks(storage, validator, 1 << 20, lambda _: made.tenant), Tenant("t"))
    return made


def batch_of(**facts: Any) -> Batch:
    return Batch(replace(FACTS, **facts), BatchState.VALIDATING)


async def test_a_checked_batch_has_an_index_and_is_not_checked_again(w: World) -> None:
    text, batch = b"".join(line(str(n)) for n in range(1_000)), batch_of()
    await w.write(text)
    found = await w.checks.check(batch)
    assert (found.lines, found.errors) == (1_000, ())
    assert found.tokens > 1_000
    assert await w.ids(batch, text, 0, 1_000) == [str(n) for n in range(1_000)]
    assert await w.ids(batch, text, 998, 2) == ["998", "999"]
    await w.storage.delete([INPUT])  # whoever leads next needs no more than the index
    assert await w.checks.check(batch) == found


async def test_a_batch_that_fails_has_no_index(w: World) -> None:
    await w.write(line("a") + line("a"))
    (error,) = (await w.checks.check(batch_of())).errors
    assert (error.code, error.line) == ("duplicate_custom_id", 2)
    with pytest.raises(FileNotFoundError):
        await w.checks.rows(batch_of(), 0, 1)


@each(
    "endpoint, fields, param",
    [
        (CHATS, {"stream": True}, "stream"),
        (CHATS, {"model": "another"}, "model"),
        (CHATS, {"temperature": 9}, "temperature"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_what_no_line_can_ask_is_a_bad_line(
    w: World, endpoint: str, fields: dict[str, Any], param: str
) -> None:
    batch = batch_of(id=f"batch_{param}", endpoint=endpoint)
    await w.write(line("a", endpoint, **fields) + line("b", endpoint, stream=False))
    assert (await w.checks.check(batch)).lines == 2
    bad, good = await w.checks.rows(batch, 0, 2)
    assert (bad.line, bad.refusal.param, good.bad) == (1, param, False)


async def test_a_tenant_gets_the_models_of_its_policy_and_its_tokens(w: World) -> None:
    await w.write(line("a", max_tokens=500))
    w.tenant = Tenant("t", limits=Limits(max_output_tokens=10))
    assert 10 < (await w.checks.check(batch_of(id="batch_a"))).tokens < 500
    w.tenant = Tenant("t", models=("another",))
    await w.checks.check(batch_of(id="batch_b"))
    (row,) = await w.checks.rows(batch_of(id="batch_b"), 0, 1)
    assert row.refusal.reason is Reason.MODEL_NOT_FOUND
    w.tenant = None
    assert (await w.checks.check(batch_of(id="batch_c"))).lines == 1


async def test_a_batch_that_goes_on_has_the_lines_of_the_error_file(w: World) -> None:
    text = b"".join(line(str(n)) for n in range(100))
    await w.write(text)
    failed = [
        answered_line("batch_a", "", str(n), 400, b'{"error": {}}') for n in range(0, 100, 10)
    ]
    await w.write(b"".join([*failed, unanswered_line("batch_a", "99", "expired")]), FAILED)
    batch = batch_of(retried_path=FAILED)
    assert (await w.checks.check(batch)).lines == 11
    assert await w.ids(batch, text, 0, 11) == [*map(str, range(0, 100, 10)), "99"]
