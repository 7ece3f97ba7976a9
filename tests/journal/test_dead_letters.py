"""Given-up requests are kept, shown and sent again, through `hermes-serve dead-letters` on a real
Redis.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from serve_app.contract import Reason
from serve_app.journal.entries import decode_facts, decode_line
from serve_app.journal.facts import RequestFacts
from serve_app.policy.work import work_of
from serve_app.request_queue.dead_letters import DeadLetters
from tests.journal.journal_helpers import LINE, OPENED, World

SCRIPT = Path(__file__).parents[2] / "scripts" / "dead-letters"
PROMPT = "Tell me\nof \x1b[31mred\x1b[0m lighthouses, and of the sea around them, in many words."
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": PROMPT}]}).encode()
TIMEOUT_MS = 60_000


def run(url: str, namespace: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The real command line."""
    return subprocess.run(
        [SCRIPT, *words, "--redis-url", url, "--namespace", namespace],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HERMES_REDIS_URL": "redis://127.0.0.1:1/0"},
    )


def command(w: World, *words: str) -> subprocess.CompletedProcess[str]:
    return run(w.settings.redis.url, w.settings.namespace, *words)


def letters_of(w: World, keep: int = 100) -> DeadLetters:
    return DeadLetters(w.link, w.settings.namespace, keep)


async def give_up(w: World, *request_ids: str, times: int = 1, keep: int = 100) -> None:
    """Make requests that have killed two engines dead letters, as the dispatcher does."""
    admitted_ms = int(time.time() * 1000) - 3_600_000
    whose = ("batch", "tenant-1", "session-1", w.settings.model.name)
    times_ms = (admitted_ms, admitted_ms + TIMEOUT_MS)
    facts = RequestFacts(*whose, True, *times_ms, w.channel, idempotency="digest")
    writer = await w.writer()
    for request_id in request_ids:
        await w.accept(request_id, facts, BODY)
        for epoch in (1, 2):
            await writer.open(request_id, epoch, b"nonce-%d" % epoch, OPENED)
        request = await w.store.read_request(request_id)
        assert request is not None
        entries = [request, *(await w.entries(request_id))[1:]]
        for _ in range(times):
            await letters_of(w, keep).add(request_id, Reason.POISON, entries)
        (entry,) = await w.queue().claim(1)
        await w.queue().acknowledge(entry)


async def test_a_list_shows_each_letter_once_and_no_prompt(w: World) -> None:
    await give_up(w, "req_1", "req_2", times=2)
    done = command(w, "list")
    assert (done.returncode, done.stderr) == (0, "")
    heading, *rows = [re.split(r"\s{2,}", row) for row in done.stdout.splitlines()]
    assert heading == "when (UTC),request,reason,attempts,class,tenant,bytes".split(",")
    facts = ["poison", "2", "batch", "tenant-1", str(len(BODY))]
    assert [row[1:] for row in rows] == [["req_1", *facts], ["req_2", *facts]]
    when = time.strptime(rows[0][0], "%Y-%m-%d %H:%M:%S")
    assert abs(time.mktime(when) - time.timezone - time.time()) < 3_700
    assert "lighthouses" not in done.stdout


async def test_one_letter_is_shown_whole_and_its_body_only_if_it_is_asked_for(w: World) -> None:
    await give_up(w, "req_1")
    shown = json.loads(command(w, "show", "req_1").stdout)
    assert shown["line"] == json.loads(msgspec.json.encode(LINE))
    assert shown["facts"]["deadline_ms"] - shown["facts"]["admitted_ms"] == TIMEOUT_MS
    assert (shown["id"], shown["reason"], shown["attempts"]) == ("req_1", "poison", 2)
    assert "body" not in shown
    printed = command(w, "show", "req_1", "--text").stdout
    assert "\x1b" not in printed, "it would control the terminal"
    shown = json.loads(printed)
    assert shown["body"] == json.loads(BODY)


async def test_a_request_that_is_sent_again_is_a_new_one_with_the_same_body(w: World) -> None:
    await give_up(w, "req_1", "req_2", times=2)
    before_ms = int(time.time() * 1000)
    done = command(w, "redrive", "req_1")
    assert (done.returncode, done.stderr) == (0, "")
    old, new = done.stdout.strip().split(" → ")
    assert old == "req_1"
    (entry,) = await w.queue("ingress-2").claim(8)
    assert (entry.request_id, entry.request_class, entry.tenant) == (new, "batch", "tenant-1")
    work = work_of(LINE.path, BODY, json.loads(BODY))
    assert (entry.prompt_tokens, entry.kind) == (work.prompt_tokens, work.kind)
    first = await w.store.read_request(new)
    assert first is not None
    assert (first.body, decode_line(first)) == (BODY, LINE)
    facts = decode_facts(first, RequestFacts)
    assert before_ms <= facts.admitted_ms <= int(time.time() * 1000)
    assert facts.deadline_ms - facts.admitted_ms == TIMEOUT_MS
    assert (facts.wake, facts.idempotency, facts.session) == ("", "", "session-1")
    assert entry.deadline_ms == facts.deadline_ms
    assert await w.redis.pttl(w.store.key(new)) > 0
    assert [letter.request_id for letter in await letters_of(w).read()] == ["req_2"]


async def test_all_are_sent_again(w: World) -> None:
    names = ["req_1", "req_2", "req_3"]
    await give_up(w, *names)
    done = command(w, "redrive", "--all")
    assert [line.split(" → ")[0] for line in done.stdout.splitlines()] == names
    assert command(w, "list").stdout == "no dead letters\n"
    assert [depth.waiting for depth in (await w.depths()).values()] == [0, 0, 0, 3]


async def test_only_the_newest_letters_are_kept(w: World) -> None:
    await give_up(w, *(f"req_{number}" for number in range(13)), keep=11)
    kept = [letter.request_id for letter in await letters_of(w).read()]
    assert kept == [f"req_{number}" for number in range(2, 13)]
    await letters_of(w).remove("req_12")
    assert [letter.request_id for letter in await letters_of(w).read()] == kept[:-1]


@pytest.mark.parametrize("words", [("show", "req_9"), ("redrive", "req_1", "req_9")])
async def test_an_unknown_id_is_an_error_and_nothing_is_done(
    w: World, words: tuple[str, ...]
) -> None:
    await give_up(w, "req_1")
    done = command(w, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dead-letters: no dead letter has the id req_9\n"
    assert "req_1" in command(w, "list").stdout


def test_a_redis_that_cannot_be_reached_is_an_error_of_one_line(namespace: str) -> None:
    done = run("redis://:secret@127.0.0.1:1/0", namespace, "list")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("dead-letters: cannot reach Redis: ")
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr
