"""Given-up requests are kept, shown, sent again and deleted, through `hermes-serve dead-letters`
against a service.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import Result

from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable
from serve_app.journal.entries import RequestFacts, decode_facts, decode_line
from serve_app.policy.work import work_of
from serve_app.redis.keyspace import dead_letters_key
from serve_app.requests.dead_letters import DeadLetter, DeadLetters
from tests.journal.in_process import door, keys_of
from tests.journal.journal_helpers import LINE, OPENED, World
from tests.journal.test_service_commands import hermes

PATH = "/v1/organization/dead_letters"
PROMPT = "Tell me\nof \x1b[31mred\x1b[0m lighthouses, and of the sea around them, in many words."
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": PROMPT}]}).encode()
TIMEOUT_MS = 60_000


async def command(w: World, *words: str) -> Result:
    """The command, against an ingress without workers."""
    async with door(w.settings.redis.url, w.settings.namespace) as at:
        return await hermes(at, "dead-letters", *words)


def letters_of(w: World, keep: int = 100) -> DeadLetters:
    return DeadLetters(w.link, w.settings.namespace, keep)


async def kept(w: World) -> list[str]:
    """The ids of the requests that have letters, oldest first."""
    letters = [one async for one in letters_of(w).each() if isinstance(one, DeadLetter)]
    return list(dict.fromkeys(letter.request_id for letter in letters))


async def give_up(w: World, *request_ids: str, times: int = 1, keep: int = 100) -> None:
    """Make requests that have killed two engines dead letters, as the dispatcher does."""
    admitted_ms = int(time.time() * 1000) - 3_600_000
    whose = ("batch", "tenant-1", "session-1", w.settings.model.name)
    times_ms = (admitted_ms, admitted_ms + TIMEOUT_MS)
    facts = RequestFacts(*whose, True, *times_ms, w.channel, idempotency="digest", batch="batch_1")
    writer = await w.writer()
    for request_id in request_ids:
        await w.accept(request_id, facts, BODY)
        for epoch in (1, 2):
            await writer.open(request_id, epoch, b"nonce-%d" % epoch, OPENED)
        request = await w.store.read_request(request_id)
        assert request is not None
        for _ in range(times):
            await letters_of(w, keep).add(request_id, Reason.POISON, request, 2)
        (entry,) = await w.queue().claim(1)
        await w.queue().acknowledge(entry)


async def test_a_list_shows_each_letter_once_and_no_prompt(w: World) -> None:
    await give_up(w, "req_1", "req_2", times=2)
    done = await command(w, "list")
    assert (done.exit_code, done.stderr) == (0, "")
    heading, *rows = [re.split(r"\s{2,}", row) for row in done.stdout.splitlines()]
    assert heading == "when (UTC),request,reason,attempts,class,tenant,bytes".split(",")
    facts = ["poison", "2", "batch", "tenant-1", str(len(BODY))]
    assert [row[1:] for row in rows] == [["req_1", *facts], ["req_2", *facts]]
    when = time.strptime(rows[0][0], "%Y-%m-%d %H:%M:%S")
    assert abs(time.mktime(when) - time.timezone - time.time()) < 3_700
    assert "lighthouses" not in done.stdout


async def test_one_letter_is_shown_whole_and_its_body_only_if_it_is_asked_for(w: World) -> None:
    await give_up(w, "req_1")
    shown = json.loads((await command(w, "show", "req_1")).stdout)
    assert shown["line"] == json.loads(msgspec.json.encode(LINE))
    assert shown["facts"]["deadline_ms"] - shown["facts"]["admitted_ms"] == TIMEOUT_MS
    assert (shown["id"], shown["reason"], shown["attempts"]) == ("req_1", "poison", 2)
    assert "body" not in shown
    printed = (await command(w, "show", "req_1", "--text")).stdout
    assert "\x1b" not in printed, "it would control the terminal"
    shown = json.loads(printed)
    assert shown["body"] == json.loads(BODY)


async def test_a_request_that_is_sent_again_is_a_new_one_with_the_same_body(w: World) -> None:
    await give_up(w, "req_1", "req_2", times=2)
    before_ms = int(time.time() * 1000)
    done = await command(w, "redrive", "req_1")
    assert (done.exit_code, done.stderr) == (0, "")
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
    assert (facts.detached, facts.session, facts.kept) == (True, "session-1", True)
    assert facts.batch == "", "it is no line any more, and is listed"
    assert await w.store.listed("tenant-1", "", 9) == [new]
    assert entry.deadline_ms == facts.deadline_ms
    assert await w.redis.pttl(w.store.key(new)) > 0
    assert await kept(w) == ["req_2"]


async def test_all_are_sent_again(w: World) -> None:
    names = ["req_1", "req_2", "req_3"]
    await give_up(w, *names)
    done = await command(w, "redrive", "--all")
    assert [line.split(" → ")[0] for line in done.stdout.splitlines()] == names
    assert (await command(w, "list")).stdout == "no dead letters\n"
    assert [depth.waiting for depth in (await w.depths()).values()] == [0, 0, 0, 3]


async def test_only_the_newest_letters_are_kept(w: World) -> None:
    await give_up(w, *(f"req_{number}" for number in range(13)), keep=11)
    assert (newest := await kept(w)) == [f"req_{number}" for number in range(2, 13)]
    await letters_of(w).remove("req_12")
    assert await kept(w) == newest[:-1]


async def test_a_letter_that_could_not_be_deleted_is_sent_again_as_the_same_request(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await give_up(w, "req_1")

    async def lost(self: DeadLetters, request_id: str) -> None:
        raise RedisUnavailable("gone")

    async with door(w.settings.redis.url, w.settings.namespace) as at:
        with monkeypatch.context() as patched:
            patched.setattr(DeadLetters, "remove", lost)
            failed = await at.http.post(f"{PATH}/req_1/redrive")
        assert failed.json()["error"]["code"] == "journal_unavailable"
        again = await at.http.post(f"{PATH}/req_1/redrive")
    (entry,) = await w.queue("ingress-2").claim(8)
    assert again.json()["request_id"] == entry.request_id
    assert await kept(w) == []


async def test_a_letter_whose_body_was_lost_cannot_be_sent_again(w: World) -> None:
    await give_up(w, "req_1")
    await w.redis.unlink(dead_letters_key(w.settings.namespace))
    request = await w.store.read_request("req_1")
    assert request is not None
    without = {name: value for name, value in request.fields.items() if name != b"b"}
    await letters_of(w).add("req_1", Reason.POISON, request._replace(fields=without), 2)
    async with door(w.settings.redis.url, w.settings.namespace) as at:
        refused = await at.http.post(f"{PATH}/req_1/redrive")
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "journal_lost")
    assert await kept(w) == ["req_1"]


async def test_a_dropped_letter_is_gone_and_nothing_else(w: World) -> None:
    await give_up(w, "req_1", "req_2")
    assert (await command(w, "drop", "req_1")).stdout == "req_1 deleted\n"
    assert await kept(w) == ["req_2"]
    assert [depth.waiting for depth in (await w.depths()).values()] == [0, 0, 0, 0]


ASKED = [("GET", ""), ("GET", "/req_1?text=true"), ("POST", "/req_1/redrive"), ("DELETE", "/req_1")]


async def test_only_operators_see_or_touch_them(w: World, tmp_path: Path) -> None:
    await give_up(w, "req_1")
    auth = {**keys_of(tmp_path, "tenant-1", "ops"), "admin_tenants": ["ops"]}
    async with door(w.settings.redis.url, w.settings.namespace, auth=auth) as at:

        async def ask(key: str, method: str, path: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await at.http.request(method, PATH + path, headers=headers)

        refused: list[Any] = []
        for method, path in ASKED:
            for key, said in (("tenant-1", (403, "key_not_permitted")), ("?", (401, None))):
                answer = await ask(key, method, path)
                told = answer.status_code, answer.json()["error"]["code"]
                refused.append(told[0] == said[0] and said[1] in (None, told[1]))
                assert "lighthouses" not in answer.text
        assert all(refused)
        assert await kept(w) == ["req_1"]
        assert [(await ask("ops", *one)).status_code for one in ASKED[:3]] == [200] * 3
        assert (await ask("ops", "DELETE", "/req_1")).status_code == 404
        told_by = await hermes(at, "dead-letters", "list", HERMES_API_KEY="tenant-1")
    assert (told_by.exit_code, told_by.stdout) == (1, "")
    assert "auth.admin_tenants" in told_by.stderr


async def test_who_sends_one_again_or_deletes_it_is_logged(
    w: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await give_up(w, "req_1", "req_2")
    auth = {**keys_of(tmp_path, "ops"), "admin_tenants": ["ops"]}
    caplog.set_level(logging.INFO, "hermes.ingress")
    async with door(w.settings.redis.url, w.settings.namespace, auth=auth) as at:
        headers = {"authorization": "Bearer ops"}
        again = await at.http.post(f"{PATH}/req_1/redrive", headers=headers)
        await at.http.delete(f"{PATH}/req_2", headers=headers)
    who = f"tenant=ops key=key_{hashlib.sha256(b'ops').hexdigest()[:12]}"
    assert [line for line in caplog.messages if line.startswith("admin: ")] == [
        f"admin: dead_letter.redriven request=req_1 as={again.json()['request_id']} {who}",
        f"admin: dead_letter.deleted request=req_2 {who}",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("show req_9", "Dead letter with id 'req_9' not found."),
        ("redrive req_1 req_9", "no dead letter has the id req_9"),
        ("drop req_1 req_9", "no dead letter has the id req_9"),
    ],
)
async def test_an_unknown_id_is_an_error_and_nothing_is_done(
    w: World, words: str, said: str
) -> None:
    await give_up(w, "req_1")
    done = await command(w, *words.split())
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"dead-letters: {said}\n"
    assert "req_1" in (await command(w, "list")).stdout
