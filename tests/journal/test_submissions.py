"""Submissions without a connection: nobody follows the request, and nobody waits for its answer."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app import timings
from serve_app.admission.submission import Submission
from serve_app.contract import Reason, State
from serve_app.errors import AnswerLost
from serve_app.journal.ids import REQUEST_ID
from serve_app.policy.work import Work
from tests.journal.admitting import BODY, admitting, ending, journals
from tests.journal.cable import UNANSWERED, Cable
from tests.journal.journal_helpers import LINE, OPENED, World, add, finish, world

SOON: dict[str, Any] = {"ingress": {"disconnect_grace_s": 0.05}}


def submission(key: str = "", session: str = "session") -> Submission:
    return Submission(
        tenant="tenant",
        line=LINE,
        body=BODY,
        model="hermes-tiny",
        request_class="batch",
        session=session,
        timeout_s=60.0,
        work=Work(7),
        idempotency_key=key,
    )


async def test_a_request_without_a_connection_waits_in_the_queue_and_runs_to_its_end(
    redis_url: str, namespace: str
) -> None:
    async with world(redis_url, namespace, **SOON) as w, admitting(w) as its:
        receipt = await its.admission.submit(submission())
        assert (receipt.repeat, receipt.ended, receipt.facts.wake) == (False, False, "")
        (entry,) = await w.entries(receipt.request_id)
        assert (entry.id, entry.has_body) == (REQUEST_ID, False)
        assert await w.redis.get(w.store.body_key(receipt.request_id)) == BODY
        (claimed,) = await w.queue().claim(10)
        assert (claimed.request_id, claimed.request_class) == (receipt.request_id, "batch")
        assert not its.followers.request_ids
        writer = await w.writer()
        attempt, _ = await writer.open(receipt.request_id, 1, b"nonce", OPENED)
        add(attempt, 1)
        finish(attempt)
        await attempt.closed
        assert await ending(w, receipt.request_id) == State.COMPLETED


async def test_its_place_is_freed_once_however_often_it_has_begun(w: World) -> None:
    async with admitting(w) as its:
        first, second = [await its.admission.submit(submission()) for _ in range(2)]
        assert len(its.limits.waiting) == 2
        first.begun()
        first.begun()
        assert len(its.limits.waiting) == 1
        second.begun()
        assert len(its.limits.waiting) == 0
        assert its.limits.memory._on_their_way_bytes == 0


async def test_a_repeat_of_its_key_is_the_same_request_and_takes_no_place(w: World) -> None:
    async with admitting(w) as its:
        first = await its.admission.submit(submission("a key"))
        again = await its.admission.submit(submission("a key"))
        assert again.request_id == first.request_id
        assert (again.repeat, again.ended) == (True, False)
        again.begun()
        assert len(its.limits.waiting) == 1, "it still waits"
        assert await w.endings.end(first.request_id, State.FAILED, Reason.POISON)
        assert (await its.admission.submit(submission("a key"))).ended


@pytest.mark.parametrize("key", ["", "a key"])
async def test_a_request_without_a_connection_whose_admission_was_not_answered_is_cancelled(
    redis_url: str, namespace: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "ADMISSION_MAY_COME_S", 3600.0)  # it has come already
    cable = Cable(redis_url)
    await cable.start()
    async with world(cable.url, namespace, **SOON) as w, admitting(w) as its:
        cable.cut("EXEC", UNANSWERED)
        with pytest.raises(AnswerLost):
            await its.admission.submit(submission(key))
        assert len(its.limits.waiting) == 1, "it may wait"
        await its.quiet()
        assert len(its.limits.waiting) == 0
        (request_id,) = await journals(w)
        assert await ending(w, request_id) == Reason.CLIENT_DISCONNECTED
    cable.drop()


async def test_a_submission_that_cannot_be_encoded_leaves_no_place_behind(w: World) -> None:
    async with admitting(w) as its:
        with pytest.raises(UnicodeEncodeError):
            await its.admission.submit(submission(session="\ud800"))
        assert len(its.limits.waiting) == 0
        assert its.limits.memory._on_their_way_bytes == 0
        assert await journals(w) == []
