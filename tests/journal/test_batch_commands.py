"""`hermes-serve batch` against a service: a file is run, also where the command ends before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app import timings
from serve_app.cli import batch
from tests.journal.in_process import Door, door, in_process, settings_of
from tests.journal.test_batches_api import line
from tests.journal.test_service_commands import hermes, printed
from tests.waiting import eventually


def files_in(folder: Path) -> dict[str, Any]:
    return {"files": {"storage": str(folder / "storage")}}


def written(folder: Path, *lines: dict[str, Any]) -> tuple[str, ...]:
    """The words that run these lines."""
    file = folder / "requests.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return "batch", "run", str(file), "-o", str(folder / "answers.jsonl")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("answers*"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command looks often."""
    monkeypatch.setattr(timings, "PROGRESS_LOOK_S", 0.01)


async def ids(at: Door) -> list[str]:
    return [one["id"] for one in (await at.http.get("/v1/batches")).json()["data"]]


async def test_a_file_is_run_and_its_answers_are_fetched(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    words = written(tmp_path, line("a", max_tokens=3), line("b", n=0), line("c", max_tokens=3))
    async with in_process(settings_of(redis_url, namespace, **files_in(tmp_path))) as at:
        done = await hermes(at, *words)
        (batch_id,) = await ids(at)
        last = f"{batch_id} completed: 2 of 3 lines done, 1 failed"
        assert (done.exit_code, done.stdout.splitlines()) == (1, [last])
        answers = (tmp_path / "answers.jsonl").read_text().splitlines()
        assert {json.loads(one)["custom_id"] for one in answers} == {"a", "c"}
        (refused,) = (tmp_path / "answers.jsonl.errors").read_text().splitlines()
        assert json.loads(refused)["custom_id"] == "b"
        assert left(tmp_path) == ["answers.jsonl", "answers.jsonl.errors"]
        shown = await printed(at, "batch", "show", batch_id)
        rows = {row.split("  ")[0]: row for row in shown.splitlines()}
        assert rows["status"].endswith("completed")
        assert rows["created"].endswith(" UTC")
        assert "details" not in rows["usage"]
        assert batch_id in await printed(at, "batch", "list")


async def test_a_repeated_command_goes_on_with_the_same_batch(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = written(tmp_path, line("a", max_tokens=3))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    followed = batch._followed
    monkeypatch.setattr(batch, "_followed", interrupted)
    async with door(redis_url, namespace, **files_in(tmp_path)) as at:
        done = await hermes(at, *words)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "run the same command again" in done.stderr
        (batch_id,) = await ids(at)
        assert not (tmp_path / "answers.jsonl").exists()
    monkeypatch.setattr(batch, "_followed", followed)
    async with in_process(settings_of(redis_url, namespace, **files_in(tmp_path))) as at:
        assert await printed_last(at, *words) == f"{batch_id} completed: 1 of 1 lines done"
        assert await ids(at) == [batch_id]


async def printed_last(at: Door, *words: str) -> str:
    done = await hermes(at, *words)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()[-1]


async def test_another_file_is_not_taken_for_the_one_that_was_begun(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    words = written(tmp_path, line("a"))
    (tmp_path / "answers.jsonl.batch").write_text("batch-run-0 of-another-file\n")
    async with door(redis_url, namespace, **files_in(tmp_path)) as at:
        done = await hermes(at, *words)
        assert done.exit_code == 1
        assert "belongs to a batch of another file" in done.stderr
        assert await ids(at) == []


async def test_what_is_wrong_with_a_file_is_said_by_line(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    words = written(tmp_path, line("a"), line("a"))
    async with in_process(settings_of(redis_url, namespace, **files_in(tmp_path))) as at:
        done = await hermes(at, *words)
        assert done.exit_code == 1
        assert "failed: 0 of" in done.stdout
        assert "line 2: " in done.stderr


async def test_a_batch_is_cancelled(redis_url: str, namespace: str, tmp_path: Path) -> None:
    async with door(redis_url, namespace, **files_in(tmp_path)) as at:
        body = {"requests": [line("a")], "endpoint": "/v1/chat/completions"}
        made = await at.http.post("/v1/batches", json={**body, "completion_window": "24h"})
        batch_id = made.json()["id"]
        said = await printed(at, "batch", "cancel", batch_id)
        assert said in (f"{batch_id} cancelling\n", f"{batch_id} cancelled\n")
        await eventually(lambda: _is(at, batch_id, "cancelled"))


async def _is(at: Door, batch_id: str, state: str) -> bool:
    return bool((await at.http.get(f"/v1/batches/{batch_id}")).json()["status"] == state)
